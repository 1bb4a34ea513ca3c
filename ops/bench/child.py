"""Become a command that ends with the bench: `python -m ops.bench.child COMMAND …`."""

from __future__ import annotations

import os
import signal
import sys

from worker.process import signal_on_parents_death

if __name__ == "__main__":
    signal_on_parents_death(signal.SIGTERM)
    os.execvp(sys.argv[1], sys.argv[1:])

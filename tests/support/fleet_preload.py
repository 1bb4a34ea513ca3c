"""RQ settings module (`RQ_CONFIG`) for stock workers in tests: import in the worker, once, what each of its
work-horses would import again for 2-3 seconds. The worker class and all that runs stay RQ's and ours.

`FLEET_GATE`: a file without which the worker does not begin to listen.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import worker.model
import worker.runtime  # noqa: F401
from worker.settings import load_settings
from worker.tools.toolbox import load_toolbox

WAIT_MAX_S = 180

_settings = load_settings()
load_toolbox(_settings.tool_modules, _settings)

if _gate := os.environ.get("FLEET_GATE"):
    _until = time.monotonic() + WAIT_MAX_S
    while not Path(_gate).exists() and time.monotonic() < _until:
        time.sleep(0.02)

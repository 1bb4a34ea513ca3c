"""Whole drills in processes of their own, several at a time: most of a drill is waiting for leases and models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RUN_MAX_S = 280
AT_ONCE = 3


@dataclass(frozen=True)
class Done:
    """A drill that is over."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """What --json printed; nothing else may stand there."""
        found = json.loads(self.out)
        assert isinstance(found, dict)
        return found


def run_drill(home: Path, *args: str | Path, timeout: float = RUN_MAX_S, **environ: str) -> Done:
    """`baton drill …` in a directory of its own."""
    program = Path(sys.executable).with_name("baton")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("BATON_", "DRILL_"))}
    argv = [program, "drill", "--dir", home, *args]
    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=timeout, check=False, env=kept | environ, cwd=home.parent
    )
    return Done(done.returncode, done.stdout, done.stderr)


@dataclass
class Drills:
    """Drills by name; asking for one of several begins them all."""

    root: Path
    args: dict[str, Sequence[str | Path]]
    wanted: Sequence[str]
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(AT_ONCE))
    _runs: dict[str, Future[Done]] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Done:
        for one in (name, *self.wanted):
            if one not in self._runs:
                self._runs[one] = self._pool.submit(run_drill, self.root / one, *self.args[one])
        return self._runs[name].result()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

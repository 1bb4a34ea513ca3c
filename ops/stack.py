"""The local stack's parts: what supervisord runs, in which environment, and how its logs are shown.

Nothing secret and no path is written into the configuration: children get both through their environment.
"""

from __future__ import annotations

import math
import os
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import click
from dotenv import dotenv_values
from pydantic import SecretStr

from ops.processes import size_of
from worker.settings import PREFIX, Settings

LOG_MAX = "5MB"
START_RETRIES = 1_000_000  # never give up: a stack that is up keeps trying, one second slower each time
FAREWELL_S = 5.0  # after the drain's grace: what the pool needs to end, and some air
SUPERVISOR_LOCK = "supervisord.lock"  # held by the supervisord that runs the stack

HEAD = f"""\
; Written anew by each `baton up`; changes are lost.
[supervisord]
nodaemon=true
silent=true
logfile=logs/supervisor.log
logfile_maxbytes={LOG_MAX}
logfile_backups=1
pidfile=supervisord.pid
childlogdir=logs
minfds=256
minprocs=64
{{user}}
"""

PROGRAM = f"""\
[program:{{name}}]
command={{command}}
directory={{directory}}
process_name={{process_name}}
numprocs={{count}}
priority={{priority}}
autorestart=true
startsecs=1
startretries={START_RETRIES}
stopwaitsecs={{stop_s}}
stopasgroup=false
killasgroup=true
redirect_stderr=true
stdout_logfile=logs/{{process_name}}.log
stdout_logfile_maxbytes={LOG_MAX}
stdout_logfile_backups=1
"""


@dataclass(frozen=True)
class Program:
    """One supervised command. Lower priorities start first and stop last."""

    name: str
    command: str
    priority: int
    stop_s: int = 10
    count: int = 1
    in_state_dir: bool = False

    def section(self) -> str:
        return PROGRAM.format(
            name=self.name,
            command=self.command,
            directory="." if self.in_state_dir else "%(ENV_BATON_UP_CWD)s",
            process_name=self.name if self.count == 1 else f"{self.name}-%(process_num)d",
            count=self.count,
            priority=self.priority,
            stop_s=self.stop_s,
        )


def worker_stop_s(settings: Settings) -> int:
    """How long workers are given to drain before supervisord kills what is left."""
    return math.ceil(settings.drain_grace_s + FAREWELL_S)


def programs(
    settings: Settings,
    workers: int,
    *,
    server: bool,
    standby: bool,
    dashboard_port: int | None,
    worker_class: str = "fork",
) -> list[Program]:
    """Everything that is to run. Each part but the server waits for the server, then *becomes* its command."""
    launcher = f"{Path(sys.executable).name} -P -m ops.valkey"
    found = []
    if server:
        command = f"{launcher} serve valkey --from-env --with-parent" + (" --standby" if standby else "")
        found.append(Program("valkey", command, priority=10, in_state_dir=True))
    if workers:
        # Without names: a fixed one is refused for minutes after a kill -9. SIGTERM drains them.
        stop_s = worker_stop_s(settings)
        if worker_class == "stock":  # these cannot share anything, so each is a program
            command = f"{launcher} wait rq worker {settings.queue}"
            found.append(Program("worker", command, priority=20, stop_s=stop_s, count=workers))
        else:
            python = f"{Path(sys.executable).name} -P"
            options = f"--workers {workers} --worker-class {worker_class} --queue {settings.queue}"
            command = f"{launcher} wait {python} -m ops.pool {options}"
            found.append(Program("pool", command, priority=20, stop_s=stop_s))
    found.append(Program("sweeper", f"{launcher} wait baton sweep", priority=30))
    if dashboard_port is not None:
        command = f"{launcher} wait rq-dashboard -b 127.0.0.1 -p {dashboard_port} --disable-delete"
        found.append(Program("dashboard", command, priority=40, stop_s=5))
    return found


def configuration(parts: list[Program]) -> str:
    """The text of supervisord.conf, for a supervisord that is started in the state directory."""
    user = "user=root" if os.geteuid() == 0 else ""  # without it supervisord complains at each start
    return "\n".join([HEAD.format(user=user), *(part.section() for part in parts)])


def environment(settings: Settings) -> dict[str, str]:
    """What the children inherit: our environment, `.env` behind it, and the settings at hand before both."""
    dotenv = {key: value for key, value in dotenv_values(".env").items() if value is not None}
    environ = {**dotenv, **os.environ}
    given = settings.model_fields_set | {"redis_url", "key_prefix", "queue"}
    for name in given:
        value = getattr(settings, name)
        environ[PREFIX + name.upper()] = value.get_secret_value() if isinstance(value, SecretStr) else str(value)
    # In the environment, not on command lines: a URL may hold a password, and `ps` shows those to everybody.
    environ["RQ_REDIS_URL"] = environ["RQ_DASHBOARD_REDIS_URL"] = settings.redis_url
    bin_dirs = [str(Path(sys.executable).parent), sysconfig.get_path("scripts"), environ.get("PATH", "")]
    environ["PATH"] = os.pathsep.join(dict.fromkeys(part for part in bin_dirs if part))
    environ["BATON_UP_CWD"] = str(Path.cwd())
    environ["BATON_UP_LOGS"] = str(settings.state_dir.absolute() / "logs")
    environ["BATON_UP_LOCK"] = str(settings.state_dir.absolute() / SUPERVISOR_LOCK)
    environ["PYTHONUNBUFFERED"] = "1"
    return environ


@dataclass
class LogTail:
    """Shows what is appended to `directory`/*.log from now on, each line behind its program's name."""

    directory: Path
    show: Callable[[str], None] = click.echo
    hidden: frozenset[str] = frozenset({"valkey"})  # two dozen lines at each start that no user of Baton needs
    _read: dict[Path, int] = field(default_factory=dict, init=False)
    _rest: dict[Path, bytes] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._read = {path: size_of(path) for path in self._files()}

    def pump(self) -> None:
        """Show what is new."""
        for path in self._files():
            self._pump_one(path)

    def _files(self) -> list[Path]:
        return sorted(path for path in self.directory.glob("*.log") if path.stem not in self.hidden)

    def _pump_one(self, path: Path) -> None:
        seen, size = self._read.get(path, 0), size_of(path)
        if size == seen:
            return
        if size < seen:  # rotated: this is a new file
            seen, self._rest[path] = 0, b""
        with path.open("rb") as log:
            log.seek(seen)
            new = log.read()
        self._read[path] = seen + len(new)
        *lines, self._rest[path] = (self._rest.get(path, b"") + new).split(b"\n")
        for line in lines:
            self.show(f"{path.stem:<11}| {line.decode(errors='replace').rstrip()}")

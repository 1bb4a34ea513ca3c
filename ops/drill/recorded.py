"""Tools module (`BATON_TOOLS`) of a drill's workers: the tools under test, and the built-in ones, all recorded."""

from __future__ import annotations

import os
from pathlib import Path

from ops.drill.effects import LOG_VARIABLE, TOOLS_VARIABLE, record
from worker.settings import load_settings
from worker.tools import Tool, load_toolbox


def _recorded() -> list[Tool]:
    modules = os.environ[TOOLS_VARIABLE].split(",")
    return [record(tool, Path(os.environ[LOG_VARIABLE])) for tool in load_toolbox(modules, load_settings())]


TOOLS = _recorded()

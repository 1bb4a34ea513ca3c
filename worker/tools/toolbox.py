"""The tools a worker offers, by name, and where they are loaded from."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from worker.errors import InvalidInput
from worker.settings import Settings
from worker.tools.base import Tool
from worker.tools.context import ToolDefinitionError

BUILTIN = "worker.tools.builtin"
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


class Toolbox:
    """Tools with unique names. Iterates in order of the names."""

    def __init__(self, tools: Iterable[Tool]) -> None:
        self._tools: dict[str, Tool] = {}
        for tool in tools:
            other = self._tools.setdefault(tool.name, tool)
            if other is not tool:
                raise ToolDefinitionError(
                    f"two tools are called {tool.name}: {other.source} and {tool.source}; rename one with @tool(name=…)"
                )

    def get(self, name: str) -> Tool | None:
        return self._tools.get(name)

    def definitions(self, allow: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """Definitions for the API, sorted by name; only those named by `allow`, if given.

        Raises InvalidInput naming a tool that does not exist and those that do.
        """
        if allow is not None and (unknown := sorted(set(allow) - set(self._tools))):
            exist = ", ".join(sorted(self._tools)) or "none"
            raise InvalidInput(f"there is no tool called {', '.join(unknown)}; there are: {exist}")
        return [tool.definition() for tool in self if allow is None or tool.name in allow]

    def __iter__(self) -> Iterator[Tool]:
        return iter([self._tools[name] for name in sorted(self._tools)])

    def __len__(self) -> int:
        return len(self._tools)


def load_toolbox(modules: Iterable[str], settings: Settings) -> Toolbox:
    """The built-in tools and those of `modules` (absolute module names, found from the working directory too).

    Collects the Tool objects that stand at the top of a module, imported ones included, and in its list
    `TOOLS`. `settings` is here for modules that will need it to make their tools. Raises ToolDefinitionError,
    naming the module and the cause in a sentence.
    """
    _put_cwd_on_path()
    return Toolbox(tool for name in dict.fromkeys((BUILTIN, *modules)) for tool in _tools_of(_import(name)))


def _put_cwd_on_path() -> None:
    """As `python -m` does. The `rq` script puts its own directory there instead, so users' modules would be missed."""
    here = str(Path.cwd())
    if "" not in sys.path and here not in sys.path:
        sys.path.insert(0, here)


def _import(name: str) -> ModuleType:
    if not _MODULE.fullmatch(name):
        raise ToolDefinitionError(
            f"BATON_TOOLS: {name!r} is no module name; write `my_tools` or `my.tools`, not a file or a path"
        )
    try:
        return importlib.import_module(name)
    except ToolDefinitionError as error:
        raise ToolDefinitionError(f"tools module {name}: {error}") from error
    except (Exception, SystemExit) as error:  # whatever somebody's module does while it is imported; a script exits
        raise ToolDefinitionError(f"tools module {name} cannot be imported: {type(error).__name__}: {error}") from error


def _tools_of(module: ModuleType) -> list[Tool]:
    listed = getattr(module, "TOOLS", ())
    if not isinstance(listed, (list, tuple)) or not all(isinstance(item, Tool) for item in listed):
        raise ToolDefinitionError(f"tools module {module.__name__}: TOOLS must be a list of functions marked @tool")
    found = [value for value in vars(module).values() if isinstance(value, Tool)] + list(listed)
    if not found:
        raise ToolDefinitionError(f"tools module {module.__name__} has no tool: mark its functions with @tool")
    return found

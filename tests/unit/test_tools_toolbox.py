"""Finding tools by name, and loading them from modules."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from worker.errors import InvalidInput
from worker.settings import load_settings
from worker.tools import Effect, Tool, Toolbox, ToolDefinitionError, load_toolbox, tool

BUILTIN = {
    "fetch_url": Effect.READ_ONLY,
    "grep": Effect.READ_ONLY,
    "list_dir": Effect.READ_ONLY,
    "read_file": Effect.READ_ONLY,
    "send_email": Effect.SIDE_EFFECT,
    "write_file": Effect.IDEMPOTENT,
}

Module = Callable[[str, str], None]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Module]:
    """Writes a module into the working directory, which is not on sys.path, as under the `rq` script."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(Path.cwd()))])
    before = set(sys.modules)

    def write(name: str, text: str) -> None:
        (tmp_path / f"{name}.py").write_text(text)
        importlib.invalidate_caches()

    yield write
    for name in set(sys.modules) - before:
        if name.startswith("toolbox_case"):
            del sys.modules[name]


def named(name: str) -> Tool:
    return tool(name=name)(lambda: None)


def load(*modules: str) -> Toolbox:
    return load_toolbox(modules, load_settings({}))


def test_the_built_in_tools_are_always_there_with_their_effects() -> None:
    assert {t.name: t.effect for t in load()} == BUILTIN
    assert all(len(t.description) > 80 for t in load())


def test_tools_are_loaded_from_the_working_directory(module: Module) -> None:
    module(
        "toolbox_case_a",
        "from worker.tools import tool\n"
        "@tool\ndef mine(n: int) -> int: return n\n"
        "def plain(): pass\n"
        "def _make():\n    @tool\n    def hidden() -> None: ...\n    return hidden\n"
        "TOOLS = [_make(), mine]\n",
    )
    toolbox = load("toolbox_case_a", "toolbox_case_a")
    assert {t.name for t in toolbox} - set(BUILTIN) == {"mine", "hidden"}
    assert len(toolbox) == len(BUILTIN) + 2
    assert toolbox.get("mine") is not None
    assert toolbox.get("plain") is None


def test_a_tool_imported_by_two_modules_is_one_tool(module: Module) -> None:
    module("toolbox_case_b", "from worker.tools import tool\n@tool\ndef shared() -> None: ...\n")
    module("toolbox_case_c", "from toolbox_case_b import shared\n")
    assert len(load("toolbox_case_b", "toolbox_case_c")) == len(BUILTIN) + 1


def test_two_tools_of_one_name_are_refused_with_both_sources(module: Module) -> None:
    module("toolbox_case_d", "from worker.tools import tool\n@tool\ndef grep() -> None: ...\n")
    with pytest.raises(ToolDefinitionError) as caught:
        load("toolbox_case_d")
    assert "toolbox_case_d.grep" in str(caught.value)
    assert "worker.tools.builtin.search.grep" in str(caught.value)


BROKEN = [
    ("import nowhere_at_all\n", "No module named 'nowhere_at_all'"),
    ("def broken(:\n", "SyntaxError"),
    ("1 / 0\n", "ZeroDivisionError"),
    ("x = 1\n", "has no tool"),
    ("TOOLS = [print]\n", "TOOLS must be a list"),
    ("from worker.tools import tool\n@tool\ndef f(*a: int) -> None: ...\n", "`a`"),
]


@pytest.mark.parametrize(("text", "words"), BROKEN)
def test_a_module_that_cannot_be_used_is_named_with_the_cause(module: Module, text: str, words: str) -> None:
    module("toolbox_case_e", text)
    with pytest.raises(ToolDefinitionError) as caught:
        load("toolbox_case_e")
    assert "toolbox_case_e" in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.parametrize("name", ["toolbox_case_missing", "tools.py/", "./tools", "a b", ".tools", "a..b"])
def test_what_is_no_module_is_refused_by_name(name: str) -> None:
    with pytest.raises(ToolDefinitionError) as caught:
        load(name)
    assert name in str(caught.value)


def test_definitions_are_sorted_and_can_be_limited() -> None:
    toolbox = Toolbox([named("b"), named("c"), named("a")])
    assert [d["name"] for d in toolbox.definitions()] == ["a", "b", "c"]
    assert [d["name"] for d in toolbox.definitions(["c", "a", "c"])] == ["a", "c"]
    assert toolbox.definitions([]) == []


def test_an_unknown_name_in_the_limit_is_refused_with_what_exists() -> None:
    with pytest.raises(InvalidInput) as caught:
        Toolbox([named("b"), named("a")]).definitions(["a", "nope"])
    assert "nope" in str(caught.value)
    assert "a, b" in str(caught.value)


def test_the_tools_layer_pulls_in_neither_the_model_nor_the_queue() -> None:
    """It is loaded by processes that must start fast; and no tool may reach Baton's own state."""
    code = (
        "import sys; from worker.tools import load_toolbox; from worker.settings import load_settings;"
        "load_toolbox([], load_settings({}));"
        "sys.exit(' '.join({'anthropic', 'rq', 'redis'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).stderr.strip() == b""


def test_a_module_that_exits_when_it_is_imported_is_named(module: Module) -> None:
    """A script without a main guard: SystemExit went through every `except Exception`, and tasks died of it."""
    module("script_tools", "import sys; sys.exit('usage: script_tools FILE')")
    with pytest.raises(ToolDefinitionError, match="script_tools cannot be imported: SystemExit: usage"):
        load_toolbox(["script_tools"], load_settings({}))

"""Documents are checked against the code they speak of: a promise nobody keeps is worse than none."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ops.cli import COMMANDS
from ops.show_settings import markdown_table
from worker.crashpoints import POINTS
from worker.settings import PREFIX, Settings, load_settings
from worker.state.keys import Keys
from worker.tools import load_toolbox

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_settings_table_of_the_readme_is_the_one_the_code_prints() -> None:
    """Written by `baton settings --markdown`; a new setting without a line here is a setting nobody knows."""
    _, _, rest = README.partition("<!-- settings: `baton settings --markdown` -->\n")
    assert rest.partition("\n<!-- /settings -->")[0] == markdown_table()


@pytest.mark.parametrize("document", ["README.md", "ARCHITECTURE.md", ".env.example", "docker-compose.yml"])
def test_every_variable_a_document_names_exists(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    named = set(re.findall(r"\bBATON_[A-Z_]+\b", text))
    known = {PREFIX + name.upper() for name in Settings.model_fields}
    no_settings = {"BATON_DASHBOARD_PASSWORD", "BATON_DASHBOARD_USER", "BATON_HOLDER", "BATON_LOG_LEVEL"}
    assert named - known - no_settings == set()


@pytest.mark.parametrize("document", ["README.md", "ARCHITECTURE.md"])
def test_every_file_a_document_names_exists(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    named = re.findall(r"`((?:worker|enqueue|ops)/[\w/.*]+)`", text)
    assert named
    assert [name for name in named if not list(ROOT.glob(name.rstrip("/")))] == []


def test_every_baton_command_the_readme_uses_exists() -> None:
    used = set(re.findall(r"\bbaton ([a-z][a-z-]+)", README))
    words = {"agents"}
    assert used - set(COMMANDS) - words == set()


def test_the_readme_names_crash_points_that_exist() -> None:
    assert set(re.findall(r"CRASH_AFTER=([a-z-]+)", README)) <= set(POINTS)


def test_every_key_function_says_type_writer_and_meaning() -> None:
    """One file lists every key; a function without a docstring is a key nobody has thought about."""
    for name in ("task", "checkpoint", "messages", "ledger", "started", "lock", "epoch", "control", "events"):
        docstring = getattr(Keys, name).__doc__
        assert docstring, name
        assert re.match(r"(hash|list|string|stream|zset)", docstring), name


@pytest.mark.parametrize("command", ["enqueue-task", "baton"])
def test_help_is_printed_and_costs_no_heavy_import(command: str) -> None:
    program = Path(sys.executable).with_name(command)
    done = subprocess.run([program, "--help"], capture_output=True, text=True, timeout=60, check=True)
    assert "Exit codes" in done.stdout


def test_no_file_in_the_three_packages_is_over_300_lines() -> None:
    long = {
        str(path.relative_to(ROOT)): count
        for package in ("worker", "enqueue", "ops")
        for path in (ROOT / package).rglob("*.py")
        if (count := len(path.read_text(encoding="utf-8").splitlines())) > 300
    }
    assert long == {}


def test_the_tools_of_the_readme_load_and_say_what_they_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"```python\n(# mytools\.py.*?)```", README, re.DOTALL)
    (tmp_path / "mytools.py").write_text(code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    toolbox = load_toolbox(["mytools"], load_settings({}))
    effects = {name: str(known.effect) for name in ("price", "charge") if (known := toolbox.get(name))}
    assert effects == {"price": "read_only", "charge": "side_effect"}

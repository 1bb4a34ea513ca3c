"""Settings: from BATON_* and `.env`, wrong ones named, secrets never shown."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from worker.errors import InvalidSettings
from worker.settings import PREFIX, Settings, load_settings


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def test_every_setting_says_what_it_is_for() -> None:
    """The README's table is made of these."""
    assert [name for name, field in Settings.model_fields.items() if not field.description] == []


def test_the_environment_wins_over_the_file_and_overrides_over_both(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / ".env").write_text("BATON_QUEUE=file\nBATON_MODEL=file\nBATON_SYSTEM=file\n# a comment\n")
    monkeypatch.setenv("BATON_QUEUE", "environment")
    monkeypatch.setenv("BATON_MODEL", "environment")
    found = load_settings(model="override")
    assert (found.queue, found.model, found.system) == ("environment", "override", "file")


def test_an_empty_variable_counts_as_unset() -> None:
    """The usual blank of a compose file: `BATON_QUEUE: ${BATON_QUEUE:-}`."""
    assert load_settings({"BATON_QUEUE": "", "BATON_TURNS_MAX": ""}) == load_settings({})


def test_an_explicit_environment_reads_no_file(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("BATON_QUEUE=file\n")
    assert load_settings({}).queue == "agents"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("BATON_TURNS_MAX", "0"), ("BATON_TURNS_MAX", "many"), ("BATON_LEASE_TTL_MS", "10"),
        ("BATON_SWEEP_PERIOD_S", "0"),
        ("BATON_KEY_PREFIX", "a:b"), ("BATON_KEY_PREFIX", "x" * 65), ("BATON_QUEUE", "a b"), ("BATON_THINKING", "lots"),
        ("BATON_CRASHES_IN_ROW_MAX", "0"), ("BATON_RETENTION_S", "-1"), ("BATON_FETCH_PRIVATE", "perhaps"),
    ],
)  # fmt: skip
def test_a_wrong_variable_is_named(name: str, value: str) -> None:
    with pytest.raises(InvalidSettings, match=name):
        load_settings({name: value})


def test_all_wrong_variables_are_named_at_once() -> None:
    with pytest.raises(InvalidSettings, match=r"BATON_QUEUE.*BATON_TURNS_MAX|BATON_TURNS_MAX.*BATON_QUEUE"):
        load_settings({"BATON_QUEUE": "a b", "BATON_TURNS_MAX": "x"})


@pytest.mark.parametrize(("ttl", "margin", "good"), [(1000, 500, True), (1000, 501, False), (15_000, 7_500, True)])
def test_a_margin_must_leave_half_of_the_lease(ttl: int, margin: int, good: bool) -> None:
    values = {"BATON_LEASE_TTL_MS": str(ttl), "BATON_LEASE_MARGIN_MS": str(margin)}
    if good:
        assert load_settings(values).lease_margin_ms == margin
    else:
        with pytest.raises(InvalidSettings, match="BATON_LEASE_MARGIN_MS"):
            load_settings(values)


def test_secrets_are_not_shown() -> None:
    secret = "smtp://user:hunter2@mail:25"
    found = load_settings({"BATON_SMTP_URL": secret})
    assert "hunter2" not in repr(found)
    assert found.smtp_url.get_secret_value() == secret
    with pytest.raises(InvalidSettings) as refused:
        load_settings({"BATON_SMTP_URL": secret, "BATON_QUEUE": "my secret queue"})
    assert "hunter2" not in str(refused.value)
    assert "secret queue" not in str(refused.value), "a password pasted into the wrong variable stays unseen"


def test_settings_cannot_change_under_a_running_worker() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_settings({}).queue = "other"  # type: ignore[misc]


@pytest.mark.parametrize(("tools", "modules"), [("", ()), ("a", ("a",)), (" a , b,,", ("a", "b"))])
def test_tool_modules_are_split(tools: str, modules: tuple[str, ...]) -> None:
    assert load_settings({"BATON_TOOLS": tools}).tool_modules == modules

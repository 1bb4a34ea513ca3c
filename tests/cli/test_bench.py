"""`baton bench` works: every item gives numbers. What the numbers are is for a quiet machine to say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from ops.bench.command import ITEMS, run, show
from ops.bench.rows import Bar, Row
from ops.bench.size import Size
from ops.cli import cli
from worker.errors import BatonError

pytestmark = [pytest.mark.server, pytest.mark.fleet]


@pytest.mark.timeout(240)
@pytest.mark.usefixtures("server_binary")
def test_every_item_gives_numbers(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    result = CliRunner().invoke(cli, ["bench", "--tiny", "--out", str(out)])
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())
    assert found["machine"]["cpus"]
    missing = [row for row in found["rows"] if row["ours"] is None or row["ours"] <= 0]
    assert not missing
    assert len(found["rows"]) >= len(ITEMS)


@pytest.mark.usefixtures("server_binary")
def test_an_item_that_cannot_be_measured_says_so_and_leaves_the_rest_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> list[Row]:
        raise RuntimeError("no such luck")

    monkeypatch.setitem(ITEMS, "sweep", type(ITEMS["sweep"])("a sweep", broken))
    rows = run(("sweep", "enqueue"), Size("tiny"))["rows"]
    assert rows[0]["note"] == "skipped: no such luck"
    assert [row["ours"] is None for row in rows] == [True, False, False]


@pytest.mark.parametrize(
    ("bar", "ours", "floor", "ok"),
    [
        (Bar("ratio", most=2), 3.9, 2.0, True),
        (Bar("ratio", most=2), 4.1, 2.0, False),
        (Bar("ratio", least=0.8), 8.1, 10.0, True),
        (Bar("ratio", least=0.8), 7.9, 10.0, False),
        (Bar("ours", most=100), 99.0, 1.0, True),
        (Bar("ours", most=100), 101.0, 1000.0, False),
        (None, 1.0, 1.0, None),
        (Bar("ours", most=1), None, None, None),
    ],
)
def test_a_bar_is_held_to(bar: Bar | None, ours: float | None, floor: float | None, ok: bool | None) -> None:
    row = Row("x", ours, floor, "ms", bar)
    assert row.ok is ok
    assert row.document()["ok"] is ok
    assert json.loads(json.dumps(row.document()))["bar"] == (None if bar is None else str(bar))


def test_a_missed_bar_is_seen_in_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        Row("slow thing", 5.0, 1.0, "ms", Bar("ratio", most=2)),
        Row("quick thing", 1.0, 1.0, "ms", Bar("ratio", most=2)),
    ]
    machine = {"system": "s", "cpus": 2, "loadBefore": 0.1, "python": "3", "fdatasyncMs": 0.1}
    show({"size": "tiny", "machine": machine, "seconds": 1.0, "rows": [row.document() for row in rows]})
    shown = capsys.readouterr().out.splitlines()
    assert ["MISSED" in line for line in shown if "thing" in line] == [True, False]


def test_an_unknown_item_is_wrong_use() -> None:
    result = CliRunner().invoke(cli, ["bench", "--only", "everything"])
    assert result.exit_code == 2
    assert not isinstance(result.exception, BatonError)

"""The matrix's own table against the product's, and a line that is not as expected."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ops.drill.matrix_table import End, Probe, became_of, expected, judge_line, probes_of, reaches
from tests.support.drill_facts import CALL, good_task
from worker.crashpoints import POINTS
from worker.errors import InvalidInput
from worker.reconcile import Decision, Nature, after_asking, decide
from worker.state.codec import digest
from worker.state.ledger import Call, Entry, Marker
from worker.tools import Effect

PROBES = [
    Probe("look", {}, "read_only", False),
    Probe("put", {}, "idempotent", False),
    Probe("send", {}, "side_effect", False),
    Probe("pay", {}, "side_effect", True),
    Probe("post", {}, "side_effect", False, holds=True),
]
TRIED = Call(1, "toolu_1", "send", {})


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.tool)
@pytest.mark.parametrize("label", POINTS)
def test_the_table_of_the_matrix_says_what_reconcile_decides(label: str, probe: Probe) -> None:
    """Two tables, written apart: where they part, one of them is wrong."""
    past_a = label not in ("after-claim", "after-model-response")
    marked = past_a and label != "after-save-a" and probe.effect != "read_only"
    recorded = label == "after-effect-write"
    over = label in ("after-save-b", "before-finish")
    entry = Entry("send", digest({}), "x", False, 1) if recorded else None
    marker = Marker(1, probe.effect) if marked and not over else None
    nature = Nature(Effect(probe.effect), probe.verifies, "hold" if probe.holds else "report")
    decision = decide(TRIED, entry=entry, marker=marker, markers_trusted=True, nature=nature)
    wanted = expected(label, probe).decided
    if decision is Decision.VERIFY:
        assert wanted in ("verify: happened", "verify: not_happened")
        assert after_asking(wanted.partition(": ")[2], marker, nature) in (Decision.VERIFY, Decision.RUN)
    else:
        assert wanted == decision.value


def test_only_a_read_only_call_passes_no_start_marker() -> None:
    missed = [(label, probe.tool) for label in POINTS for probe in PROBES if not reaches(label, probe)]
    assert missed == [("after-start-mark", "look")]


@pytest.mark.parametrize(
    ("answer", "runs", "result"), [("happened", 1, "real"), ("not_happened", 2, "real"), ("unknown", 1, "unknown")]
)
def test_what_a_users_verify_answers_decides_what_is_expected(answer: str, runs: int, result: str) -> None:
    assert expected("after-effect", PROBES[3], answer) == End(f"verify: {answer}", runs, result)


def test_a_line_is_ok_only_if_the_decision_the_runs_and_the_guarantees_are() -> None:
    task = good_task()
    assert became_of(task).decided == "run"
    twice = good_task(effects=(*task.effects, *task.effects[:1]))
    line = judge_line("after-effect", PROBES[2], "horse", True, twice)
    assert not line.ok
    assert line.text.startswith("NOT  after-effect")
    assert f"expected {End('unknown', 1, 'unknown')}" in line.text
    assert any("ran 2 times" in one.what for one in line.broken)
    assert CALL in {one.call for one in line.broken}


def test_a_line_at_whose_point_nobody_died_is_not_ok() -> None:
    task = good_task(effects=good_task().effects[:2])
    alive, dead = (judge_line("after-claim", PROBES[2], "horse", died, task) for died in (False, True))
    assert not alive.ok
    assert "nobody passed this point" in alive.text
    assert dead.died


def test_a_users_tools_are_tried_with_the_calls_of_the_script(tmp_path: Path) -> None:
    script = tmp_path / "own.json"
    calls = [
        {"name": "post", "input": {"letter": "a"}},
        {"name": "ring", "input": {"bell": "{{ task }}"}},
        {"name": "nobody", "input": {}},
    ]
    script.write_text(json.dumps({"turns": [{"calls": calls}]}))
    (probe,) = probes_of("tests.support.drill_tools", script)
    assert (probe.tool, probe.nature, probe.sure) == ("post", "side_effect, hold", False)
    script.write_text(json.dumps({"turns": [{"calls": calls[1:]}]}))
    with pytest.raises(InvalidInput, match="nothing to try"):
        probes_of("tests.support.drill_tools", script)

"""`baton drill` for real: it holds, it notices every sabotage, its matrix is as expected, also with a user's tools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from ops.drill.plan import KINDS
from ops.drill.sabotage_drill import DRILLS
from tests.support.drill_runs import Drills
from worker.crashpoints import POINTS

pytestmark = [pytest.mark.server, pytest.mark.fleet, pytest.mark.crash, pytest.mark.timeout(400)]

OWN = {
    "turns": [
        {
            "calls": [
                {"name": "shelve", "input": {"book": "{{ task }}"}},
                {"name": "ring", "input": {"bell": "{{ task }}"}},
            ]
        },
        {"calls": [{"name": "post", "input": {"letter": "to B"}}]},
        {"calls": [{"name": "post", "input": {"letter": "to C"}}, {"name": "shelve", "input": {"book": "{{ task }}"}}]},
        {"text": "all done"},
    ]
}


@pytest.fixture(scope="module")
def drills(
    server_binary: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Drills]:
    """Begins the drills of all tests that were chosen, the long one first."""
    root = tmp_path_factory.mktemp("drills")
    script = root / "own.json"
    script.write_text(json.dumps(OWN))
    own = ("--tools", "tests.support.drill_tools", "--script", script)
    bare = ("--no-control", "--json")
    args = {
        "matrix": ("--matrix", "--json"),
        "small": (
            "--tasks",
            "8",
            "--turns",
            "16",
            "--seconds",
            "10",
            "--seed",
            "5",
            "--json",
            "--report",
            root / "report",
        ),
        "own": (
            "--tasks",
            "6",
            "--seconds",
            "6",
            "--seed",
            "5",
            "--kill",
            "horse,both",
            "--no-control",
            "--json",
            *own,
        ),
        "rolling": ("--kill", "term", "--tasks", "12", "--seconds", "8", "--seed", "4", *bare),
        **{
            worker_class: ("--worker-class", worker_class, "--tasks", "12", "--seconds", "6", "--seed", "6", *bare)
            for worker_class in ("thread", "stock")
        },
        "own-matrix": ("--matrix", "--json", *own),
        **{f"sabotage-{name}": ("--sabotage", name, "--seed", "3", "--json") for name in DRILLS},
    }
    chosen = [item for item in request.session.items if item.path == request.path]
    found = Drills(root, args, wanted=list(args) if len(chosen) > 3 else [])
    yield found
    found.close()


def test_a_drill_with_every_kind_of_kill_breaks_no_guarantee(drills: Drills) -> None:
    done = drills["small"]
    found = done.document
    assert done.code == 0, done
    assert found["ok"] is True
    assert {kill["kind"] for kill in found["kills"]} == set(KINDS), "every kind came"
    assert found["counts"]["tasks"] == found["counts"]["succeeded"] == 8
    assert found["counts"]["recovered"] > 0, "and hit somebody"
    assert all(one["checked"] > 0 for one in found["guarantees"])
    assert found["withoutKills"]["ok"] is True
    assert found["withoutKills"]["counts"]["recovered"] == 0
    assert found["overhead"]["seconds"] > 0
    assert found["recoverySeconds"]


def test_a_rolling_restart_under_load_costs_nothing(drills: Drills) -> None:
    """Nothing unknown, no turn lost or paid for again, no crash counted, everybody gone within the grace."""
    done = drills["rolling"]
    found = done.document
    assert done.code == 0, done
    assert found["guarantees"][6]["checked"] >= 3, "each of three workers was told to go"
    assert sum(bool(kill["tasks"]) for kill in found["kills"]) >= 2, "in the middle of tasks"
    counts = found["counts"]
    assert (counts["succeeded"], counts["unknown"], counts["recovered"], counts["paidTwice"]) == (12, 0, 0, 0)


@pytest.mark.parametrize("worker_class", ["thread", "stock"])
def test_workers_of_another_class_keep_the_guarantees_too(drills: Drills, worker_class: str) -> None:
    done = drills[worker_class]
    found = done.document
    assert done.code == 0, done
    assert found["options"]["workerClass"] == worker_class
    assert found["counts"]["succeeded"] == 12
    assert found["counts"]["recovered"] > 0


def test_its_report_is_for_people_for_programs_and_for_the_eye(drills: Drills) -> None:
    found = drills["small"].document
    report = drills.root / "report"
    assert "no guarantee broken" in (report / "report.md").read_text()
    kills = [json.loads(line) for line in (report / "kills.jsonl").read_text().splitlines()]
    tasks = [json.loads(line) for line in (report / "tasks.jsonl").read_text().splitlines()]
    assert [kill["kind"] for kill in kills] == [kill["kind"] for kill in found["kills"]]
    assert [task["status"] for task in tasks] == ["succeeded"] * 8
    assert (report / "timeline.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", DRILLS)
def test_a_drill_notices_that_a_protection_is_missing(drills: Drills, name: str) -> None:
    done = drills[f"sabotage-{name}"]
    assert done.code == 1, done
    broken = done.document["guarantees"][DRILLS[name].breaks - 1]
    assert broken["broken"] > 0, done.document["guarantees"]
    assert any(DRILLS[name].sign in example["what"] for example in broken["examples"]), broken


def test_the_matrix_of_crash_points_effects_and_deaths_is_as_the_reconcile_table_says(drills: Drills) -> None:
    done = drills["matrix"]
    lines = done.document["lines"]
    assert done.code == 0, [line for line in lines if not line["ok"]]
    assert len(lines) == len(POINTS) * 4 * 2
    assert {line["label"] for line in lines} == set(POINTS)
    assert sum(not line["died"] for line in lines) == 2, "only read-only calls pass no start marker"


def test_a_drill_of_a_users_own_tools_records_their_runs(drills: Drills) -> None:
    """One of them holds a task for a person when its outcome is unknown; the drill answers for that person."""
    done = drills["own"]
    found = done.document
    assert done.code == 0, done
    assert found["counts"]["succeeded"] == 6
    assert found["counts"]["recovered"] > 0
    assert found["guarantees"][0]["checked"] == 6 * 3, "ring and two posts of each task"
    assert found["withoutKills"] is None


def test_the_matrix_is_drawn_for_a_users_own_tools_too(drills: Drills) -> None:
    """For those that the script calls with plain input: what a template asks for is not there in a matrix."""
    done = drills["own-matrix"]
    lines = done.document["lines"]
    assert done.code == 0, [line for line in lines if not line["ok"]]
    assert {line["tool"] for line in lines} == {"post"}
    held = [line for line in lines if line["got"]["decided"] == "hold"]
    assert {line["label"] for line in held} == {"after-start-mark", "after-effect"}, "for a person to decide"


def test_every_sabotage_there_is_has_its_drill() -> None:
    from ops.drill.sabotage import SABOTAGES as there_are

    assert set(DRILLS) == set(there_are)

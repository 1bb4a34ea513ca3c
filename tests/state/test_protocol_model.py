"""No order of events breaks a guarantee: runners that freeze and die between any two steps, deliveries that double and
vanish, leases that run out, sweepers, people and restarts, found by hypothesis on a real server.

`BATON_MODEL_EXAMPLES=5000` looks longer, and at other histories each time; a failure prints its steps.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.state.kit import make_store
from tests.support import model_world
from tests.support.model_machine import Protocol
from worker.errors import BatonError
from worker.state import guards
from worker.state import slots as verbs
from worker.state.store import Store
from worker.state.transact import connect
from worker.state.writes import Writes

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]

TENS, WALKS_MAX, STEPS = 12, 400, 80
SCRIPTS = (model_world.TURNS, (("post",),), (("wire",),), (("send", "put"),))
MANY = int(os.environ.get("BATON_MODEL_EXAMPLES") or 0)


@pytest.fixture
def machine(redis_url: str, redis_client: object) -> Iterator[type[Protocol]]:
    store = make_store(connect(redis_url), crashes_in_row_max=50, crashes_max=100)
    yield type("OnThisServer", (Protocol,), {"store": store})
    store.client.flushdb()
    store.client.close()


def run(machine: type[Protocol], examples: int) -> None:
    phases = [Phase.generate, Phase.shrink]
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine,
        settings=settings(
            max_examples=examples, stateful_step_count=40, deadline=None, derandomize=not MANY, database=None,
            phases=phases, suppress_health_check=list(HealthCheck), report_multiple_bugs=False,
        ),
    )  # fmt: skip


DRAWN: dict[str, Callable[[random.Random], object]] = {
    "which": lambda pick: pick.randrange(1000),
    "steps": lambda pick: pick.randint(1, 6),
    "vanishes": lambda pick: pick.randint(0, 9),
    "seconds": lambda pick: pick.randint(0, 20),
    "really": lambda pick: pick.randint(0, 5),
    "why": lambda pick: pick.choice(["drain", "overload"]),
    "report": lambda pick: pick.random() < 0.5,
    "durable": lambda pick: pick.random() < 0.5,
}


def walk(machine: type[Protocol], seed: int) -> None:
    """The same rules and invariants in a long history, of which hypothesis tries few."""
    pick, state = random.Random(seed), machine()
    state.accept()
    rules = sorted(state.rules, key=lambda rule: rule.function.__name__)
    often = [rule for rule in rules if "goes_on" in rule.function.__name__ or "takes" in rule.function.__name__]
    for _ in range(STEPS):
        rule = pick.choice([*rules, *often * 2])
        if all(holds(state) for holds in rule.preconditions):
            rule.function(state, **{name: DRAWN[name](pick) for name in rule.arguments})
            for invariant in state.invariants:
                invariant.function(state)
    state.teardown()


@pytest.mark.parametrize("ten", range(TENS))
def test_no_long_history_breaks_a_guarantee(machine: type[Protocol], monkeypatch: pytest.MonkeyPatch, ten: int) -> None:
    """Some with one call only, so that a history is about what can become of that one."""
    monkeypatch.setattr(model_world, "TURNS", SCRIPTS[ten % len(SCRIPTS)])
    for seed in range(10 * ten, 10 * ten + 10):
        walk(machine, seed)


def test_no_order_of_events_breaks_a_guarantee(machine: type[Protocol]) -> None:
    run(machine, MANY or 80)


# -- sabotage ----------------------------------------------------------------------------------------------------------


def no_fence(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(guards.Guards, "_require_fence", lambda self, holder, fence: None)


def no_marker(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Store, "mark_started", lambda self, holder, call, effect="": None)


def no_new_epoch(patch: pytest.MonkeyPatch) -> None:
    """Taking a task away leaves its holder's fence as it is."""
    patch.setattr(Writes, "revoke", lambda self, pipe, task_id, epoch, at: pipe.delete(self.keys.lock(task_id)))


def claims_for_everybody(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(verbs, "refusal", lambda at, delivery: None if at.exists else verbs.Refused("no such task"))


def markers_trusted_after_a_restart(patch: pytest.MonkeyPatch) -> None:
    """Harmless while nothing is lost: the control of the sabotages."""
    patch.setattr("worker.state.server.FixedProbe.loses_nothing", lambda self, client: True)


@pytest.mark.parametrize(
    "sabotage",
    [no_fence, no_marker, no_new_epoch, claims_for_everybody],
    ids=lambda sabotage: sabotage.__name__,
)
def test_without_one_of_the_protections_the_model_finds_a_history_that_breaks_one(
    machine: type[Protocol], monkeypatch: pytest.MonkeyPatch, sabotage: Callable[[pytest.MonkeyPatch], None]
) -> None:
    sabotage(monkeypatch)
    with pytest.raises((AssertionError, BatonError)):
        _walks(machine)


def _walks(machine: type[Protocol]) -> None:
    for seed in range(WALKS_MAX):
        walk(machine, seed)


def test_with_a_change_that_breaks_nothing_it_finds_nothing(
    machine: type[Protocol], monkeypatch: pytest.MonkeyPatch
) -> None:
    markers_trusted_after_a_restart(monkeypatch)
    walk(machine, 0)

"""What may still happen, what nobody can tell, and what only a person knows."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.agents import Bench, Died, T, calls, say, use
from worker import drain
from worker.answers import STATE_UNKNOWN
from worker.errors import WrongState
from worker.process import this_process
from worker.state.checkpoint import find_unsound
from worker.state.lease import Holder
from worker.state.ledger import Resolution
from worker.state.task import Status
from worker.state.views import Views
from worker.tools import ToolFailure, Verdict, tool
from worker.tools.base import MAY_HAVE_HAPPENED

MARKED = ("after-start-mark", 1)


def die_at(bench: Bench, point: tuple[str, int]) -> None:
    with bench.dying(point), pytest.raises(Died):
        bench.deliver()


@pytest.mark.parametrize("proof", ["dead", "lapsed"])
def test_not_happened_is_believed_of_a_dead_process_and_not_of_one_whose_lease_only_lapsed(proof: str) -> None:
    """A holder frozen between its marker and the call: verify truthfully said "no", the successor ran the call, the
    first one woke up and ran it too. Only a dead process cannot."""
    bench = Bench(calls(use("post", 1, line="1")), say("done"))
    bench.enqueue()
    die_at(bench, MARKED)
    if proof == "dead":
        bench.take_over()
    else:
        bench.store.client.delete(bench.store.keys.lock(T))
        bench.store.recover(T, proof="its lease ran out")
    assert bench.run() is Status.SUCCEEDED
    assert bench.effects == (["post 1"] if proof == "dead" else [])
    assert (STATE_UNKNOWN in str(bench.results())) == (proof == "lapsed")
    (told,) = [e.data for e in Views(bench.store.client, bench.store.keys).events(T) if e.kind == "answered"]
    assert list(told["decisions"].values()) == ["verify: not_happened" if proof == "dead" else "unknown"]


def test_a_call_begun_as_a_side_effect_stays_one_after_a_deploy_that_calls_it_read_only() -> None:
    bench = Bench(calls(use("send", 1, line="1")), say("done"))
    bench.enqueue()
    die_at(bench, ("after-effect", 1))
    bench.take_over()

    @tool(effect="read_only")
    def send(line: str) -> str:
        """Send a line."""
        return bench.world.did("send", line)

    bench.tools = [send if old.name == "send" else old for old in bench.tools]
    assert bench.run() is Status.SUCCEEDED
    assert bench.effects == ["send 1"], "once, by the process that died"
    assert STATE_UNKNOWN in str(bench.results())


def test_a_task_is_not_given_tools_that_a_later_deploy_brought() -> None:
    bench = Bench(calls(use("look", 1, line="1")), calls(use("late", 2, line="2")), say("done"))
    bench.enqueue()
    die_at(bench, ("after-save-a", 1))
    bench.take_over()

    @tool
    def late(line: str) -> str:
        """Not there when the task began."""
        return bench.world.did("late", line)

    bench.tools = [*bench.tools, late]
    assert bench.run() is Status.SUCCEEDED
    assert bench.effects == ["look 1"], "control: what was offered runs"
    assert "no tool called 'late'" in str(bench.results())


@pytest.mark.parametrize(
    ("resolution", "effects", "told"),
    [
        (Resolution("happened", "wired, no. 17"), [], "wired, no. 17"),
        (Resolution("not_happened"), ["wire 1"], "did wire 1"),
        (Resolution("report"), [], STATE_UNKNOWN),
    ],
    ids=["happened", "not happened", "report"],
)
def test_a_held_call_is_what_a_person_says_it_is(resolution: Resolution, effects: list[str], told: str) -> None:
    bench = Bench(calls(use("wire", 1, line="1")), say("done"))
    bench.enqueue()
    die_at(bench, MARKED)
    bench.take_over()
    assert bench.deliver().startswith("parked"), "control: without a word it waits"
    bench.store.wake(T)
    assert bench.deliver().startswith("parked"), "and waking it is no word"
    call = bench.checkpoint().pending[0]
    bench.store.resolve(T, call.turn, call.id, resolution, "ann")
    assert bench.run() is Status.SUCCEEDED
    assert bench.effects == effects
    assert told in str(bench.results())
    with pytest.raises(WrongState):
        bench.store.resolve(T, call.turn, call.id, resolution, "ben")


def test_a_persons_word_that_a_call_has_not_happened_lets_it_run_once() -> None:
    """Run on that word, and killed before its result was recorded, it was run again on the same word."""
    bench = Bench(calls(use("wire", 1, line="1")), say("done"))
    bench.enqueue()
    die_at(bench, MARKED)
    bench.take_over()
    assert bench.deliver().startswith("parked")
    call = bench.checkpoint().pending[0]
    bench.store.resolve(T, call.turn, call.id, Resolution("not_happened"), "ann")
    die_at(bench, ("after-effect", 1))
    bench.take_over()
    assert bench.effects == ["wire 1"]
    assert bench.deliver().startswith("parked"), "nobody has said anything about this run yet"
    bench.store.resolve(T, call.turn, call.id, Resolution("happened", "wired"), "ben")
    assert bench.run() is Status.SUCCEEDED
    assert bench.effects == ["wire 1"]


@pytest.mark.parametrize("known", [True, False], ids=["tool failure", "any exception"])
def test_a_side_effect_that_raises_may_have_happened_unless_it_knows_better(known: bool) -> None:
    """A read timeout comes after the payment. The model repeated the call, with a new idempotency key."""

    @tool
    def pay(line: str) -> str:
        """Pay."""
        raise ToolFailure("no money") if known else TimeoutError("read timed out")

    bench = Bench(calls(use("pay", 1, line="1")), say("done"), tools=(pay,))
    bench.enqueue()
    assert bench.run() is Status.SUCCEEDED
    assert (MAY_HAVE_HAPPENED in str(bench.results())) == (not known)


@pytest.mark.parametrize(
    "block",
    [
        {"text": "no type"},
        {"type": 7},
        {"type": "text", "text": 7},
        {"type": "text"},
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": "x"},
        {"type": "tool_use", "id": 1, "name": "look", "input": {}},
    ],
    ids=str,
)
def test_what_the_next_holder_would_refuse_is_not_saved(block: dict[str, Any]) -> None:
    """It was saved, and after a crash a healthy task ended as damaged."""
    bench = Bench(calls(block, stop="end_turn"), say("done"))
    bench.enqueue()
    assert bench.run() is Status.FAILED
    assert "malformed" in bench.task().reason
    assert bench.task().crashes == 0
    assert find_unsound({"role": "assistant", "content": [{"type": "hologram", "text": 7}]}) is None, "control"


def test_a_tool_is_told_to_stop_as_soon_as_the_lease_is_in_doubt() -> None:
    """A process that was frozen past its lease looks just before it acts, and must not wait for its heartbeat."""
    bench = Bench()
    bench.enqueue()
    holder = bench.store.claim(T, 1, this_process())
    assert isinstance(holder, Holder)
    assert not holder.stopping()
    bench.clock.advance(holder.lease_ttl_s)
    assert holder.stopping()


@pytest.mark.parametrize(("settle_s", "effects"), [(3, 1), (0, 2)], ids=["waits", "does not wait"])
def test_a_request_that_outlives_the_process_that_sent_it_is_waited_for_before_the_call_is_run_again(
    settle_s: float, effects: int
) -> None:
    """Killed with its POST under way: the provider, asked at once, truthfully knew nothing of it yet. Without the pause
    there were two payments."""
    asked: list[str] = []
    bench: Bench

    def paid(line: str) -> Verdict:
        known = bool(bench.effects) and bool(asked)
        asked.append(line)
        return Verdict.happened("paid") if known else Verdict.not_happened()

    @tool(verify=paid)
    def pay(line: str) -> str:
        """Pay; the provider shows it a moment later."""
        return bench.world.did("pay", line)

    bench = Bench(calls(use("pay", 1, line="1")), say("done"), tools=(pay,), verify_settle_s=settle_s)
    bench.enqueue()
    die_at(bench, ("after-effect", 1))
    bench.take_over()
    assert bench.run() is Status.SUCCEEDED
    assert len(bench.effects) == effects
    assert len(asked) == (2 if settle_s else 1)


def test_a_worker_that_is_to_end_neither_waits_for_that_nor_begins_the_call() -> None:
    """Else the grace runs out in the pause, or in the middle of a side effect."""
    bench: Bench

    def paid(line: str) -> Verdict:
        drain.PROCESS.ask("SIGTERM", 20)
        return Verdict.not_happened()

    @tool(verify=paid)
    def pay(line: str) -> str:
        return bench.world.did("pay", line)

    for settle_s in (60.0, 0.0):
        bench = Bench(calls(use("pay", 1, line="1")), say("done"), tools=(pay,), verify_settle_s=settle_s)
        bench.enqueue()
        die_at(bench, ("after-start-mark", 1))
        bench.take_over()
        try:
            assert bench.deliver() == "handed over: SIGTERM"
        finally:
            drain.begin_anew()
        assert bench.effects == []

"""The small print of answering calls: what is said, recorded and asked, seen without an agent around it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.agents import Bench, T
from worker.answers import NOT_EXECUTED, STATE_UNKNOWN, Answers, Held, idempotency_key, result_block
from worker.attempt import Attempt
from worker.errors import LeaseLost
from worker.state.codec import digest
from worker.state.ledger import Call, Entry, Marker
from worker.tools import Toolbox, ToolContext, ToolResult, Verdict, tool

MARK = Marker(epoch=1)


def call(name: str, number: int = 1, turn: int = 1, /, **given: Any) -> Call:
    return Call(turn, f"toolu_{number}", name, given or {"line": str(number)})


def entry(made: Call, content: str = "recorded", *, is_error: bool = False) -> Entry:
    return Entry(made.name, digest(made.input), content, is_error, epoch=1)


def answers(bench: Bench, **known: Any) -> Answers:
    """Of a holder that has just claimed; `known` is what the dead one left."""
    bench.enqueue()
    holder = bench.store.claim(T, 1, {})
    attempt = Attempt(bench.runtime(), bench.store, holder)
    return Answers(bench.store, holder, Toolbox(bench.tools), attempt._context, **known)


# -- what is decided and how it is acted on ------------------------------------------------------------------------


def test_each_calls_decision_is_told_by_its_id() -> None:
    bench = Bench()
    made = [call(name, n) for n, name in enumerate(("send", "look", "put", "send", "post", "gone", "send"), 1)]
    known = {
        "entries": {"toolu_1": entry(made[0])},
        "markers": {**dict.fromkeys(("toolu_1", "toolu_4", "toolu_5"), MARK), "toolu_3": Marker(1, "idempotent")},
    }
    given = answers(bench, **known)
    blocks = given.to(made)
    assert given.decided == {
        "toolu_1": "reuse",
        "toolu_2": "run",
        "toolu_3": "rerun",
        "toolu_4": "unknown",
        "toolu_5": "verify: not_happened",
        "toolu_6": "no such tool",
        "toolu_7": "run",
    }
    assert not isinstance(blocks, Held)
    assert [block["content"] for block in blocks][:5] == [
        "recorded", "did look 2", "did put 3", STATE_UNKNOWN, "did post 5",
    ]  # fmt: skip
    assert bench.effects == ["look 2", "put 3", "post 5", "send 7"]


def test_a_recorded_error_is_reused_as_an_error() -> None:
    made = call("send")
    blocks = answers(Bench(), entries={made.id: entry(made, "no", is_error=True)}).to([made])
    assert blocks == [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "no", "is_error": True}]


def test_verify_that_says_it_happened_is_recorded_and_never_asked_again() -> None:
    asked: list[str] = []

    def happened(line: str) -> Verdict:
        asked.append(line)
        return Verdict.happened({"id": 7})

    @tool(verify=happened)
    def order(line: str) -> str:
        raise AssertionError("run although it had happened")

    bench = Bench(tools=(order,))
    made = call("order")
    given = answers(bench, markers={made.id: MARK})
    assert given.to([made]) == [result_block(made, ToolResult('{"id":7}'))]
    assert given.decided == {"toolu_1": "verify: happened"}
    (raw,) = bench.store.client.hvals(bench.store.keys.ledger(T))
    assert Entry.load(raw).content == '{"id":7}'
    assert asked == ["1"]


@pytest.mark.parametrize(
    ("answer", "then"),
    [(Verdict.unknown(), STATE_UNKNOWN), (None, STATE_UNKNOWN), (RuntimeError("x"), STATE_UNKNOWN), (False, "ran")],
    ids=str,
)
def test_a_verify_that_does_not_know_leaves_the_call_unknown(answer: Any, then: str) -> None:
    def verify() -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    @tool(verify=verify)
    def order(line: str) -> str:
        return "ran"

    made = call("order")
    blocks = answers(Bench(tools=(order,)), markers={made.id: MARK}).to([made])
    assert not isinstance(blocks, Held)
    assert blocks[0]["content"] == then


def test_a_verify_that_does_not_know_holds_the_task_if_the_tool_says_so() -> None:
    @tool(verify=lambda: None, on_unknown="hold")
    def order(line: str) -> str:
        raise AssertionError("run")

    made = call("order")
    assert answers(Bench(tools=(order,)), markers={made.id: MARK}).to([made]) == Held(made)


def test_a_call_run_again_after_verify_is_marked_again_under_the_new_epoch() -> None:
    bench = Bench()
    made = call("post")
    answers(bench, markers={made.id: Marker(epoch=0)}).to([made])
    (raw,) = bench.store.client.hvals(bench.store.keys.started(T))
    assert Marker.load(raw).epoch == 1


def test_what_was_known_of_one_turns_calls_is_forgotten_with_them() -> None:
    """An id that is used again is another call (case A07)."""
    bench = Bench()
    first, second = call("send", 1, 1), call("send", 1, 2)
    given = answers(bench, entries={first.id: entry(first)}, markers={first.id: MARK}, markers_trusted=False)
    given.to([first])
    assert bench.effects == []
    given.to([second])
    assert bench.effects == ["send 1"]


def test_a_lost_lease_stops_before_the_first_call() -> None:
    bench = Bench()
    given = answers(bench)
    given.holder.lose("test")
    with pytest.raises(LeaseLost):
        given.to([call("send")])
    assert bench.effects == []
    assert not bench.store.client.exists(bench.store.keys.started(T))


# -- without running anything --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "left", "said"),
    [
        ("send", "nothing", NOT_EXECUTED),
        ("look", "nothing", NOT_EXECUTED),
        ("gone", "nothing", NOT_EXECUTED),
        ("send", "a marker", STATE_UNKNOWN),
        ("put", "a marker", STATE_UNKNOWN),
        ("post", "a marker", STATE_UNKNOWN),
        ("wire", "a marker", STATE_UNKNOWN),
        ("gone", "a marker", STATE_UNKNOWN),
        ("send", "an entry", "recorded"),
        ("gone", "an entry", "recorded"),
    ],
)
def test_a_cancelled_tasks_calls_are_told_as_they_stand(name: str, left: str, said: str) -> None:
    """Never "not executed" of a call that may have run."""
    made, bench = call(name), Bench()
    known: dict[str, Any] = {"markers": {made.id: MARK}} if left != "nothing" else {}
    known |= {"entries": {made.id: entry(made)}} if left == "an entry" else {}
    (block,) = answers(bench, **known).without_running([made])
    assert block["content"] == said
    assert block.get("is_error", False) is (left != "an entry")
    assert bench.effects == []


def test_on_a_server_that_may_have_lost_the_marker_nothing_is_told_as_not_executed() -> None:
    (block,) = answers(Bench(), markers_trusted=False).without_running([call("send")])
    assert block["content"] == STATE_UNKNOWN


# -- keys, contexts, blocks ----------------------------------------------------------------------------------------


def test_the_idempotency_key_is_the_calls_own() -> None:
    here = idempotency_key("t1", call("send", 1, 1))
    assert here == idempotency_key("t1", call("renamed", 1, 1, line="another input is impossible for the same call"))
    others = [idempotency_key("t2", call("send", 1, 1)), idempotency_key("t1", call("send", 2, 1)),
              idempotency_key("t1", call("send", 1, 2))]  # fmt: skip
    assert len({here, *others}) == 4
    assert len(here) == 32


def test_a_tool_is_told_who_calls_it_and_why() -> None:
    seen: list[ToolContext] = []

    @tool
    def spy(context: ToolContext) -> None:
        seen.append(context)

    bench = Bench(tools=(spy,), result_max_bytes=999)
    given = answers(bench)
    given.to([Call(3, "toolu_9", "spy", {})])
    (context,) = seen
    assert (context.task_id, context.call_id, context.tool, context.turn) == (T, "toolu_9", "spy", 3)
    assert (context.attempt, context.epoch, context.result_max_bytes) == (1, 1, 999)
    assert context.idempotency_key == idempotency_key(T, Call(3, "toolu_9", "spy", {}))
    assert not context.cancelled


def test_a_good_results_block_has_no_is_error() -> None:
    made = call("send")
    assert result_block(made, ToolResult("x")) == {"type": "tool_result", "tool_use_id": "toolu_1", "content": "x"}
    assert result_block(made, ToolResult("x", is_error=True))["is_error"] is True


def test_a_result_that_cannot_be_stored_is_told_as_one_that_ran() -> None:
    """Should anything get past the conversion of outputs (here: content made by hand), the task still goes on."""
    bench = Bench()
    given = answers(bench)
    result = given._record(call("send"), ToolResult("a\ud800"), given._decide(call("send")))
    assert result.is_error
    assert "The call ran; its result cannot be stored" in str(result.content)
    (raw,) = bench.store.client.hvals(bench.store.keys.ledger(T))
    assert Entry.load(raw).is_error

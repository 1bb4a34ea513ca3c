"""Running calls: side by side or one by one, failures that stay their own, results that outlive a death unchanged."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest

from tests.support.agents import Bench, T, calls, say, use
from worker.state.task import Status
from worker.state.views import Views
from worker.tools import Effect, ToolFailure, tool
from worker.tools.base import MAY_HAVE_HAPPENED


def ran(*steps: Any, crash: tuple[tuple[str, int], ...] = (), **options: Any) -> Bench:
    bench = Bench(*steps, **options)
    bench.enqueue()
    assert bench.run(*crash) is Status.SUCCEEDED
    bench.check()
    return bench


def ledger(bench: Bench, task_id: str = T) -> list[str]:
    return sorted(field.decode() for field in bench.store.client.hkeys(bench.store.keys.ledger(task_id)))


# -- side by side, one by one --------------------------------------------------------------------------------------


def meeting(parties: int) -> Callable[..., Any]:
    """A tool body that returns only once so many calls of it run at the same time."""
    barrier = threading.Barrier(parties, timeout=60)

    def meet(n: int) -> str:
        barrier.wait()
        return f"met {n}"

    return meet


def test_neighbouring_read_only_calls_run_side_by_side() -> None:
    bench = ran(calls(*(use("meet", n, n=n) for n in (1, 2, 3))), say(), tools=(tool(effect="read_only")(meeting(3)),))
    assert [block["content"] for block in bench.results()] == ["met 1", "met 2", "met 3"]


def test_results_stand_in_the_order_of_the_calls_whichever_came_first() -> None:
    """Each call waits for the one after it, so they return in the opposite order."""
    returned = [threading.Event() for _ in range(4)]
    order: list[int] = []

    @tool(effect="read_only")
    def backwards(n: int) -> int:
        if n < 3:
            assert returned[n + 1].wait(20)
        order.append(n)
        returned[n].set()
        return n

    bench = ran(calls(*(use("backwards", n, n=n) for n in range(4))), say(), tools=(backwards,))
    assert order == [3, 2, 1, 0]
    assert [block["content"] for block in bench.results()] == ["0", "1", "2", "3"]


@pytest.mark.parametrize("effect", ["idempotent", "side_effect"])
def test_calls_that_change_something_run_one_at_a_time_in_order(effect: Any) -> None:
    running = threading.Lock()
    order: list[int] = []

    @tool(effect=effect)
    def alone(n: int) -> int:
        assert running.acquire(blocking=False), "another one was running"
        order.append(n)
        running.release()
        return n

    ran(calls(*(use("alone", n, n=n) for n in range(6))), say(), tools=(alone,))
    assert order == list(range(6))


def test_a_call_that_changes_something_waits_for_those_before_it_and_holds_up_those_after_it() -> None:
    blocks = [use("look", 1, line="1"), use("look", 2, line="2"), use("send", 3, line="3"), use("look", 4, line="4")]
    bench = ran(calls(*blocks), say())
    assert sorted(bench.effects[:2]) == ["look 1", "look 2"]
    assert bench.effects[2:] == ["send 3", "look 4"]


def test_twenty_calls_side_by_side_leave_twenty_entries() -> None:
    """E11: each entry is a field of its own, so no writer overwrites another."""
    bench = ran(calls(*(use("look", n, line=str(n)) for n in range(20))), say())
    assert ledger(bench) == sorted(f"1:toolu_{n}" for n in range(20))
    assert [block["content"] for block in bench.results()] == [f"did look {n}" for n in range(20)]


def test_a_read_only_call_gets_no_marker_and_others_do() -> None:
    bench = ran(calls(use("look", 1, line="a"), use("send", 2, line="b"), use("put", 3, line="c")), say())
    started = bench.store.client.hkeys(bench.store.keys.started(T))
    assert sorted(started) == [b"1:toolu_2", b"1:toolu_3"]


def test_a_tool_without_a_mark_is_a_side_effect() -> None:
    """B13."""
    assert {tool.name: tool.effect for tool in Bench().tools}["send"] is Effect.SIDE_EFFECT


# -- failures stay their own ---------------------------------------------------------------------------------------


@tool
def burst(line: str) -> str:
    raise ToolFailure(f"burst at {line}")


def test_of_three_calls_one_that_raises_is_an_error_of_its_own_and_its_siblings_keep_theirs() -> None:
    """A16."""
    bench = ran(
        calls(use("send", 1, line="a"), use("burst", 2, line="b"), use("send", 3, line="c")), say(), tools=(burst,)
    )
    assert bench.effects == ["send a", "send c"]
    assert bench.results() == [
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": "did send a"},
        {"type": "tool_result", "tool_use_id": "toolu_2", "content": "burst at b", "is_error": True},
        {"type": "tool_result", "tool_use_id": "toolu_3", "content": "did send c"},
    ]


def test_a_call_that_raises_after_its_effect_has_one_result_and_one_entry() -> None:
    """A04."""

    @tool
    def half(line: str) -> str:
        bench.world.did("half", line)
        raise RuntimeError("and then the network went")

    bench = Bench(calls(use("half", line="a")), say(), tools=(half,))
    bench.enqueue()
    assert bench.run(("after-effect-write", 1)) is Status.SUCCEEDED
    assert bench.effects == ["half a"]
    (result,) = bench.results()
    assert result["content"] == f"RuntimeError: and then the network went\n{MAY_HAVE_HAPPENED}"
    assert ledger(bench) == ["1:toolu_1"]


@pytest.mark.parametrize(
    ("block", "words"),
    [
        (use("send", lin="a"), "The input does not fit the tool send; it was not run."),
        (use("send", line={"a": 1}), "The input does not fit the tool send; it was not run."),
        (use("teleport", line="a"), "There is no tool called 'teleport'."),
    ],
    ids=["bad-parameter", "bad-value", "unknown-tool"],
)
def test_a_call_that_cannot_be_made_has_one_error_result_and_the_loop_goes_on(block: Any, words: str) -> None:
    """A05, A15: answered in words the model can act on, and nothing has run."""
    bench = ran(calls(block), calls(use("send", 2, line="right")), say())
    first, second = bench.results()
    assert first["is_error"] is True
    assert first["content"].startswith(words)
    assert second["content"] == "did send right"
    assert bench.effects == ["send right"]
    assert ledger(bench) == ["2:toolu_2"]


# -- ids that are used again ---------------------------------------------------------------------------------------


def test_two_tasks_with_the_same_ids_run_their_own_calls() -> None:
    """A07, first kind."""
    bench = Bench(calls(use("send", line="a")), say())
    for task_id in ("t1", "t2"):
        bench.enqueue(task_id=task_id)
        assert bench.run(task_id=task_id) is Status.SUCCEEDED
    assert bench.effects == ["send a", "send a"]


@pytest.mark.parametrize(
    "crash", [(), (("after-save-a", 2),), (("after-effect-write", 2),), (("after-save-b", 1),)], ids=str
)
@pytest.mark.parametrize("line", ["a", "b"])
def test_an_id_that_is_used_again_in_a_later_turn_is_another_call(line: str, crash: Any) -> None:
    """A07, second kind; with the same input too."""
    bench = ran(calls(use("send", 1, line="a")), calls(use("send", 1, line=line)), say(), crash=crash)
    assert bench.effects == ["send a", f"send {line}"]
    assert [block["content"] for block in bench.results()] == ["did send a", f"did send {line}"]


def test_an_id_used_again_is_not_reused_even_where_the_earlier_call_is_unknown() -> None:
    bench = Bench(calls(use("send", 1, line="a")), calls(use("send", 1, line="a")), say())
    bench.enqueue()
    assert bench.run(("after-effect", 1)) is Status.SUCCEEDED
    assert bench.effects == ["send a", "send a"], "the model was told that it is unknown, and asked for another"


# -- results: what is seen live is what is seen after a resume -----------------------------------------------------


class Thing:
    pass


OUTPUTS: dict[str, Any] = {
    "datetime": datetime(2026, 1, 2, tzinfo=UTC),
    "set": {"b", "a", "c"},
    "object": Thing(),
    "int key": {1: 2, "1": 3},
    "decimal": Decimal("0.10"),
    "uuid": uuid.UUID(int=5),
    "bytes": b"\xff\x00",
    "nan": float("nan"),
    "inf": [float("inf")],
    "2**70": {"n": 2**70},
    "nothing": None,
    "empty": "",
    "blank": "  \n",
    "surrogate": "a\ud800",
    "image": [
        {"type": "text", "text": " "},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
    ],
    "itself": [],
}
OUTPUTS["itself"].append(OUTPUTS["itself"])


@tool(effect="read_only")
def give(what: str) -> Any:
    return OUTPUTS[what]


@pytest.mark.parametrize("what", OUTPUTS)
def test_whatever_a_tool_returns_the_resumed_request_equals_the_live_one(what: str) -> None:
    """E01, E02, E04, E05, G12: made JSON-safe before it is recorded, not when it is sent."""
    script = (calls(use("give", what=what)), say())
    live = ran(*script, tools=(give,))
    for point in ("after-effect-write", "after-save-b"):
        resumed = ran(*script, tools=(give,), crash=((point, 1),))
        assert repr(resumed.model.bodies[1]) == repr(live.model.bodies[1])


def test_texts_images_and_errors_of_a_round_stand_in_one_message() -> None:
    """A10."""
    blocks = [use("give", 1, what="image"), use("burst", 2, line="x"), use("give", 3, what="set"), use("none", 4)]
    bench = ran(calls(*blocks), say(), tools=(give, burst))
    roles = [message["role"] for message in bench.messages()]
    assert roles == ["user", "assistant", "user", "assistant"]
    assert [block["type"] for block in bench.messages()[2]["content"]] == ["tool_result"] * 4


def test_a_tool_that_changes_its_input_changes_no_history() -> None:
    @tool
    def scribble(data: dict[str, list[int]]) -> str:
        data["xs"].append(9)
        return "ok"

    bench = ran(calls(use("scribble", data={"xs": [1]})), say(), tools=(scribble,))
    assert bench.model.bodies[1]["messages"][1]["content"][0]["input"] == {"data": {"xs": [1]}}


# -- two shapes of checkpoint --------------------------------------------------------------------------------------


def test_whenever_the_checkpoint_is_read_it_has_one_of_its_two_shapes() -> None:
    """A13: read from outside after every single reply that Redis gives to the runner."""
    bench = Bench(
        calls(use("look", 1, line="a"), use("look", 2, line="b"), use("send", 3, line="c")),
        calls(use("send", 4, line="d"), stop="pause_turn"),
        say("hm", "pause_turn"),
        say(),
    )
    bench.enqueue()
    shapes: list[str] = []
    reading = threading.Lock()

    def look() -> None:
        with reading:
            if not bench.documents():
                return
            pending = bench.checkpoint().pending  # raises for any other shape
            recorded = bool(Views(bench.store.client, bench.store.keys).progress(T)["pendingToolUse"])
            assert recorded == bool(pending)
            shapes.append("A" if pending else "B")

    bench.after_reply = look
    assert bench.run(("after-effect", 2), ("after-save-b", 1)) is Status.SUCCEEDED
    assert len(shapes) > 100
    assert {"A", "B"} == set(shapes)
    bench.check()

"""The gate before the model: one is told to wait, all wait, nobody holds a worker for it, and nobody waits for ever."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import redis

from tests.support.agents import Bench, T, calls, say, use
from tests.support.model import claude, mocked, request
from tests.support.script import Answer, Script
from worker.errors import ModelConfig, ModelTransient, RedisUnavailable
from worker.state.task import Status
from worker.state.throttle import Closed, Endpoint, Throttle
from worker.throttle import Gate, throttle_of

HERE = Endpoint("a" * 16, "api.example.com", "claude-x")
SEND = use("send", line="a")


class Api(Script):
    """A script behind an endpoint."""

    def endpoint(self, request: dict[str, Any]) -> Endpoint:
        return HERE


def told(retry_after_s: float | None = None) -> ModelTransient:
    return ModelTransient("slow down", retry_after_s=retry_after_s, throttled=True, said="429")


def bench(*steps: Any, tasks: int = 1, model: type[Script] = Api, **settings: Any) -> Bench:
    """With so many tasks: t1, t2 …"""
    made = Bench(**settings)
    made.model = model(*steps)
    for number in range(1, tasks + 1):
        made.enqueue(task_id=f"t{number}")
    return made


def waits_s(made: Bench, task_id: str = T) -> float:
    task = made.task(task_id)
    assert task.status is Status.PARKED, task.reason
    assert task.wake_at_ms is not None
    return (task.wake_at_ms - made.views.now_ms()) / 1000


def wake(made: Bench, task_id: str = T) -> None:
    """Let time pass until the task is due, and deliver it."""
    made.clock.advance(max(0.0, waits_s(made, task_id)))
    assert made.store.wake(task_id, due_only=True)
    made.deliver(task_id)


def record(made: Bench) -> Closed | None:
    return throttle_of(made.store, made.settings).look(HERE.digest)[1]


def test_when_one_is_told_to_wait_the_others_do_not_even_ask() -> None:
    made = bench([told(5), say()], tasks=4)
    for task_id in ("t1", "t2", "t3", "t4"):
        made.deliver(task_id)
    assert len(made.model.log) == 1
    assert [made.status(f"t{n}") for n in range(1, 5)] == [Status.PARKED] * 4
    assert made.task("t1").reason == "the API asks everybody to wait: slow down"
    assert made.task("t2").reason == "waits for its turn: api.example.com asked everybody to wait (429)"
    waits = [waits_s(made, f"t{n}") for n in range(1, 5)]
    assert waits == sorted(waits), "in the order in which they came"
    assert 5 <= waits[0] < 6.1
    assert not any(made.store.client.exists(made.store.keys.lock(f"t{n}")) for n in range(1, 5)), "no worker is held"
    for number in range(1, 5):
        wake(made, f"t{number}")
        assert made.status(f"t{number}") is Status.SUCCEEDED
    assert {made.task(f"t{n}").attempts for n in range(1, 5)} == {1}, "a wait spends no attempt"


def test_control_without_a_shared_record_each_runs_into_the_refusal_itself() -> None:
    made = bench([told(5), told(5), told(5), told(5), say()], tasks=4, model=Script)
    for task_id in ("t1", "t2", "t3", "t4"):
        made.deliver(task_id)
    assert len(made.model.log) == 4


def test_they_come_back_one_two_four_in_each_step() -> None:
    made = bench([told(2), say()], tasks=15)
    for number in range(1, 16):
        made.deliver(f"t{number}")
    closed = record(made)
    assert closed is not None
    until_s = (closed.until_ms - made.views.now_ms()) / 1000
    steps = Counter(int(waits_s(made, f"t{n}") - until_s) for n in range(1, 16))
    assert steps == {0: 1, 1: 2, 2: 4, 3: 8}


def test_an_overload_that_lasts_is_waited_out_longer_and_longer_and_the_task_ends_well() -> None:
    """G01: S=[tool_use, 529 x 8, end_turn]."""
    made = bench(calls(SEND), [*[told()] * 8, say()], park_max_s=60)
    made.deliver()
    waits = []
    for _ in range(8):
        waits.append(waits_s(made))
        wake(made)
    assert [round(wait) for wait in waits[:4]] == sorted(round(wait) for wait in waits[:4])
    for wait, least in zip(waits, (1, 2, 4, 8, 16, 32, 60, 60), strict=True):
        assert least <= wait <= least * 1.1 + 0.6
    assert made.status() is Status.SUCCEEDED
    assert made.effects == ["send a"]
    assert (made.task().crashes, made.task().attempts, made.task().parks) == (0, 1, 8)
    assert len(made.model.log) == 1 + 8 + 1
    made.check()


def test_a_place_lets_the_whole_attempt_through_and_a_newer_refusal_calls_it_back() -> None:
    made = bench([calls(SEND)], [told(2), calls(use("send", 2, line="b"))], [told(30), say()], tasks=1)
    made.deliver()
    first = made.task().parked.ticket
    wake(made)  # asks once more, gets an answer, and is told again
    assert len(made.model.log) == 1 + 2 + 1
    assert waits_s(made) >= 30
    second = made.task().parked.ticket
    assert first.split(":")[0] != second.split(":")[0]
    wake(made)
    assert made.status() is Status.SUCCEEDED


def test_a_task_that_is_woken_before_its_time_keeps_its_place() -> None:
    made = bench([told(2), say()], tasks=3)
    for number in range(1, 4):
        made.deliver(f"t{number}")
    ticket, drawn = made.task("t3").parked.ticket, record(made)
    assert made.store.wake("t3")
    made.deliver("t3")
    assert made.task("t3").parked.ticket == ticket
    assert record(made) == drawn, "it has drawn no other"
    assert len(made.model.log) == 1


def test_the_woken_draw_again_when_a_newer_refusal_came_meanwhile() -> None:
    made = bench([told(2), told(8), say()], tasks=3)
    for number in range(1, 4):
        made.deliver(f"t{number}")
    wake(made, "t1")  # told again
    before = made.task("t2").parked.ticket
    wake(made, "t2")
    assert made.task("t2").parked.ticket.split(":")[0] != before.split(":")[0]
    assert waits_s(made, "t2") > 6
    assert len(made.model.log) == 2


def test_a_refusal_of_a_request_sent_before_everybody_was_told_counts_once() -> None:
    """Two are under way when the API begins to refuse."""
    made = bench([lambda body, watch: meanwhile(), say()], tasks=2)

    def meanwhile() -> ModelTransient:
        inner = Bench()
        inner.server, inner.clock, inner.settings = made.server, made.clock, made.settings
        inner.store, inner.views = made.store, made.views
        inner.model = Api([told()])
        inner.deliver("t2")
        return told()

    made.deliver("t1")
    closed = record(made)
    assert closed is not None
    assert (closed.streak, closed.drawn) == (1, 2)


def test_a_used_up_limit_makes_the_next_one_wait_and_counts_as_no_refusal() -> None:
    last = Answer([SEND], "tool_use", resume_after_s=7)
    made = bench([last], [say()])
    made.deliver()
    assert made.effects == ["send a"], "what was answered is worked on"
    assert 7 <= waits_s(made) <= 8.3
    assert len(made.model.log) == 1
    wake(made)
    assert made.status() is Status.SUCCEEDED


def test_a_lost_record_lets_everybody_through() -> None:
    made = bench([told(500), say()], tasks=2)
    made.deliver("t1")
    made.store.client.delete(made.store.keys.api(HERE.digest))
    made.deliver("t2")
    assert made.status("t2") is Status.SUCCEEDED
    assert made.store.wake("t1")
    made.deliver("t1")
    assert made.status("t1") is Status.SUCCEEDED


@pytest.mark.parametrize("trouble", [redis.ConnectionError("away"), redis.ResponseError("OOM command not allowed")])
def test_a_redis_in_trouble_leaves_the_gate_open(monkeypatch: pytest.MonkeyPatch, trouble: redis.RedisError) -> None:
    made = bench([told(500), say()], tasks=2)
    made.deliver("t1")

    def look(self: Throttle, digest: str) -> Any:
        raise trouble

    monkeypatch.setattr(Throttle, "look", look)
    made.deliver("t2")
    assert made.status("t2") is Status.SUCCEEDED


def test_a_refusal_that_cannot_be_written_down_parks_the_one_task_as_any_fault_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def tell(*args: Any, **options: Any) -> Any:
        raise RedisUnavailable("away")

    monkeypatch.setattr(Throttle, "tell", tell)
    made = bench([told(9), say()])
    assert made.deliver() == "parked: the model cannot be reached just now: slow down"
    assert waits_s(made) >= 8.9


def test_other_faults_and_answers_without_news_write_nothing() -> None:
    made = bench([ModelTransient("broken"), calls(SEND)], [say()])
    made.deliver()
    assert record(made) is None
    assert made.store.wake(T)
    made.deliver()
    assert made.status() is Status.SUCCEEDED
    assert not list(made.store.client.scan_iter("baton:api*"))


def test_a_gate_without_a_name_is_open() -> None:
    assert Gate().through(lambda: say()) == say()  # type: ignore[arg-type, return-value]


# -- who shares a limit --------------------------------------------------------------------------------------------


def test_an_endpoint_is_address_key_and_model_and_does_not_show_the_key() -> None:
    def of(url: str = "http://one.example/v1x", key: str = "sk-secret", model: str = "m") -> Endpoint:
        made = claude(url)
        made._api_key = key
        with made:
            return made.endpoint({"model": model})

    assert of() == of()
    assert len({one.digest for one in (of(), of("http://two.example"), of(key="sk-other"), of(model="n"))}) == 4
    assert (of().host, of().model) == ("one.example", "m")
    assert "secret" not in repr(of())


def test_a_client_that_cannot_be_made_is_the_configs_fault_before_the_gate_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    made = mocked(lambda _: None)  # type: ignore[arg-type, return-value]
    made._api_key = " "
    with pytest.raises(ModelConfig):
        made.endpoint(request())

"""What is run while mishaps strike: tasks, their tools, and what people do with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tests.support.agents import T, World
from tests.support.every_fleet import Fleet
from tests.support.every_time import WORK_S
from tests.support.script import calls, say, use
from worker.dispatch import open_store
from worker.errors import ModelTransient
from worker.settings import Settings, load_settings
from worker.state.ledger import Resolution
from worker.state.task import Status
from worker.tools import Tool, tool


class Outside(World):
    """The world of one run after the other. `then`, of the story, is called once something has happened in it."""

    def __init__(self) -> None:
        super().__init__()
        self.made = self.tools()  # once: to make them costs as much as a run

    def begin(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.effects, self.keys = [], {}

    def did(self, what: str, line: str) -> str:
        if self.fleet.line.broken is not None:  # nothing happens at the hand of a dead process
            raise self.fleet.line.broken
        if self.fleet.woken is not None and self.fleet.woken[0] is self.fleet.line:
            self.fleet.course.wrong.append(f"{what} {line} at the hand of one that woke up too late")
        answer = super().did(what, line)
        self.fleet.story.then(self.fleet, f"{what} {line}")
        return answer

    def tools(self) -> list[Tool]:
        @tool
        def burst(line: str) -> str:
            self.did("burst", line)
            raise RuntimeError("burst")

        return [*super().tools(), burst]


SETTINGS = load_settings({}, verify_settle_s=0)  # that wait is for a world with a delay, and is a real one
WORLD = Outside()


def nothing_more(fleet: Fleet, happened: str) -> None:
    """For `then`."""


def nobody(fleet: Fleet, status: Status) -> bool:
    """For `people`: did anybody do anything?"""
    return False


@dataclass(frozen=True)
class Story:
    """A task, told by the answers of its model. `ends`: how it may end, whatever befalls it. `plain`: nobody does
    anything but its worker."""

    name: str
    steps: Callable[[Fleet], list[Any]]
    then: Callable[[Fleet, str], None] = nothing_more
    people: Callable[[Fleet, Status], bool] = nobody
    ends: frozenset[Status] = frozenset({Status.SUCCEEDED})
    plain: bool = False
    asks: dict[str, Any] = field(default_factory=dict)
    settings: Settings = SETTINGS
    world: Outside = WORLD


def _always(*steps: Any) -> Callable[[Fleet], list[Any]]:
    return lambda fleet: list(steps)


# -- what happens beside the calls ---------------------------------------------------------------------------------


def _takes_its_time(fleet: Fleet, happened: str) -> None:
    fleet.clock.sleep(WORK_S)


def _swept_meanwhile(fleet: Fleet, happened: str) -> None:
    fleet.sweep()
    fleet.clock.sleep(WORK_S)


def _delivered_again(fleet: Fleet, happened: str) -> None:
    fleet.work(f"{T}-1")


def _cancelled(fleet: Fleet, happened: str) -> None:
    fleet.ask("cancel", lambda store: store.cancel(T, by="ann"))


def _killed(fleet: Fleet, happened: str) -> None:
    if "kill" not in fleet.asked:
        fleet.asked.add("kill")
        fleet.die()


# -- what people do ------------------------------------------------------------------------------------------------


def _retry(fleet: Fleet, status: Status) -> bool:
    return status.ended and status is not Status.SUCCEEDED and fleet.ask("retry", lambda s: s.retry(T, by="ann"))


def _cancel_queued(fleet: Fleet, status: Status) -> bool:
    return fleet.ask("cancel", lambda store: store.cancel(T, by="ann"))


def _wake(fleet: Fleet, status: Status) -> bool:
    return status is Status.PARKED and fleet.ask("wake", lambda store: store.wake(T))


def _recover(fleet: Fleet, status: Status) -> bool:
    """An operator who knows that the holder is gone does not wait for the sweeper."""
    if status is not Status.RUNNING:
        return False
    fence = fleet.observer.get(fleet.store.keys.epoch(T)).decode()
    return fleet.ask("recover", lambda store: store.recover(T, proof="seen by ann", fence=fence))


def _redeliver(fleet: Fleet, status: Status) -> bool:
    """The queue was emptied by hand; and so delivered again by hand."""
    if status is not Status.QUEUED or "lost" in fleet.asked:
        return False
    fleet.asked.add("lost")
    fleet.popped.add(fleet.observer.lpop("rq:queue:agents").decode())
    number = fleet.task().delivery
    return fleet.ask("redeliver", lambda store: store.redeliver(T, number))


def _resolve(fleet: Fleet, status: Status) -> bool:
    """Looks at the world, and says what became of the call that holds the task."""
    if status is not Status.PARKED or not fleet.task().reason.startswith("needs a person"):
        return False
    call = fleet.checkpoint().pending[0]
    happened = f"wire {call.input['line']}" in fleet.effects
    word = Resolution("happened", f"did wire {call.input['line']}") if happened else Resolution("not_happened")
    again = f"resolve, park {fleet.task().parks}"
    return fleet.ask(again, lambda store: store.resolve(T, call.turn, call.id, word, by="ann"))


def _killed_thrice(fleet: Fleet) -> list[Any]:
    def kill(body: dict[str, Any], watch: Any) -> Any:
        fleet.die()

    return [[kill, kill, kill, say()]]


def _under_budget(fleet: Fleet) -> list[Any]:
    open_store(fleet.settings, fleet.observer).set_budget("tag=a", 1_000_000, 0)
    return [calls(use("send", 1, line="a")), say()]


BUDGETED = "under a budget, with one place"
MIXED = [use("look", 1, line="a"), use("put", 2, line="b"), use("send", 3, line="c"), use("post", 4, line="d")]
TWO_SENT = calls(use("send", 1, line="a"), use("send", 2, line="b"))
PAUSED = calls(use("send", 1, line="a"), stop="pause_turn")
WIRED = calls(use("wire", 1, line="a"), use("look", 2, line="b"))
ONLY_FAILED, CANCELLED_OR_DONE = frozenset({Status.FAILED}), frozenset({Status.CANCELLED, Status.SUCCEEDED})

_plain = partial(Story, plain=True)

STORIES = [
    _plain("a read", _always(calls(use("look", 1, line="a")), say())),
    _plain("a side effect", _always(calls(use("send", 1, line="a")), say()), _swept_meanwhile),
    _plain("an idempotent call", _always(calls(use("put", 1, line="a")), say())),
    _plain("mixed calls", _always(calls(*MIXED), say())),
    _plain("a tool that raises", _always(calls(use("burst", 1, line="a"), use("send", 2, line="b")), say())),
    _plain("cut off by max_tokens", _always(say("and so", "max_tokens")), ends=ONLY_FAILED),
    _plain("a paused turn", _always(say("well", "pause_turn"), PAUSED, say())),
    Story("reads side by side", _always(calls(use("look", 1, line="a"), use("look", 2, line="b")), say())),
    Story("calls that cannot run", _always(calls(use("nothing", 1), use("send", 2, words="a")), say())),
    Story("an id used again", _always(calls(use("send", 1, line="a")), calls(use("send", 1, line="b")), say())),
    Story("delivered twice", _always(calls(use("send", 1, line="a")), say()), _delivered_again),
    Story("killed in a side effect", _always(TWO_SENT, say()), _killed),
    Story("held for a person", _always(WIRED, say()), people=_resolve),
    Story("held and resolved", _always(WIRED, say()), _killed, _resolve),
    Story("cancelled in a call", _always(TWO_SENT, say()), _cancelled, ends=CANCELLED_OR_DONE),
    Story("cancelled and retried", _always(TWO_SENT, say()), _cancelled, _retry),
    Story("cancelled in the queue", _always(say()), people=_cancel_queued, ends=CANCELLED_OR_DONE),
    Story("failed and retried", _always([say("and so", "max_tokens"), say()]), people=_retry),
    Story("dead and retried", _killed_thrice, people=_retry),
    Story("parked until the model is back", _always(calls(use("send", 1, line="a")), [ModelTransient("busy"), say()])),
    Story("parked and woken by hand", _always([ModelTransient("busy"), say()]), people=_wake),
    Story("asked for later", _always(say()), asks={"delay_ms": 5_000, "dedupe_key": "k"}),
    Story("recovered by hand", _always(TWO_SENT, say()), _killed, _recover),
    Story("delivered again by hand", _always(say()), people=_redeliver),
    Story(BUDGETED, _under_budget, asks={"tags": ("a",), "concurrency_key": "k", "concurrency": 1}),
]

"""What proves that the holder of a task is gone, cheapest first.

    1  its parent reaped it (waitpid)                 `worker.fleet` has it, and does not wait for a sweep
    2  on this host: its process does not exist       `worker.process.is_gone`
    3  on any host: the server has no longer          `Connections`
       the connection that kept its lease
    4  its lease ran out

A killed process's sockets are closed by its kernel at once, so 3 takes about a second wherever the process was. It says
"died or was cut off", no more: a heartbeat that was cut notices at once and is back under another number; and a
side effect that may be going on unseen is left to the other proofs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import redis

from worker.log import event
from worker.process import is_gone
from worker.state.lease import epoch_number
from worker.state.transact import PASSING, error_code
from worker.state.views import Running

log = logging.getLogger(__name__)

GRACE_S = 1.0
BATCH = 500


@dataclass(frozen=True)
class Proof:
    """`words` for people; `fence` and `beat` bound what was proven, see `Store.recover`."""

    words: str
    fence: str | None = None
    beat: str | None = None

    @property
    def process_is_dead(self) -> bool:
        return self.fence is not None and self.beat is None


class Proofs:
    """Looks at running tasks again and again; remembers when it first missed a connection."""

    def __init__(self, client: redis.Redis, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.connections = Connections(client, monotonic)

    def of(self, everything: Sequence[Running], now_ms: int) -> Iterator[tuple[Running, Proof]]:
        """Those whose holder is proven gone."""
        alive: list[Running] = []
        for running in everything:
            if is_gone(running.owner):
                words = f"its process {running.owner.get('pid')} on {running.owner.get('host')} is gone"
                yield running, Proof(words, running.fence)
            elif not running.locked and running.deadline_ms <= now_ms:
                yield running, Proof("its lease ran out")
            else:
                alive.append(running)
        for running in self.connections.gone(alive):
            words = f"its connection {running.beat.rpartition(':')[2]} from {running.owner.get('host')} is gone"
            yield running, Proof(words, running.fence, running.beat)


class Connections:
    """Which heartbeats' connections the server does not have any more, for longer than a grace."""

    def __init__(self, client: redis.Redis, monotonic: Callable[[], float]) -> None:
        self._client: Any = client  # redis-py types every answer as bytes or str
        self._monotonic = monotonic
        self._missed: dict[tuple[str, str, str], float] = {}  # task, fence, connection → since when
        self._forbidden = False

    def gone(self, candidates: Sequence[Running]) -> list[Running]:
        """Of these, whose connection has been missing since a look at least GRACE_S ago."""
        asked = [one for one in candidates if _split(one)[1] and not one.open_call]
        missing = {_name(one): one for one in self._missing(asked)}
        now = self._monotonic()
        self._missed = {name: self._missed.get(name, now) for name in missing}
        return [missing[name] for name, since in self._missed.items() if now - since >= GRACE_S]

    def _missing(self, asked: Sequence[Running]) -> Iterator[Running]:
        for start in range(0, len(asked), BATCH):
            if self._forbidden:
                return
            batch = asked[start : start + BATCH]
            try:
                run_id, there = self._look(number for _, number in map(_split, batch))
            except redis.ResponseError as error:
                if error_code(error) in PASSING:
                    raise
                why = f"{error}; a dead worker of another host is noticed when its lease runs out"
                event(log, "no-client-list", level=logging.WARNING, why=why)
                self._forbidden = True
                return
            # Of another incarnation of the server nothing is known: numbers begin anew with each.
            yield from (one for one in batch if _split(one)[0] == run_id and _split(one)[1] not in there)

    def _look(self, numbers: Iterable[str]) -> tuple[str, set[str]]:
        """(the server's run id, those of `numbers` that are connected to it), at one moment."""
        with self._client.pipeline(transaction=True) as pipe:
            pipe.info("server")
            pipe.client_list(client_id=list(numbers))
            info, clients = pipe.execute()
        return str(info["run_id"]), {str(client["id"]) for client in clients}


def _name(one: Running) -> tuple[str, str, str]:
    return one.task_id, one.fence, one.beat


def _split(one: Running) -> tuple[str, str]:
    """(run id, client id), empty unless this ownership wrote them: an older Baton's claim leaves the last one's."""
    epoch, _, rest = one.beat.partition(":")
    run_id, _, number = rest.partition(":")
    return (run_id, number) if epoch == str(epoch_number(one.fence)) and number.isdigit() else ("", "")

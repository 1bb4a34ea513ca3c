"""The real commands as processes, and a worker that is played by the test: the store's verbs, no model, no RQ."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis

from worker.dispatch import open_store
from worker.settings import load_settings
from worker.state.checkpoint import Checkpoint, Message, tool_calls
from worker.state.codec import digest
from worker.state.lease import Holder
from worker.state.ledger import Call, Entry
from worker.state.store import Store
from worker.state.task import Status

BIN = Path(sys.executable).parent
OWNER = {"host": "testhost", "pid": 4711}


def environment(url: str, **variables: str) -> dict[str, str]:
    """The test's own environment without anything that is Baton's, and Redis at `url`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("BATON_", "ANTHROPIC_"))}
    return {**kept, "BATON_REDIS_URL": url, "PYTHONIOENCODING": "utf-8", **variables}


def interruptible(argv: Sequence[str | Path]) -> list[str | Path]:
    """`argv`, with SIGINT as a terminal gives it: whatever runs in the background of a script ignores it."""
    restore = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    )
    return [sys.executable, "-c", restore, *argv]


@contextmanager
def child(argv: Sequence[str | Path], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is gone when the block is over, even if the test failed while it waits for something."""
    process = subprocess.Popen(argv, **options)
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=10)


class Commands:
    """Runs `enqueue-task` and `baton` in a directory without a .env, against one Redis."""

    def __init__(self, url: str, cwd: Path) -> None:
        self.url = url
        self.cwd = cwd

    def run(
        self, *argv: str | bytes | Path, stdin: bytes | int = b"", env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[bytes]:
        name, *rest = argv
        feed: dict[str, Any] = {"stdin": stdin} if isinstance(stdin, int) else {"input": stdin}
        return subprocess.run(
            [BIN / os.fsdecode(name), *rest],
            **feed,
            capture_output=True,
            env=environment(self.url, **(env or {})),
            cwd=self.cwd,
            timeout=60,
        )

    def ok(self, *argv: str | bytes | Path, **options: Any) -> str:
        """stdout of a command that must succeed."""
        done = self.run(*argv, **options)
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode()

    def refused(self, code: int, *argv: str | bytes | Path, **options: Any) -> str:
        """stderr of a command that must end with `code`, print nothing else, and show no traceback."""
        done = self.run(*argv, **options)
        said = done.stderr.decode()
        assert done.returncode == code, (done.returncode, said)
        assert done.stdout == b""
        assert "Traceback" not in said
        return said

    def json(self, *argv: str, **options: Any) -> Any:
        return json.loads(self.ok(*argv, "--json", **options))

    def enqueue(self, *argv: str | bytes | Path, **options: Any) -> str:
        """The id of the task."""
        return self.ok("enqueue-task", *argv, **options).strip()


class Puppet:
    """A worker whose strings the test pulls: holds one task after `claim`."""

    def __init__(self, client: redis.Redis, task_id: str) -> None:
        self.store: Store = open_store(load_settings({}), client)
        self.task_id = task_id
        self.now = Checkpoint()
        self.holder: Holder | None = None

    @property
    def held(self) -> Holder:
        assert self.holder is not None, "claim first"
        return self.holder

    def claim(self) -> Puppet:
        delivery = int(self.store.client.hget(self.store.keys.task(self.task_id), "delivery") or 0)  # type: ignore[arg-type]
        claimed = self.store.claim(self.task_id, delivery, OWNER)
        assert isinstance(claimed, Holder), claimed
        self.holder = claimed
        claimed.seq = int(self.store.client.hget(self.store.keys.checkpoint(self.task_id), "seq") or 0)  # type: ignore[arg-type]
        if claimed.seq == 0:
            self.now.messages = [{"role": "user", "content": "hello"}]
            self.store.begin(claimed, {"model": "m"}, self.now.messages[0])
        return self

    def respond(self, text: str = "", calls: Mapping[str, str] | None = None) -> tuple[Call, ...]:
        """A model's answer: some text, and calls by id → name."""
        blocks: list[dict[str, Any]] = [{"type": "text", "text": text}] if text else []
        blocks += [{"type": "tool_use", "id": id, "name": name, "input": {}} for id, name in (calls or {}).items()]
        message: Message = {"role": "assistant", "content": blocks}
        pending = tool_calls(message, self.now.turns + 1) if calls else ()
        stop_reason = "tool_use" if calls else "end_turn"
        self.now = Checkpoint(
            turns=self.now.turns + 1,
            total_tokens=self.now.total_tokens + 100,
            messages=[*self.now.messages, message],
            pending=pending,
            stop_reason=stop_reason,
        )
        names = [call.name for call in pending]
        told = {"stopReason": stop_reason, "tokens": 100, "tries": 1, "text": text, "calls": names}
        self.store.save_response(self.held, message, self.now, **told)
        return pending

    def run_call(self, call: Call, *, decision: str = "run", is_error: bool = False) -> None:
        self.store.mark_started(self.held, call)
        entry = Entry(call.name, digest(call.input), "fine", is_error, self.held.epoch)
        self.store.record_result(self.held, call, entry, decision=decision)

    def answer(self, decisions: Mapping[str, str]) -> None:
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": "fine"} for call in self.now.pending]
        message: Message = {"role": "user", "content": results}
        self.now = Checkpoint(
            turns=self.now.turns, total_tokens=self.now.total_tokens, messages=[*self.now.messages, message]
        )
        self.store.save_results(self.held, message, self.now, decisions=dict(decisions))

    def die(self, proof: str = "its process 4711 on testhost is gone") -> Status | None:
        """What a sweeper does after the death; the next `claim` is the next worker's."""
        return self.store.recover(self.task_id, proof=proof, fence=self.held.fence)

    def finish(self, status: Status = Status.SUCCEEDED, *, reason: str = "end_turn", result: str = "") -> None:
        self.store.finish(self.held, status, reason=reason, result=result)

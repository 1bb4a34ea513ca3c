"""The same request twice, many at once, and with Redis going away in the middle: one task, or none and a clear word."""

from __future__ import annotations

import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import redis

from enqueue import TaskHandle, enqueue_task, get_task
from enqueue.api import _client
from tests.support.commands import BIN, Commands, Puppet, environment
from worker.errors import InvalidInput, RedisUnavailable, TaskConflict, TaskNotFound
from worker.settings import Settings, load_settings
from worker.state.task import Status
from worker.state.transact import connect

pytestmark = pytest.mark.server

Enqueue = Callable[..., TaskHandle]


@pytest.fixture
def settings(redis_url: str) -> Settings:
    return load_settings({}, redis_url=redis_url)


@pytest.fixture
def enqueue(settings: Settings, redis_client: redis.Redis) -> Enqueue:
    def call(text: str = "x", **options: object) -> TaskHandle:
        return enqueue_task(text, settings=settings, client=redis_client, **options)  # type: ignore[arg-type]

    return call


def queued(client: redis.Redis) -> list[bytes]:
    jobs = client.lrange("rq:queue:agents", 0, -1)
    assert isinstance(jobs, list)
    return jobs


def test_twenty_processes_at_once_make_one_task(redis_client: redis.Redis, redis_url: str, tmp_path: Path) -> None:
    """Cases I01, I02: check-then-enqueue was raced into ten copies of one job."""
    argv = [BIN / "enqueue-task", "--task-id=same", "x"]
    many = [
        subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(redis_url), cwd=tmp_path)
        for _ in range(20)
    ]
    said = [process.communicate(timeout=100) for process in many]

    assert [process.returncode for process in many] == [0] * 20, said
    assert {out for out, _ in said} == {b"same\n"}
    assert sorted("accepted before" in note.decode() for _, note in said) == [False] + [True] * 19
    assert queued(redis_client) == [b"same-1"]


@pytest.mark.parametrize("way", ["task_id", "dedupe_key"])
def test_twenty_callers_in_step_make_one_task(settings: Settings, redis_client: redis.Redis, way: str) -> None:
    """Processes start too slowly to be at the same place at the same time; threads behind a barrier do not."""
    together = threading.Barrier(20)

    def call(_: int) -> TaskHandle:
        with connect(settings.redis_url) as client:
            client.ping()
            together.wait(30)
            return enqueue_task("x", settings=settings, client=client, **{way: "same"})  # type: ignore[arg-type]

    with ThreadPoolExecutor(20) as pool:
        handles = list(pool.map(call, range(20)))

    (task_id,) = {handle.id for handle in handles}
    assert sorted(handle.existed for handle in handles) == [False] + [True] * 19
    assert queued(redis_client) == [f"{task_id}-1".encode()]


@pytest.mark.parametrize("stage", ["queued", "running", "succeeded", "dead"])
def test_an_id_names_one_request_for_as_long_as_its_task_is_kept(
    enqueue: Enqueue, redis_client: redis.Redis, stage: str
) -> None:
    """Case I01: a job enqueued again under its id ran twice, with the second one's arguments."""
    first = enqueue(task_id="mine")
    if stage != "queued":
        puppet = Puppet(redis_client, "mine").claim()
        if stage == "succeeded":
            puppet.finish()
        if stage == "dead":
            puppet.finish(Status.DEAD, reason="crashed")
    before = queued(redis_client)

    again = enqueue(task_id="mine")
    assert (first.existed, again.existed) == (False, True)
    with pytest.raises(TaskConflict):
        enqueue("another text", task_id="mine")
    with pytest.raises(TaskConflict):
        enqueue(task_id="mine", model="another")
    assert first.task().text == "x"
    assert first.status() == stage
    assert queued(redis_client) == before


@pytest.mark.parametrize(
    ("end", "reason", "taken"),
    [
        (Status.SUCCEEDED, "end_turn", True),
        (Status.FAILED, "limit", False),
        (Status.CANCELLED, "by me", False),
        (Status.DEAD, "crashed", False),
    ],
)
def test_a_dedupe_key_answers_with_its_task_unless_that_went_wrong(
    enqueue: Enqueue, redis_client: redis.Redis, end: Status, reason: str, taken: bool
) -> None:
    """Case C16: a resubmission was answered with the id of a dead job, and waited for ever."""
    first = enqueue(dedupe_key="report of May")
    assert enqueue(dedupe_key="report of May").id == first.id
    assert enqueue(dedupe_key="report of June").id != first.id
    puppet = Puppet(redis_client, first.id).claim()
    assert enqueue(dedupe_key="report of May").id == first.id
    puppet.finish(end, reason=reason)

    again = enqueue(dedupe_key="report of May")
    assert (again.id == first.id, again.existed) == (taken, taken)


def test_a_cancelled_task_leaves_no_job_behind(enqueue: Enqueue, redis_client: redis.Redis) -> None:
    """Case I08: one of two entries of a removed job stayed in the queue and ran."""
    handle = enqueue()
    redis_client.rpush("rq:queue:agents", f"{handle.id}-1")
    assert len(queued(redis_client)) == 2

    assert handle.cancel() is Status.QUEUED
    assert queued(redis_client) == []
    assert redis_client.exists(f"rq:job:{handle.id}-1") == 0
    assert handle.status() is Status.CANCELLED


def test_a_task_can_be_taken_up_again_by_its_id(
    enqueue: Enqueue, settings: Settings, redis_client: redis.Redis
) -> None:
    handle = get_task(enqueue().id, settings=settings, client=redis_client)
    assert (handle.status(), handle.result) == (Status.QUEUED, None)
    Puppet(redis_client, handle.id).claim().finish(result="done")

    assert handle.result == "done"
    assert [event.kind for event in handle.events()] == ["created", "claimed", "ended"]
    with pytest.raises(TaskNotFound):
        get_task("nobody", settings=settings, client=redis_client)
    with pytest.raises(InvalidInput):
        get_task("a:b", settings=settings, client=redis_client)


def test_a_client_that_decodes_answers_is_refused(settings: Settings) -> None:
    with pytest.raises(InvalidInput, match="decode_responses"):
        enqueue_task("x", settings=settings, client=redis.Redis(decode_responses=True))


# -- Redis goes away -----------------------------------------------------------------------------------------


class Cut:
    """A proxy in front of the server that cuts connections at the EXEC: before it passes, or before its reply does.

    `for_good`: nobody listens any more after that."""

    def __init__(self, server_url: str, *, passes: bool, for_good: bool) -> None:
        self._server = server_url.removeprefix("unix://").partition("?")[0]
        self._passes, self._for_good = passes, for_good
        self._armed = True
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        self._stop_listening()
        for thread in self._threads:
            thread.join(10)

    def _stop_listening(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes up accept()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(near,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, near: socket.socket) -> None:
        with near, socket.socket(socket.AF_UNIX) as far, suppress(OSError):
            far.connect(self._server)
            back = threading.Thread(target=self._copy_back, args=(far, near), daemon=True)
            back.start()
            while data := near.recv(1 << 16):
                if self._armed and b"EXEC\r\n" in data:
                    self._armed = False
                    if self._for_good:
                        self._stop_listening()
                    if self._passes:
                        near.shutdown(socket.SHUT_RDWR)  # the reply has nowhere to go
                        far.sendall(data)
                    break
                far.sendall(data)
            near.shutdown(socket.SHUT_RDWR)
            far.shutdown(socket.SHUT_WR)  # the server reads what it was sent, answers and closes
            back.join(10)

    def _copy_back(self, far: socket.socket, near: socket.socket) -> None:
        with suppress(OSError):
            while data := far.recv(1 << 16):
                with suppress(OSError):
                    near.sendall(data)


@pytest.fixture
def cut(redis_url: str, redis_client: redis.Redis) -> Iterator[Callable[..., Cut]]:
    made: list[Cut] = []

    def make(**options: bool) -> Cut:
        made.append(Cut(redis_url, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("passes", [True, False], ids=["applied", "not-applied"])
def test_a_reply_that_is_lost_changes_nothing(
    cut: Callable[..., Cut], redis_client: redis.Redis, tmp_path: Path, passes: bool
) -> None:
    proxy = cut(passes=passes, for_good=False)

    done = Commands(proxy.url, tmp_path).run("enqueue-task", "--task-id=mine", "x")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"mine\n", b"")
    assert queued(redis_client) == [b"mine-1"]


@pytest.mark.parametrize("passes", [True, False], ids=["applied", "not-applied"])
def test_an_outcome_that_nobody_can_know_is_said_to_be_unknown_and_asking_again_is_safe(
    cut: Callable[..., Cut], redis_client: redis.Redis, redis_url: str, tmp_path: Path, passes: bool
) -> None:
    """Case F16: submitted tasks never ran, and the submitter had been told that all was well."""
    proxy = cut(passes=passes, for_good=True)

    said = Commands(proxy.url, tmp_path).refused(3, "enqueue-task", "--task-id=mine", "x")
    assert "whether task mine was accepted is unknown" in said
    assert "--task-id" in said
    assert queued(redis_client) == ([b"mine-1"] if passes else [])

    assert Commands(redis_url, tmp_path).enqueue("--task-id=mine", "x") == "mine"
    assert queued(redis_client) == [b"mine-1"]


def test_without_redis_nothing_is_enqueued_and_the_way_out_is_named(tmp_path: Path) -> None:
    nowhere = Commands("redis://:geheim@127.0.0.1:1/0", tmp_path)
    for argv in (["enqueue-task", "x"], ["baton", "tasks"], ["baton", "cancel", "x"], ["baton", "sweep", "--once"]):
        said = nowhere.refused(3, *argv)
        assert "no Redis at redis://***@127.0.0.1:1/0" in said
        assert "`baton up`" in said
        assert "geheim" not in said
        assert ("nothing was enqueued" in said) == (argv[0] == "enqueue-task")


def test_a_library_call_without_redis_is_an_error_of_ours() -> None:
    settings = load_settings({}, redis_url="redis://127.0.0.1:1/0")
    with pytest.raises(RedisUnavailable, match="nothing was enqueued"):
        enqueue_task("x", settings=settings)
    with pytest.raises(RedisUnavailable, match="no Redis at"):
        get_task("x", settings=settings)
    assert _client(settings) is _client(settings)


def test_a_full_redis_refuses_and_nothing_is_enqueued(
    redis_client: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    redis_client.config_set("maxmemory", "1")
    try:
        said = Commands(redis_url, tmp_path).refused(3, "enqueue-task", "x")
    finally:
        redis_client.config_set("maxmemory", "0")
    assert "nothing was enqueued" in said
    assert redis_client.dbsize() == 0

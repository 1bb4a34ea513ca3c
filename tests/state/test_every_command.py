"""Death and trouble at every message to Redis: whole tasks, with their workers, sweepers and people.

Each test runs one story again and again, each time with a mishap at another message, until the task has ended, with a
new owner after each death. After every run the guarantees must hold, compared with the run in which nothing went wrong.
The number of points is printed at the end of the test run; `EVERY_POINT=1` tries each mishap at each message.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatchcase

import pytest
import redis

from tests.state.faults import Blow, Fault
from tests.state.invariants import check_invariants
from tests.support.agents import T
from tests.support.every_checks import Outcome, check_calls
from tests.support.every_course import Point
from tests.support.every_fleet import Fleet
from tests.support.every_points import EVERYTHING, points
from tests.support.every_run import Stage, told, tried
from tests.support.every_server import Still, digests
from tests.support.every_stories import STORIES, Story
from worker.state.store import Store
from worker.state.task import Status

pytestmark = [
    pytest.mark.server,
    pytest.mark.timeout(3_600 if EVERYTHING else 240),
    pytest.mark.no_cover,  # these lines are run by other tests, too; counting them here would double the time
]

EACH_STORY = pytest.mark.parametrize("story", STORIES, ids=lambda story: story.name)
OF = {story.name: story for story in STORIES}


@pytest.fixture
def stage(redis_client: redis.Redis, redis_url: str) -> Iterator[Stage]:
    with Stage(redis_url, redis_client) as made:
        yield made
    redis_client.flushdb()


@EACH_STORY
def test_whatever_strikes_at_whichever_message_every_guarantee_holds(stage: Stage, story: Story) -> None:
    """A01-A04, A11, A15, A16: the conversation. B01-B03, B09, B12: side effects. F06, F07, M1-M3: lost replies and
    servers that refuse; E14, F02: for longer than anybody's patience."""
    clean = stage.clean(story)
    chosen = list(points(story, clean.sent))
    left_out = set(range(1, len(clean.sent) + 1)) - {point.at for point in chosen}
    assert not left_out or not story.plain, f"messages at which nothing is tried: {left_out}"
    tried.update(str(point.mishap) for point in chosen)
    problems = stage.problems(story, clean, chosen)
    assert not problems, f"{len(problems)} of {len(chosen)} points{told(problems)}"


@EACH_STORY
def test_control_without_a_mishap_each_call_runs_once_and_the_checkpoint_has_one_of_two_shapes(
    stage: Stage, story: Story
) -> None:
    """A13: read before every message of the run, it is at point A or at point B, or not there yet."""
    fleet = Fleet(stage.url, stage.observer, story, Point())
    seen: Counter[bool] = Counter()

    def look() -> None:
        if fleet.documents():
            seen[bool(fleet.checkpoint().pending)] += 1  # raises where it is not sound

    fleet.course.look = look
    fleet.run()
    assert fleet.task().status in story.ends
    assert fleet.course.wrong == []
    assert all(times == 1 for times in Counter(fleet.effects).values())
    check_calls(fleet, Outcome.of(fleet))
    check_invariants(fleet.store)
    assert seen[False] or story.name == "cancelled in the queue"
    assert seen[True] or not fleet.results()


@EACH_STORY
def test_what_has_ended_is_left_alone(stage: Stage, story: Story) -> None:
    """B11: every job of the task is delivered once more; B07: and many sweeps find nothing to do."""
    fleet = stage.play(story)
    before, asked = digests(stage.observer), len(fleet.model.log)
    with fleet.played():
        for job in sorted(fleet.popped):
            if fleet.task().status is Status.SUCCEEDED:  # else it could be somebody who pressed "requeue"
                assert fleet.work(job).startswith("nothing to do")
        for _ in range(3):
            fleet.sweep()
            fleet.clock.sleep(20)
    assert {key: value for key, value in digests(stage.observer).items() if not key.startswith("rq:job:")} == {
        key: value for key, value in before.items() if not key.startswith("rq:job:")
    }
    assert len(fleet.model.log) == asked


def test_a_task_that_waits_for_a_worker_is_left_on_its_list(stage: Stage) -> None:
    """B07: it is not stuck, there is just nobody yet."""
    fleet = Fleet(stage.url, stage.observer, OF["a read"], Point())
    with fleet.played():
        fleet.go_on()  # it is created
        for _ in range(20):
            fleet.sweep()
            fleet.clock.sleep(5)
    assert stage.observer.lrange("rq:queue:agents", 0, -1) == [f"{T}-1".encode()]
    assert fleet.task().delivery == 1


def test_of_several_workers_with_the_same_job_one_has_the_task(stage: Stage) -> None:
    """B10: five deliveries of one job, the later ones while the first is being worked on."""
    story = OF["delivered twice"]
    outcomes: list[str] = []

    def four_more(fleet: Fleet, happened: str) -> None:
        outcomes.extend(fleet.work(f"{T}-1") for _ in range(4))

    fleet = stage.play(Story(story.name, story.steps, four_more))
    assert [outcome.partition(":")[0] for outcome in outcomes] == ["nothing to do"] * 4
    assert (fleet.effects, len(fleet.model.log), fleet.task().attempts) == (["send a"], 2, 1)


GIVING_UP = {
    Fault.OOM: "gave up: Redis refuses to store: *command not allowed when used memory > 'maxmemory'",
    Blow.NOSCRIPT: "gave up: Redis refused: No matching script",
    Fault.MISCONF: "lease lost: task t1, fence 1:*: out of touch with Redis",
    Fault.UNSENT: "lease lost: task t1, fence 1:*: out of touch with Redis",
}


@pytest.mark.parametrize("mishap", GIVING_UP)
def test_who_gives_up_at_point_b_says_why_and_the_next_one_knows_the_result(stage: Stage, mishap: Fault | Blow) -> None:
    """E14, F02, F07: the pipeline's own error must not hide the cause, and what the tool did is not done again."""
    story = OF["a side effect"]
    saves = [at for at, message in enumerate(stage.clean(story).sent, 1) if "RPUSH" in message.commands]
    fleet = stage.play(story, Point(mishap, at=saves[3], for_s=100))  # after create, begin and point A
    assert fnmatchcase(fleet.outcomes[0], f"{GIVING_UP[mishap]}*"), fleet.outcomes
    assert fleet.results()[0]["content"] == "did send a"
    assert fleet.effects == ["send a"]
    assert fleet.task().crashes == 1


@pytest.mark.parametrize("leak", ["stray", "rq:job:nobody", "baton:task:t1:lock"])
def test_control_what_is_read_at_once_shows_leaks_too(stage: Stage, leak: str) -> None:
    fleet = stage.play(OF["a read"])
    still = Store(Still(stage.observer), fleet.store.writes.dispatcher)  # type: ignore[arg-type]
    check_invariants(still)
    stage.observer.set(leak, "x")
    still = Store(Still(stage.observer), fleet.store.writes.dispatcher)  # type: ignore[arg-type]
    with pytest.raises(AssertionError):
        check_invariants(still)

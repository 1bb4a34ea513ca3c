"""What may be asked for is checked before anybody speaks to Redis."""

from __future__ import annotations

import math
from typing import Any

import pytest

from enqueue.ids import DIGITS, checked_id, new_id
from enqueue.request import new_task
from worker.errors import InvalidInput
from worker.settings import Settings, load_settings


@pytest.fixture(scope="module")
def settings() -> Settings:
    return load_settings({}, turns_max=7, queue="here", text_max_bytes=1000)


def test_ids_are_short_plain_unique_and_sort_by_time() -> None:
    ids = [new_id(ms) for ms in range(1_700_000_000_000, 1_700_000_002_000)]

    assert ids == sorted(ids)
    assert len({new_id(0) for _ in range(2_000)}) == 2_000
    assert all(len(one) == 26 and set(one) <= set(DIGITS) for one in ids)
    assert checked_id(new_id()) > ids[-1]


@pytest.mark.parametrize("good", ["a", "A-b_9", "x" * 64])
def test_an_id_of_ones_own_may_hold_letters_digits_dashes_and_underscores(good: str) -> None:
    assert checked_id(good) == good


@pytest.mark.parametrize("bad", ["", "x" * 65, "a b", "a:b", "ä", "a\n", "a/b", "*", None, 7])
def test_any_other_id_is_refused(bad: object) -> None:
    with pytest.raises(InvalidInput, match="task id"):
        checked_id(bad)


def test_what_is_left_out_comes_from_the_settings(settings: Settings) -> None:
    task = new_task(settings, "do it")

    assert (task.queue, task.turns_max, task.tools, task.delay_ms) == ("here", 7, None, 0)


def test_text_is_kept_as_it_is(settings: Settings) -> None:
    text = " \ufefffirst\r\nsecond\n\n"
    assert new_task(settings, text).text == text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty"),
        (" \n\t\u3000", "blank"),
        ("a\0b", "NUL"),
        ("\udcff", "UTF-8"),
        (b"bytes", "string"),
        (None, "string"),
    ],
)
def test_text_that_no_model_could_be_asked_is_refused(settings: Settings, text: Any, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        new_task(settings, text)


def test_the_longest_text_is_counted_in_bytes_and_the_refusal_says_both_numbers(settings: Settings) -> None:
    assert new_task(settings, "x" * 1000).text == "x" * 1000
    with pytest.raises(InvalidInput, match=r"1002 bytes.*1000.*BATON_TEXT_MAX_BYTES"):
        new_task(settings, "ä" * 501)


@pytest.mark.parametrize(
    "options",
    [
        {"queue": ""},
        {"queue": "a b"},
        {"queue": "rq:queue"},
        {"queue": "x" * 65},
        {"model": ""},
        {"model": "a\nb"},
        {"system": "\udcff"},
        {"system": "x" * 1001},
        {"turns_max": 0},
        {"turns_max": -1},
        {"turns_max": True},
        {"turns_max": 1.5},
        {"turns_max": 100_001},
        {"tokens_max": 0},
        {"dedupe_key": ""},
        {"dedupe_key": "  "},
        {"dedupe_key": "a\tb"},
        {"dedupe_key": "x" * 201},
        {"dedupe_key": "\udcff"},
        {"tools": "read_file"},
        {"tools": ["read file"]},
        {"tools": [7]},
        {"tags": "one"},
        {"tags": None},
        {"tags": [["one"]]},
        {"tags": ["a\x1b[31m"]},
        {"tags": [str(number) for number in range(21)]},
        {"delay_s": -1},
        {"delay_s": math.nan},
        {"delay_s": math.inf},
        {"delay_s": 1e12},
        {"delay_s": "5"},
        {"delay_s": True},
    ],
    ids=repr,
)
def test_options_that_make_no_sense_are_refused(settings: Settings, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        new_task(settings, "do it", **options)


def test_tools_and_tags_count_once_and_an_empty_list_of_tools_is_none_at_all(settings: Settings) -> None:
    task = new_task(settings, "do it", tools=["b", "a", "b"], tags=["x", "x"])

    assert (task.tools, task.tags) == (("b", "a"), ("x",))
    assert new_task(settings, "do it", tools=[]).tools == ()


def test_a_delay_is_rounded_up_to_milliseconds(settings: Settings) -> None:
    assert new_task(settings, "do it", delay_s=0.0001).delay_ms == 1

"""Every tool output becomes JSON-safe, visible and bounded before it is recorded."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import json
import subprocess
import sys
import time
import uuid
from collections import Counter, OrderedDict, deque, namedtuple
from pathlib import Path
from types import MappingProxyType
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from tests.unit.tools_kit import JobTimeout, answer, context, refusal
from worker.tools import tool
from worker.tools.output import clean, render, to_content
from worker.tools.plain import Unprintable

CAP = 10_000


class Colour(enum.Enum):
    RED = "red"


class Model(BaseModel):
    tags: set[str]


@dataclasses.dataclass
class Record:
    name: str
    seen: set[int]


Pair = namedtuple("Pair", "left right")

VALUES = [
    (None, "(no output)"),
    ("", "(empty output)"),
    (b"", "(empty output)"),
    ("  \n", "(output of white space only)"),
    ("plain", "plain"),
    ('{"a": 1}', '{"a": 1}'),
    (b"caf\xc3\xa9", "café"),
    (b"\xff\x00", "(binary, 2 bytes, base64) /wA="),
    (True, "true"),
    (7, "7"),
    (2**70, str(2**70)),
    (0.1, "0.1"),
    (float("nan"), "NaN"),
    ([float("inf")], "[Infinity]"),
    ({1: 2}, '{"1":2}'),
    ({True: 1, None: 2}, '{"true":1,"null":2}'),
    ({1: "int", "1": "str"}, '{"1":"int","1 (str)":"str"}'),
    ({(1, 2): 3}, '{"[1,2]":3}'),
    ([], "[]"),
    ({}, "{}"),
    ((1, "a"), '[1,"a"]'),
    ({"b", "a", 1}, '["a","b",1]'),
    (frozenset([frozenset([2, 1])]), "[[1,2]]"),
    (Colour.RED, "red"),
    (Pair(1, 2), '{"left":1,"right":2}'),
    (Record("x", {2, 1}), '{"name":"x","seen":[1,2]}'),
    (Model(tags={"b", "a"}), '{"tags":["a","b"]}'),
    (decimal.Decimal("1.50"), "1.50"),
    (datetime.datetime(2026, 1, 2, 3, tzinfo=datetime.UTC), "2026-01-02T03:00:00Z"),
    (uuid.UUID(int=1), "00000000-0000-0000-0000-000000000001"),
    (Path("a/b"), "a/b"),
    (deque([1]), "[1]"),
    (OrderedDict(a=1), '{"a":1}'),
    (MappingProxyType({"a": 1}), '{"a":1}'),
    (Counter("aa"), '{"a":2}'),
    ({"a": 1}.keys(), '["a"]'),
    (range(3), "[0,1,2]"),
    ((n for n in (1, 2)), "[1,2]"),
    (object(), "<object object>"),
    ([b"ab", b"\xff"], '["ab","(binary, 1 bytes, base64) /w=="]'),
]


@pytest.mark.parametrize(("value", "text"), VALUES, ids=[str(n) for n in range(len(VALUES))])
def test_a_value_becomes_this_text(value: Any, text: str) -> None:
    """Cases E01, E02, E04, E05, G12."""
    assert render(value, CAP) == (text, False)


def test_surrogates_are_joined_where_they_are_a_pair_and_replaced_where_not() -> None:
    assert to_content("a\ud83d\ude00b\ud800c\ude00", CAP) == "a😀b\ufffdc\ufffd"
    assert to_content({"\ud800": ["\udc00"]}, CAP) == '{"\ufffd":["\ufffd"]}'
    assert clean({"\ud83d\ude00": ("\ud800", 1)}) == {"😀": ["\ufffd", 1]}


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters())  # surrogates too
    | st.binary()
    | st.decimals()
    | st.datetimes()
    | st.dates()
    | st.timedeltas()
    | st.uuids()
    | st.complex_numbers()
    | st.just(object())
    | st.sampled_from(Colour)
    | st.builds(Record, st.text(), st.sets(st.integers()))
)
keys = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()) | st.binary() | st.dates()
anything = st.recursive(
    scalars | st.frozensets(keys),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(keys, inner)
        | st.fixed_dictionaries({"type": st.sampled_from(["text", "image", "document"]), "text": inner})
        | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": st.text(st.characters())}))
    ),
)


@given(anything, st.integers(64, 500))
def test_whatever_goes_in_comes_out_json_safe_bounded_and_visible(value: Any, max_bytes: int) -> None:
    content = to_content(value, max_bytes)
    assert json.loads(orjson.dumps(content)) == content
    assert to_content(content, max_bytes) == content, "cleaning again changes nothing: live equals resumed"
    texts = [content] if isinstance(content, str) else [block["text"] for block in content]
    assert sum(len(text.encode()) for text in texts) <= max_bytes
    assert all(text.strip() for text in texts)


@given(st.text(st.characters()))
def test_clean_text_is_what_utf16_makes_of_it(text: str) -> None:
    cleaned = clean(text)
    cleaned.encode()
    if all(not 0xD800 <= ord(c) <= 0xDFFF for c in text):
        assert cleaned == text


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), st.integers(64, 200))
def test_a_cut_keeps_the_longest_start_and_says_what_is_missing(text: str, max_bytes: int) -> None:
    text = "x" + text * 300
    total = len(text.encode())
    content = to_content(text, max_bytes)
    assert isinstance(content, str)
    kept, mark = content.split("… [cut: ")
    shown = len(kept.encode())
    assert text.startswith(kept)
    assert mark == f"{shown} of {total} bytes shown]"
    assert max_bytes - 8 <= len(content.encode()) <= max_bytes


def test_what_just_fits_is_not_cut() -> None:
    assert to_content("é" * 32, 64) == "é" * 32
    assert "cut" in to_content("é" * 32 + "x", 64)


def test_sets_come_in_the_same_order_in_every_process() -> None:
    words = ["fig", "apple", "date", "cherry", "banana", "elder"]
    code = f"from worker.tools.output import to_content; print(to_content({{'n': set({words})}}, 999))"
    seen = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert seen == {b'{"n":["apple","banana","cherry","date","elder","fig"]}\n'}


def _circle() -> Any:
    circle: dict[str, Any] = {}
    circle["self"] = [circle]
    return circle


def _deep() -> Any:
    deep: Any = 1
    for _ in range(100_000):
        deep = [deep]
    return deep


def _bomb() -> Any:
    bomb: Any = "ha"
    for _ in range(30):
        bomb = [bomb] * 10
    return bomb


def _endless() -> Any:
    while True:
        yield 1


UNPRINTABLE = [(_circle, "itself"), (_deep, "deeper"), (_bomb, "too large"), (_endless, "too large")]


@pytest.mark.parametrize(("make", "words"), UNPRINTABLE, ids=[make.__name__ for make, _ in UNPRINTABLE])
def test_what_cannot_be_written_down_is_said_so_in_words(make: Any, words: str) -> None:
    content, failed = render(make(), CAP)
    assert failed
    assert content.startswith("The tool ran, but its output cannot be shown")  # type: ignore[union-attr]
    assert words in content


def test_the_same_value_twice_is_no_circle() -> None:
    inner = [1]
    assert to_content([inner, inner], CAP) == "[[1],[1]]"


def test_clean_refuses_what_is_too_deep() -> None:
    with pytest.raises(Unprintable):
        clean(_deep())


def test_fifty_megabytes_are_cut_in_sane_time() -> None:
    """Case E09. The bound is generous; a quadratic step would take minutes."""
    start = time.monotonic()
    for value in ("x" * 50_000_000, "é" * 25_000_000 + "\ud800", b"\xff" * 50_000_000, ["x" * 50_000_000]):
        content = to_content(value, CAP)
        assert len(content.encode()) <= CAP  # type: ignore[union-attr]
    assert time.monotonic() - start < 15


def test_a_giant_integer_does_not_hold_the_gil_for_its_digits() -> None:
    """Case M5: 7.5 s of silence for one int → str, longer than a margin."""
    content = to_content(1 << 100_000_000, CAP)
    assert content.startswith("(integer of 100000001 bits, hexadecimal) 0x1000")  # type: ignore[union-attr]
    assert to_content(10**5000, CAP) == "1" + "0" * 5000


def test_a_failure_or_a_timeout_while_the_output_is_read_is_what_it_is() -> None:
    class Lazy:
        def __init__(self, error: type[Exception]) -> None:
            self.error = error

        def __str__(self) -> str:
            raise self.error("late")

    @tool(effect="read_only")
    def lazy(stop: bool) -> Any:
        return Lazy(JobTimeout if stop else KeyError)

    assert refusal(lazy, context(), stop=False) == "KeyError: 'late'"
    with pytest.raises(JobTimeout):
        lazy.run({"stop": True}, context())


def test_the_same_tool_output_reads_the_same_in_the_answer() -> None:
    @tool
    def weather() -> Any:
        return {"when": datetime.date(2026, 1, 2), "wind": float("nan"), "tags": {"b", "a"}}

    assert answer(weather, context()) == '{"when":"2026-01-02","wind":NaN,"tags":["a","b"]}'

"""What is stored comes back equal, or is refused before anything happened. orjson alone does neither (M25, E04)."""

from __future__ import annotations

import json
import uuid
from datetime import UTC, datetime
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from worker.state.codec import Unstorable, decode, digest, encode

BLOCKS = json.loads((Path(__file__).parents[1] / "data" / "content_blocks.json").read_text())

text = st.text(st.characters(exclude_categories=["Cs"]))  # no surrogates: they are no Unicode text
numbers = st.integers() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | numbers | text,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(text, inner, max_size=5),
    max_leaves=30,
)


def same(left: Any, right: Any) -> bool:
    """Equal in type, key order and sign of zero too, which == does not see."""
    return repr(left) == repr(right)


@given(values)
@example(2**63 - 1)
@example(2**63)
@example(2**64 - 1)
@example(2**64)
@example(-(2**63))
@example(-(2**63) - 1)
@example(-(2**64))
@example(10**40)
@example([-0.0, 0.0, 1.0, 1e22, 5e-324, 1.7976931348623157e308])
@example([True, 1, 1.0, False, 0, None])
@example({"b": 1, "a": {"d": 2, "c": 1234567890123456789012}})
@example("1234567890123456789012 in words \u2028 \x00 \U0001f600")
@example({"": {"": []}})
def test_a_json_value_comes_back_exactly(value: Any) -> None:
    assert same(decode(encode(value)), value)


def named(value: Any) -> str:
    """Without an address, which differs between processes."""
    return f"{type(value).__name__}-{ascii(value).partition(' object at ')[0][:25]}"


@pytest.mark.parametrize("depth", [10, 253, 254, 255, 300, 400])
def test_deep_nesting_comes_back_or_is_refused(depth: int) -> None:
    """orjson writes 254 levels and reads 1,024: some values would load and could never be saved again."""
    value: Any = "x"
    for _ in range(depth):
        value = [value]
    assert decode(encode(value)) == value


@pytest.mark.parametrize("big", ["", 2**70])
def test_absurd_nesting_is_refused_in_words(big: Any) -> None:
    value: Any = big
    for _ in range(100_000):
        value = [value]
    with pytest.raises(Unstorable):
        encode(value)
    while isinstance(value, list):  # taken apart by hand: freeing it at once would recurse too deeply
        value = value[0]


class Colour(Enum):
    RED = (1, 2)


@pytest.mark.parametrize(
    "value",
    [
        float("nan"), float("inf"), -float("inf"), [1, {"a": float("nan")}], {"a": [2**70, float("nan")]},
        "\ud800", {"\udfff": 1}, ["fine", "\ud83d"], b"bytes", {1: "int key"}, {None: 1}, {True: 1}, (1, 2), [(1,)],
        {1, 2}, Decimal("1.5"), datetime(2026, 1, 1, tzinfo=UTC), uuid.UUID(int=1), object(), Colour.RED, 1j,
        {"deep": [{"x": (2**70,)}]}, 10**5_000,
    ],
    ids=lambda value: named(value) if value != 10**5_000 else "5000 digits",
)  # fmt: skip
def test_what_would_change_is_refused(value: Any) -> None:
    with pytest.raises(Unstorable):
        encode(value)


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\x00" * 10, b"{", b"nul", b"{} {}", b"NaN", b"[Infinity]", b"[1234567890123456789012, NaN]", b"\xff\xfe",
        b'{"a":1}\x00\x00', b'["1234567890123456789012"]\x00', b'\xef\xbb\xbf["1234567890123456789012"]',
        '["1234567890123456789012"]'.encode("utf-16"), b"[1234567890123456789012" + b"[" * 100_000, b"9" * 5_000,
    ],
    ids=lambda data: ascii(data)[:30],
)  # fmt: skip
def test_what_is_no_document_is_a_value_error(data: bytes) -> None:
    """One kind of error, whichever of the two readers sees it: the callers turn it into words."""
    with pytest.raises(ValueError):  # noqa: PT011  # the words are the two libraries' own
        decode(data)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: str(block.get("type")))
def test_content_blocks_come_back_with_their_keys_in_order(block: dict[str, Any]) -> None:
    """Thinking blocks are signed, and prefixes are cached: both break over a key that moved."""
    assert json.dumps(decode(encode(block))) == json.dumps(block)


def test_control_orjson_alone_changes_values() -> None:
    assert orjson.dumps(float("nan")) == b"null"
    assert isinstance(orjson.loads(str(2**70)), float)
    assert orjson.loads(orjson.dumps((1, 2))) == [1, 2]


@given(values, values)
def test_a_digest_names_one_value(left: Any, right: Any) -> None:
    assert (digest(left) == digest(right)) == same(left, right)


def test_a_digest_tells_key_orders_apart_and_is_short() -> None:
    assert digest({"a": 1, "b": 2}) != digest({"b": 2, "a": 1})
    assert len(digest({})) == 32

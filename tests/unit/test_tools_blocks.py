"""A list of content blocks goes to the API as blocks, if the API will take them."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from worker.tools.output import render, to_content

CAP = 10_000

PNG = base64.b64encode(b"\x89PNG").decode()


def _image(data: str = PNG, media_type: str = "image/png") -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": media_type, "data": data}}


def test_content_blocks_pass_as_they_are_but_clean() -> None:
    document = {"type": "document", "title": "a\ud800", "source": {"type": "url", "url": "https://example.org/a.pdf"}}
    content = to_content([{"type": "text", "text": "a\ud800"}, _image(), document], CAP)
    assert content == [{"type": "text", "text": "a\ufffd"}, _image(), {**document, "title": "a\ufffd"}]


def test_an_empty_text_block_becomes_visible() -> None:
    """Case G12: the API refuses it with a permanent 400."""
    assert to_content([{"type": "text", "text": " "}], CAP) == [
        {"type": "text", "text": "(output of white space only)"}
    ]


NEARLY_BLOCKS = [
    [{"type": "text"}],
    [{"type": "text", "text": 1}],
    [{"type": "text", "text": "a", "id": 7}],
    [{"type": "image", "source": "a.png"}],
    [{"type": "image", "source": {"type": "base64", "data": b"a", "media_type": "image/png"}}],
    [{"type": "document", "source": {"type": "url", "url": "u"}, "context": 2**70}],
    [{"type": "text", "text": "a"}, {"type": "video"}],
    [{"type": "text", "text": "a"}, "b"],
]


@pytest.mark.parametrize("value", NEARLY_BLOCKS)
def test_what_only_looks_like_blocks_is_shown_as_data(value: Any) -> None:
    content, failed = render(value, CAP)
    assert isinstance(content, str)
    assert content.startswith("[")
    assert not failed


@pytest.mark.parametrize(
    ("block", "words"),
    [
        (_image(media_type="image/tiff"), "image/tiff"),
        (_image(data="not base64!"), "not base64"),
        (_image(data=""), "not base64"),
        (_image(data=base64.b64encode(b"x" * 6_000_000).decode()), "at most 5000000"),
    ],
    ids=["type", "data", "empty", "size"],
)
def test_a_block_the_api_would_refuse_for_ever_is_refused_here(block: Any, words: str) -> None:
    content, failed = render([block], CAP)
    assert failed
    assert words in content


def test_many_long_text_blocks_share_the_cap_and_each_shows_its_start() -> None:
    content: Any = to_content([{"type": "text", "text": letter * 5_000} for letter in "abc"], 1_000)
    assert [block["text"][0] for block in content] == ["a", "b", "c"]
    assert sum(len(block["text"].encode()) for block in content) <= 1_000
    assert render([{"type": "text", "text": "x" * 99}] * 100, 1_000)[1], "too many to show any of them"

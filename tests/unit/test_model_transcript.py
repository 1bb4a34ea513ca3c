"""The validator is the oracle of every crash test: it must see each way a conversation can be broken."""

from __future__ import annotations

import pytest

from ops.transcript import check_log, check_request

USER = {"role": "user", "content": "do it"}


def calls(*ids, **fields):
    blocks = [{"type": "tool_use", "id": id_, "name": "t", "input": {}, **fields} for id_ in ids]
    return {"role": "assistant", "content": blocks}


def results(*ids, extra=(), **fields):
    blocks = [{"type": "tool_result", "tool_use_id": id_, "content": "ok", **fields} for id_ in ids]
    return {"role": "user", "content": [*blocks, *extra]}


def says(text):
    return {"role": "assistant", "content": [{"type": "text", "text": text}]}


def body(*messages, **fields):
    return {"model": "m", "max_tokens": 1, "messages": list(messages), **fields}


TEXT = {"type": "text", "text": "and"}
TOOL = {"name": "t", "input_schema": {"type": "object"}}


@pytest.mark.parametrize(
    "valid",
    [
        body(USER),
        body(USER, calls("a", "b"), results("a", "b")),
        body(USER, calls("a"), results("a", extra=[TEXT])),
        body(USER, calls("a"), results("a"), calls("a"), results("a")),
        body(USER, says("x"), USER),
        body(USER, says("paused")),
        body(USER, says("paused"), calls("a"), results("a")),
        body(USER, calls("a"), {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]}),
        body({"role": "user", "content": [TEXT, {"type": "hologram", "x": None}]}),
        body(USER, system="s", tools=[TOOL, {"type": "web_search_20260101", "name": "web"}], stream=True),
    ],
)
def test_what_the_api_accepts_is_valid(valid):
    assert check_request(valid) == []


@pytest.mark.parametrize(
    ("broken", "word"),
    [
        (body(), "at least one"),
        ({"model": "m", "max_tokens": 1}, "at least one"),
        (body(says("x"), USER), "first message"),
        (body({"role": "system", "content": "x"}), "role"),
        (body({"role": "user", "content": []}), "must not be empty"),
        (body({"role": "user", "content": "  "}), "non-whitespace"),
        (body({"role": "user", "content": None}), "string or a list"),
        (body({"role": "user", "content": [{**TEXT, "text": "\n"}]}), "non-whitespace"),
        (body({"role": "user", "content": ["x"]}), "type"),
        (body({**USER, "extra": 1}), "Extra inputs"),
        (body("x"), "object"),
        (body(USER, calls("a")), "messages.1: `tool_use` ids were found without"),
        (body(USER, calls("a", "b"), results("b")), "found without `tool_result` blocks immediately after: a"),
        (body(USER, calls("a"), USER, results("a")), "found without"),
        (body(USER, calls("a"), says("x"), results("a")), "found without"),
        (body(USER, calls("a", "b"), results("a"), results("b")), "unexpected `tool_use_id`"),
        (body(USER, calls("a", "b"), results("b", "a")), "order"),
        (body(USER, calls("a"), results("a", "a")), "single result"),
        (body(USER, calls("a"), results("a", "z")), "unexpected `tool_use_id`"),
        (body(results("a")), "unexpected `tool_use_id`"),
        (body(USER, says("x"), results("a")), "unexpected `tool_use_id`"),
        (body(USER, calls("a", "a"), results("a")), "unique"),
        (body(USER, calls("a"), {"role": "user", "content": [TEXT, *results("a")["content"]]}), "first"),
        (body(USER, {"role": "assistant", "content": results("a")["content"]}), "`user` messages"),
        (body({"role": "user", "content": calls("a")["content"]}), "`assistant` messages"),
        (body(USER, calls("a"), results("a", content="")), "non-whitespace"),
        (body(USER, calls("a"), results("a", content=[])), "must not be empty"),
        (body(USER, calls("a", input=[]), results("a")), "object"),
        (body(USER, calls("a b"), results("a b")), "pattern"),
        (body(USER, calls("a", name=""), results("a")), "name"),
        (body(USER, temperature=1), "temperature: Extra inputs"),
        (body(USER, max_tokens=True), "max_tokens"),
        (body(USER, model=""), "model"),
        (body(USER, system=" "), "system"),
        (body(USER, tools=[TOOL, TOOL]), "unique"),
        (body(USER, tools=[{"name": "a b"}]), "pattern"),
        (body(USER, tools=[{"name": []}]), "pattern"),
        (body(USER, tools=[{"name": "t"}]), "input_schema"),
        (body(USER, tools={}), "list"),
        (body(USER, calls("a"), {"role": "user", "content": [{"type": "tool_result"}]}), "tool_use_id"),
    ],
)
def test_each_broken_conversation_is_named(broken, word):
    assert any(word in problem for problem in check_request(broken)), check_request(broken)


def test_a_failed_result_needs_words():
    silent = {"type": "tool_result", "tool_use_id": "a", "is_error": True}
    assert check_request(body(USER, calls("a"), {"role": "user", "content": [silent]}))


ONE, TWO = body(USER), body(USER, calls("a"), results("a"))


def test_a_log_that_only_grows_is_valid_and_a_retry_is_not_growth():
    assert check_log([ONE, ONE, TWO, TWO]) == []
    assert check_log([ONE, {**ONE, "stream": True}]) == []


@pytest.mark.parametrize(
    ("log", "word"),
    [
        ([TWO, ONE], "shrank"),
        ([ONE, body({**USER, "content": "other"}, calls("a"), results("a"))], "messages.0 differs"),
        ([ONE, body(USER, calls("a"), results("a"), system="new")], "system differs"),
        ([ONE, {**TWO, "max_tokens": 2}], "max_tokens differs"),
        ([body(USER, calls("a", input={"n": 1}), results("a")), body(USER, calls("a", input={"n": 1.0}), results("a"))],
         "messages.1 differs"),
        ([ONE, body(USER, calls("a"))], "request 1: messages.1"),
    ],
)  # fmt: skip
def test_a_log_that_changes_what_was_said_is_broken(log, word):
    assert any(word in problem for problem in check_log(log)), check_log(log)


def test_what_the_model_answered_must_come_back_key_for_key():
    answered = {"content": calls("a")["content"]}
    assert check_log([{"body": ONE, "response": answered}, {"body": TWO, "response": None}]) == []
    added = body(USER, calls("a", caller=None), results("a"))
    problems = check_log([{"body": ONE, "response": answered}, {"body": added, "response": None}])
    assert problems == ["request 1: messages.1 is not what the model answered"]
    # Asked twice (a crash before point A): either answer may be the one that was kept.
    other = {"content": calls("z")["content"]}
    log = [{"body": ONE, "response": other}, {"body": ONE, "response": answered}, {"body": TWO}]
    assert check_log(log) == []

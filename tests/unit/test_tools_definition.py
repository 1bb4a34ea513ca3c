"""The @tool decorator: what the model is shown, and what is refused at load."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from worker.tools import Effect, Tool, ToolContext, ToolDefinitionError, tool


class Place(BaseModel):
    title: str
    floor: int = 0


def test_a_tool_without_a_mark_is_a_side_effect() -> None:
    """Case B13: a guess of "read only" would run it twice after a crash."""

    @tool
    def get_status(name: str) -> str:
        return name

    @tool(effect="read_only")
    def marked(name: str) -> str:
        return name

    assert get_status.effect is Effect.SIDE_EFFECT
    assert marked.effect is Effect.READ_ONLY


def test_a_tool_is_still_the_function_its_author_wrote() -> None:
    @tool(effect=Effect.IDEMPOTENT)
    def double(n: int) -> int:
        return 2 * n

    assert double(4) == 8
    assert double.__name__ == "double"


def test_the_schema_shows_types_defaults_and_limits_and_nothing_else() -> None:
    @tool
    def book(
        json: Annotated[int, Field(ge=0)], place: Place | None = None, mode: Literal["a", "b"] = "a", _x: str = ""
    ) -> None:
        """Book."""

    schema = book.input_schema
    assert schema["type"] == "object"
    assert schema["additionalProperties"] is False
    assert schema["required"] == ["json"]
    assert schema["properties"]["json"] == {"type": "integer", "minimum": 0}
    assert schema["properties"]["mode"] == {"type": "string", "enum": ["a", "b"], "default": "a"}
    assert list(schema["properties"]) == ["json", "place", "mode", "_x"]
    assert list(schema["$defs"]["Place"]["properties"]) == ["title", "floor"], "a property may be called title"
    assert "title" not in schema["$defs"]["Place"]


def test_the_context_is_passed_in_and_not_shown() -> None:
    @tool
    def first(ctx: ToolContext, text: str) -> str:
        return ctx.task_id + text

    @tool
    def optional(text: str, ctx: ToolContext | None = None) -> str:
        return text

    assert list(first.input_schema["properties"]) == ["text"]
    assert list(optional.input_schema["properties"]) == ["text"]


GOOGLE = """Send it.

    It goes far.

    Args:
        to: The one who gets it.
    """
NUMPY = """Send it.

    It goes far.

    Parameters
    ----------
    to : str
        The one who gets it.
    """
REST = """Send it.

    It goes far.

    :param to: The one who gets it.
    """


@pytest.mark.parametrize("text", [GOOGLE, NUMPY, REST], ids=["google", "numpy", "rest"])
def test_a_docstring_describes_the_tool_and_its_parameters(text: str) -> None:
    def send(to: str) -> None: ...

    send.__doc__ = text
    definition = tool(send).definition()
    assert definition["description"] == "Send it.\n\nIt goes far."
    assert definition["input_schema"]["properties"]["to"]["description"] == "The one who gets it."


def test_what_the_author_wrote_in_field_wins_over_the_docstring() -> None:
    @tool(name="post-it", description="Other words.")
    def send(to: Annotated[str, Field(description="mine")]) -> None:
        """Send it.

        Args:
            to: not mine
        """

    definition = send.definition()
    assert (definition["name"], definition["description"]) == ("post-it", "Other words.")
    assert definition["input_schema"]["properties"]["to"]["description"] == "mine"


def test_a_definition_is_a_copy() -> None:
    """It goes into the frozen request; whoever changes it must not change the next task's."""

    @tool
    def f(a: int) -> None: ...

    f.definition()["input_schema"]["properties"].clear()
    assert list(f.definition()["input_schema"]["properties"]) == ["a"]


def test_the_definitions_are_equal_byte_for_byte_in_every_process() -> None:
    code = (
        "import json; from worker.tools import load_toolbox; from worker.settings import load_settings;"
        "print(json.dumps(load_toolbox([], load_settings({})).definitions()))"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(seen) == 1
    assert len(json.loads(seen.pop())) == 6


def star(*names: str) -> None: ...
def keywords(**names: str) -> None: ...
def positional(first: str, /) -> None: ...
def bare(first) -> None: ...  # type: ignore[no-untyped-def]
def unknown_type(first: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821
def not_json(first: Callable[[], None]) -> None: ...
def foreign(first: Tool) -> None: ...
def straße(größe: str) -> None: ...


REFUSED_PARAMETERS = [
    (star, "names"),
    (keywords, "names"),
    (positional, "first"),
    (bare, "first"),
    (unknown_type, "first"),
    (not_json, "first"),
    (foreign, "first"),
]


@pytest.mark.parametrize(("fn", "parameter"), REFUSED_PARAMETERS, ids=[fn.__name__ for fn, _ in REFUSED_PARAMETERS])
def test_a_parameter_no_model_can_fill_is_refused_by_name_at_load(fn: Callable[..., Any], parameter: str) -> None:
    """The SDK's own helper makes an array schema out of *args, and the API then refuses every request."""
    with pytest.raises(ToolDefinitionError) as caught:
        tool(fn)
    assert fn.__name__ in str(caught.value)
    assert f"`{parameter}`" in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_name_the_api_would_refuse_is_refused_at_load() -> None:
    with pytest.raises(ToolDefinitionError, match="straße"):
        tool(straße)
    with pytest.raises(ToolDefinitionError, match="größe"):
        tool(name="street")(straße)
    with pytest.raises(ToolDefinitionError, match="a b"):
        tool(name="a b")(lambda: None)
    with pytest.raises(ToolDefinitionError):
        tool(name="n" * 65)(lambda: None)
    assert tool(name="n" * 64)(lambda: None).name == "n" * 64


def test_a_function_that_yields_is_refused() -> None:
    """Calling it would build a generator and do nothing."""

    def lazy(n: int) -> Any:
        yield n

    with pytest.raises(ToolDefinitionError, match="lazy"):
        tool(lazy)


@pytest.mark.parametrize("option", [{"effect": "harmless"}, {"on_unknown": "guess"}, {"result_max_bytes": 3}])
def test_an_option_with_another_value_is_refused(option: dict[str, Any]) -> None:
    with pytest.raises(ToolDefinitionError, match=str(next(iter(option)))):
        tool(**option)(lambda: None)


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(ToolDefinitionError, match="read_only"):
        tool("read_only")  # type: ignore[call-overload]


def test_a_verify_that_wants_what_the_tool_does_not_have_is_refused_at_load() -> None:
    """It is first called after a crash: too late to find a typing error."""

    def verify(recipient: str) -> bool:
        return bool(recipient)

    with pytest.raises(ToolDefinitionError, match="recipient"):

        @tool(verify=verify)
        def send(to: str) -> None: ...

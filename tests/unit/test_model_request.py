"""The frozen prefix: what a resumed task sends again must be what it sent before (G10)."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.model import settings
from worker.request import build_request

TOOL = {"name": "read", "description": "reads", "input_schema": {"type": "object", "properties": {"z": {}, "a": {}}}}


def test_the_prefix_holds_everything_but_the_conversation():
    built = build_request(settings(thinking="adaptive"), model="claude-x", system="Be brief.", tools=[TOOL])
    assert built == {
        "model": "claude-x",
        "max_tokens": 32_000,
        "system": "Be brief.",
        "tools": [TOOL],
        "thinking": {"type": "adaptive"},
        "cache_control": {"type": "ephemeral"},
    }


def test_none_means_the_settings_own_value():
    built = build_request(settings(model="m", system="s"), model=None, system=None, tools=[])
    assert (built["model"], built["system"]) == ("m", "s")


@pytest.mark.parametrize("system", ["", "  \n"])
def test_a_blank_system_prompt_is_left_out_because_the_api_refuses_it(system):
    built = build_request(settings(system="default"), model=None, system=system, tools=[])
    assert "system" not in built
    assert "tools" not in built
    assert "thinking" not in built


def test_two_builds_are_equal_byte_for_byte_and_share_nothing_with_the_toolbox():
    tools = json.loads(json.dumps([TOOL]))
    first = build_request(settings(), model=None, system="s", tools=tools)
    before = json.dumps(first)
    assert json.dumps(build_request(settings(), model=None, system="s", tools=tools)) == before
    tools[0]["description"] = "a deploy changed me"
    assert json.dumps(first) == before


def test_building_a_request_does_not_import_anthropic():
    """It costs a second of CPU, and `enqueue-task` may want to show a request."""
    code = "import sys, worker.request; assert not {'anthropic', 'httpx2'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)

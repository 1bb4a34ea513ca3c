"""What the scripted model says in a drill: made from the seed, playable, of every nature; or the user's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ops.drill.script import VARIANTS, default_script, own_script, task_text
from ops.script_template import load_script
from worker.errors import InvalidInput


def test_the_drills_own_script_can_be_played_and_uses_tools_of_every_nature() -> None:
    script = default_script(1, 10)
    scripts = load_script(script).scripts
    assert len(scripts) == VARIANTS
    assert {len(one.turns) for one in scripts} == {10}
    assert {call.name for one in scripts for turn in one.turns for call in turn.calls} == {"look", "put", "send", "pay"}
    assert not scripts[0].turns[-1].calls


def test_a_seed_gives_the_same_script_again_and_another_seed_another() -> None:
    assert default_script(1, 5) == default_script(1, 5) != default_script(2, 5)


def test_each_task_finds_its_own_conversation_and_no_two_have_the_same_text() -> None:
    scripts = load_script(default_script(1, 3))
    texts = [task_text(phase, number) for phase in ("control", "kills") for number in range(30)]
    assert len(set(texts)) == len(texts)
    found = [scripts.find({"messages": [{"role": "user", "content": text}]}) for text in texts]
    assert found.count(None) == 0
    assert len({id(one) for one in found}) == VARIANTS


def test_a_script_of_the_users_is_read(tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    path.write_text(json.dumps({"turns": [{"text": "hello"}]}))
    assert len(own_script(path).scripts) == 1


def test_a_script_that_has_nothing_to_say_to_a_drills_tasks_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    path.write_text(json.dumps({"scripts": [{"match": "^something else", "turns": [{}]}]}))
    with pytest.raises(InvalidInput, match="'drill kills task 0 way 0'"):
        own_script(path)

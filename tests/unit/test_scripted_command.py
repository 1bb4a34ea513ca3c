"""`baton scripted-model` as a process, and turns that depend on what the model was told."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from ops.scripted_model import ScriptedModel
from tests.support.model import HELLO
from tests.unit.test_scripted_model import body, play, post
from worker.errors import InvalidInput

LOOK_AGAIN = {
    "turns": [
        {"calls": [{"name": "pay"}]},
        {
            "when": "{{ 'unknown' in results.pay }}",
            "calls": [{"name": "look"}],
            "otherwise": {"text": "paid {{ (results.pay | from_json).cents }}"},
        },
        {"text": "looked"},
    ]
}


@pytest.mark.parametrize(
    ("told", "said"), [('{"cents": 5}', ["", "paid 5"]), ("state unknown", ["", "", "looked"])], ids=["paid", "unknown"]
)
def test_a_turn_depends_on_what_the_model_was_told(told, said):
    assert [answer.text for answer in play(LOOK_AGAIN, results=[told])] == said


def test_a_broken_condition_is_refused_before_anybody_asks():
    with pytest.raises(InvalidInput, match="nowhere"):
        ScriptedModel({"turns": [{"when": "{{ nowhere }}", "text": "x"}]})


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_the_command_prints_its_url_and_ends_clean(number, tmp_path):
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"turns": [{"text": "hi"}]}))
    argv = [sys.executable, "-m", "ops.scripted_model", str(script), "--log", str(tmp_path / "log.jsonl")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert post(url, body(*HELLO))[1]["content"] == [{"type": "text", "text": "hi"}]
        os.kill(process.pid, number)
        _, noise = process.communicate(timeout=60)
    assert (process.returncode, noise) == (0, "")
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 1


def test_the_command_refuses_a_broken_script_in_a_sentence(tmp_path):
    script = tmp_path / "script.json"
    script.write_text('{"turns": [{"txt": 1}]}')
    argv = [sys.executable, "-m", "ops.scripted_model", str(script)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "turns.0.txt" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_command_says_when_its_port_is_taken(tmp_path):
    script = tmp_path / "script.json"
    script.write_text('{"turns": [{}]}')
    with ScriptedModel(script) as model:
        port = model.url.rpartition(":")[2]
        argv = [sys.executable, "-m", "ops.scripted_model", str(script), "--port", port]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "in use" in done.stderr
    assert "Traceback" not in done.stderr

"""A model that says what its script says: POST /v1/messages over real HTTP, in JSON or as a stream.

    with ScriptedModel({"turns": [{"calls": [{"name": "read_notes"}]}, {"text": "{{ results.read_notes }}"}]}) as m:
        …  # ANTHROPIC_BASE_URL=m.url, any ANTHROPIC_API_KEY

Script: {"scripts": [{"match": "regex in the first user message", "turns": [TURN, …]}, …]}, the first match
counts; or {"turns": [TURN, …]}. A TURN has (all optional) `text`, `calls` [{name, input, id}] or raw
`content`; `stop_reason`, `stop_details`, `usage`, `delay_s`; `fault`/`faults`; on the last one `repeat`; `when`, a
template, with the turn to give `otherwise`. A FAULT
has `status` (with type, message, headers) or `kind`: hang, reset, truncate, html, early_end, sse_error; `times`.
Faults are used up one per request, then the turn answers. Templates in strings: see ops.script_template.

Stateless but for faults: which turn it is follows from the number of answers in the request, so a task
that died asks again and hears the same, from a restarted server too. Requests are refused as the API
refuses them (ops.transcript), and logged one JSON line each before anything is answered.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections import deque
from pathlib import Path
from types import FrameType
from typing import IO, Any

import click

from ops import script_http
from ops.script_template import ScriptError, answer, choose, digest, load_script
from ops.transcript import check_request
from worker.errors import InvalidInput

REQUESTS_KEPT_MAX = 10_000
PROBLEMS_SHOWN_MAX = 5

Json = dict[str, Any]


class ScriptedModel:
    """The server. Raises InvalidInput for a script that cannot be played."""

    def __init__(self, script: Json | Path, *, host: str = "127.0.0.1", port: int = 0, log: Path | None = None) -> None:
        self._scripts = load_script(script)
        self._address = (host, port)
        self._log_path = log
        self._log: IO[str] | None = None
        self._lock = threading.Lock()
        self._requests: deque[Json] = deque(maxlen=REQUESTS_KEPT_MAX)
        self._asked: dict[str, int] = {}  # conversation and turn -> requests so far; turns with faults only
        self._count = 0
        self._server: script_http.Server | None = None

    def start(self) -> None:
        """Listen and answer in the background. Raises OSError if the port is taken."""
        self._server = script_http.Server(self._address, self.plan)
        self._log = self._log_path.open("a", encoding="utf-8") if self._log_path else None
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        """Cut every connection and wait until all is closed. Stopping twice is harmless."""
        if self._server is not None:
            self._server.stop()
            self._server = None
        with self._lock:
            if self._log is not None:
                self._log.close()
                self._log = None

    def __enter__(self) -> ScriptedModel:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """The value for ANTHROPIC_BASE_URL."""
        if self._server is None:
            raise RuntimeError("the scripted model is not started")
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    @property
    def requests(self) -> list[Json]:
        """The bodies received so far, refused ones too, oldest first; at most REQUESTS_KEPT_MAX."""
        with self._lock:
            return list(self._requests)

    def plan(self, headers: script_http.Headers, raw: bytes) -> script_http.Plan:
        """Decide what to answer, and write it down, before a byte goes out."""
        body = _json(raw)
        plan = self._decide(headers, body)
        with self._lock:
            self._count += 1
            plan.headers["request-id"] = f"req_{self._count:06d}"
            if body is not None:
                self._requests.append(body)
                self._write(body, plan)
        return plan

    def _decide(self, headers: script_http.Headers, body: Json | None) -> script_http.Plan:
        bearer = headers.get("authorization", "").removeprefix("Bearer ").strip()
        if not bearer and not headers.get("x-api-key", "").strip():
            return script_http.Plan.refusal(401, "Authorization: a bearer token is required")
        if not headers.get("anthropic-version"):
            return script_http.Plan.refusal(400, "anthropic-version: header is required")
        if body is None:
            return script_http.Plan.refusal(400, "The request body is not valid JSON")
        if problems := check_request(body):
            return script_http.Plan.refusal(400, "; ".join(problems[:PROBLEMS_SHOWN_MAX]))
        script = self._scripts.find(body)
        if script is None:
            return script_http.Plan.refusal(400, "scripted model: no script matches this task")
        number = sum(message["role"] == "assistant" for message in body["messages"])
        fault = None
        try:
            turn = choose(script.turn(number), number, body)
            if turn.fault_at(0):
                key = digest(body["messages"][0], number)
                with self._lock:
                    asked = self._asked[key] = self._asked.get(key, -1) + 1
                if (fault := turn.fault_at(asked)) and fault.status and fault.kind is None:
                    return script_http.Plan(fault.status, dict(fault.headers), fault.error(), fault=fault)
            message = answer(turn, number, body)
        except ScriptError as error:
            return script_http.Plan.refusal(400, f"scripted model: turns.{number}: {error}")
        stream = bool(body.get("stream"))
        headers = dict(fault.headers) if fault else {}
        return script_http.Plan(200, headers, message, stream=stream, fault=fault, delay_s=turn.delay_s)

    def _write(self, body: Json, plan: script_http.Plan) -> None:
        if self._log is None:
            return
        answered = plan.status == 200 and plan.fault is None
        line = {
            "at": time.time(),
            "body": body,
            "status": plan.status,
            "response": plan.payload if answered else None,
            "fault": plan.fault.label if plan.fault else None,
        }
        self._log.write(json.dumps(line) + "\n")
        self._log.flush()


def _json(raw: bytes) -> Json | None:
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None


@click.command("scripted-model")
@click.argument("script", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=0, type=click.IntRange(0, 65_535), help="Port to listen on; 0 takes a free one.")
@click.option("--log", type=click.Path(path_type=Path), help="Append every request to this file, one JSON line each.")
def command(script: Path, host: str, port: int, log: Path | None) -> None:
    """Play SCRIPT as a model: a server for ANTHROPIC_BASE_URL that needs no key and costs nothing.

    Prints its URL and serves until SIGTERM or Ctrl-C.
    """
    done = threading.Event()

    def finish(_number: int, _frame: FrameType | None) -> None:
        done.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, finish)
    try:
        model = ScriptedModel(script, host=host, port=port, log=log)
        model.start()
    except InvalidInput as error:
        raise click.UsageError(str(error)) from None
    except OSError as error:
        raise click.ClickException(f"{host}:{port}, {log or 'no log'}: {error.strerror}.") from None
    try:
        click.echo(model.url)
        sys.stdout.flush()
        done.wait()
    finally:
        model.stop()


if __name__ == "__main__":
    command()

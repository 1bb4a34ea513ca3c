"""All settings, read from BATON_* variables (and a `.env` file in the working directory).

Plain pydantic and a few lines instead of pydantic-settings: that costs 95 ms of every `enqueue-task`.
The environment wins over `.env`. An empty variable (the usual blank of a compose file) counts as unset.
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError

from worker.errors import InvalidSettings

PREFIX = "BATON_"


class Settings(BaseModel):
    """Field `x_y` is read from `BATON_X_Y`. Units stand last in the names."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    redis_url: str = Field("redis://127.0.0.1:6379/0", description="Redis or Valkey that holds the tasks")
    key_prefix: str = Field("baton", pattern=r"^[A-Za-z0-9_.-]{1,64}$", description="first part of every key")
    queue: str = Field("agents", pattern=r"^[A-Za-z0-9_.-]{1,64}$", description="RQ queue for new tasks")

    model: str = Field("claude-sonnet-5-5", description="model for tasks that name none")
    system: str = Field("", description="system prompt for tasks that name none")
    max_tokens: int = Field(32_000, ge=1, description="longest single answer, in tokens")
    thinking: str = Field(
        "", pattern=r"^(|adaptive|disabled)$", description="`adaptive`, `disabled`, or the API's default"
    )
    turns_max: int = Field(40, ge=1, le=100_000, description="turns per task unless the task says otherwise")
    model_tries_max: int = Field(4, ge=1, le=20, description="tries of one model call before the task is parked")
    model_wait_max_s: float = Field(30, ge=0, description="longest wait for the model while holding a task")
    model_read_timeout_s: float = Field(120, gt=0, description="longest silence on a model's stream")
    model_call_max_s: float = Field(1800, gt=0, description="longest single model call")
    park_max_s: float = Field(600, gt=0, description="longest pause of a parked task between two looks")

    ramp_step_s: float = Field(
        1, ge=0.01, le=60, description="after an API's wait 1, 2, 4, … tasks may ask it in each step of so long"
    )

    tools: str = Field("", description="modules with tools, comma separated; `worker.tools.builtin` is always there")
    workspace: Path = Field(Path("workspace"), description="the directory the built-in tools may touch")
    result_max_bytes: int = Field(100_000, ge=256, description="longest tool result given to the model")
    fetch_private: bool = Field(False, description="let fetch_url reach private and loopback addresses")
    fetch_max_bytes: int = Field(2_000_000, ge=1, description="most that fetch_url reads")
    fetch_timeout_s: float = Field(20, gt=0, description="longest a fetch_url may take")
    smtp_url: SecretStr = Field(SecretStr(""), description="smtp://user:password@host:port or smtps://… for send_email")
    smtp_from: str = Field("", description="sender address of send_email")

    lease_ttl_ms: int = Field(
        15_000, ge=300, description="a task may be taken over when its holder was silent for so long"
    )
    lease_margin_ms: int = Field(2_000, ge=50, description="a holder stops by itself so long before its lease ends")
    store_retry_max_s: float = Field(60, gt=0, description="how long a holder waits for a Redis that refuses to store")
    verify_settle_s: float = Field(
        30, ge=0, description="`verify` is asked again so long after a crash before a call is run once more"
    )
    stuck: str = Field(
        "park",
        pattern=r"^(off|warn|park)$",
        description="what becomes of a task without progress: `off`, `warn`, `park`",
    )
    stuck_repeats: int = Field(
        10, ge=2, description="warn after so many turns with the same calls and results; park after twice as many"
    )
    stuck_s: float = Field(
        3600, gt=0, description="warn when a running task saved nothing for so long; park after twice as long"
    )
    allow_eviction: bool = Field(False, description="run on a Redis whose maxmemory-policy may drop keys of tasks")
    concurrency: int = Field(50, ge=1, le=5_000, description="tasks that one ThreadWorker runs at once")
    drain_grace_s: float = Field(20, gt=0, description="a worker that is told to end is gone after so long")
    sweep_period_s: float = Field(1, gt=0, description="pause between two sweeps")
    redeliver_grace_ms: int = Field(
        3_000, ge=100, description="a queued task whose job was missing for so long is delivered again"
    )
    crashes_in_row_max: int = Field(
        3, ge=1, description="crashes in a row without a completed turn that make a task dead"
    )
    crashes_max: int = Field(20, ge=1, description="crashes in all that make a task dead")
    retention_s: int = Field(7 * 86_400, ge=1, description="how long an ended task is kept")
    job_failure_ttl_s: int = Field(3 * 86_400, ge=1, description="how long RQ keeps a failed job")
    job_result_ttl_s: int = Field(600, ge=1, description="how long RQ keeps a finished job")
    text_max_bytes: int = Field(10_000_000, ge=1, description="longest task text that is accepted")
    state_dir: Path = Field(Path(".baton"), description="where `baton up` keeps the embedded server's data")
    dashboard_port: int = Field(9181, ge=0, le=65_535, description="port of rq-dashboard under `baton up`")

    @property
    def tool_modules(self) -> tuple[str, ...]:
        return tuple(name.strip() for name in self.tools.split(",") if name.strip())


def load_settings(environ: dict[str, str] | None = None, **overrides: Any) -> Settings:
    """Read the settings; InvalidSettings names each wrong variable. `overrides` win over everything."""
    values = {**_dotenv(), **os.environ} if environ is None else environ
    found = {
        name: values[PREFIX + name.upper()]
        for name in Settings.model_fields
        if values.get(PREFIX + name.upper(), "") != ""
    }
    try:
        settings = Settings.model_validate({**found, **overrides})
    except ValidationError as error:
        lines = [f"{PREFIX}{'.'.join(map(str, e['loc'])).upper()}: {e['msg']}" for e in error.errors()]
        raise InvalidSettings("; ".join(lines)) from None
    if settings.lease_margin_ms * 2 > settings.lease_ttl_ms:
        raise InvalidSettings("BATON_LEASE_MARGIN_MS: must be at most half of BATON_LEASE_TTL_MS")
    return settings


@lru_cache(maxsize=1)
def settings() -> Settings:
    """The process's settings, read once."""
    return load_settings()


def _dotenv() -> dict[str, str]:
    if not Path(".env").is_file():
        return {}
    from dotenv import dotenv_values  # costs 12 ms, and most processes have no .env

    return {key: value for key, value in dotenv_values(".env").items() if value is not None}

"""The part of a request that is the same for every turn of a task: frozen at its first claim, kept in Redis.

The API binds thinking blocks and the prompt cache to everything before them, so nothing that differs
between two attempts (clock, host, attempt, a deploy's new tool text) may get in. Imports no anthropic:
clients and the sweeper may use it.
"""

from __future__ import annotations

import copy
from typing import Any

from worker.settings import Settings


def build_request(
    settings: Settings, *, model: str | None, system: str | None, tools: list[dict[str, Any]]
) -> dict[str, Any]:
    """Everything of POST /v1/messages but `messages` and `stream`; None means the settings' own value.

    A blank system prompt and an empty tool list are left out, because the API refuses the one and the
    other costs a prefix of its own. The result shares nothing with `tools`.
    """
    prompt = settings.system if system is None else system
    request: dict[str, Any] = {"model": model or settings.model, "max_tokens": settings.max_tokens}
    if prompt.strip():
        request["system"] = prompt
    if tools:
        request["tools"] = copy.deepcopy(tools)
    if settings.thinking:
        request["thinking"] = {"type": settings.thinking}
    # Marks the last cacheable block of whatever is sent and so moves on with the conversation by itself.
    request["cache_control"] = {"type": "ephemeral"}
    return request

"""What went wrong with a model call, in four words: transient, config, permanent, or not the model's at all.

The table is section 5 of the SDK notes, in code. Messages are for a person: status, type, the API's own
words (capped), request id; never the prompt, never the key.
"""

from __future__ import annotations

import json
import re
import ssl
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from math import isfinite
from typing import Any

import anthropic
import httpx2

from worker.errors import BatonError, ModelConfig, ModelFault, ModelPermanent, ModelTransient

WORDS_MAX = 300
_KEY = re.compile(r"(?i)(bearer\s+|\bsk-)[\w.~+/=-]+")

_TRANSIENT_CODES = {"thread_continue_in_flight", "request_body_timeout"}
_CONFIG_TYPES = {"authentication_error", "permission_error", "billing_error"}
_CONFIG_CODES = {
    "contract_spend_limit_reached",
    "enforced_spend_limit_reached",
    "linked_organization_spend_limit_reached",
}
# The API says an organisation's own spend limit with a 400 and only these words tell it from a bad request.
_OWN_SPEND_LIMIT = "You have reached your specified"


# Said to everybody who shares the key, not to this request alone: asking again from elsewhere makes it worse.
THROTTLED = frozenset({429, 529})
_THROTTLED_TYPES = frozenset({"rate_limit_error", "overloaded_error"})
LIMITS = ("requests", "tokens", "input-tokens", "output-tokens")

RETRY_AFTER_MAX_S = 30 * 86_400.0  # longer is no answer of the API, and would overflow somewhere later


def translate(error: BaseException) -> BaseException:
    """The error to raise instead of `error`: a ModelFault, or the error itself if it is not about the model.

    Foreign errors come back untouched; one that the SDK wrapped (it catches any Exception raised inside
    its socket call, RQ's job timeout among them) comes back unwrapped.
    """
    if not isinstance(error, Exception) or isinstance(error, BatonError):
        return error
    if isinstance(error, anthropic.AnthropicError):
        return _from_sdk(error)
    if isinstance(error, (httpx2.HTTPError, httpx2.InvalidURL, OSError)):
        return _from_network(error)
    # Both are ValueErrors too, and speak of what was received, not of what was sent.
    if isinstance(error, (json.JSONDecodeError, UnicodeDecodeError)):
        return ModelTransient("The model's answer was garbled: not valid JSON or UTF-8.")
    if isinstance(error, AssertionError):
        return ModelTransient("The model's answer was an empty stream.")
    if isinstance(error, UnicodeEncodeError):
        return ModelPermanent(
            "The conversation holds text that is not valid Unicode (a lone surrogate): it cannot be sent."
        )
    if isinstance(error, TypeError) and "authentication" in str(error):
        return ModelConfig("No API key: set ANTHROPIC_API_KEY for the worker.")
    if isinstance(error, (TypeError, ValueError)):
        return ModelPermanent(f"The request cannot be put into JSON: {words(error)}.")
    return error


def api_fault(status: int, body: object, headers: Mapping[str, str]) -> ModelFault:
    """Classify an error answer of the API, or one that came as an event of a stream (`status` 200)."""
    error = body.get("error") if isinstance(body, dict) else None
    said = error if isinstance(error, dict) else {}
    kind = said["type"] if isinstance(said.get("type"), str) else None
    message = words(said.get("message") or "")
    details = said.get("details")
    code = details.get("error_code") if isinstance(details, dict) else None
    code = code if isinstance(code, str) else None
    request_id = headers.get("request-id")
    text = _sentence(status, kind, message, request_id)
    match _class_of(status, kind, code, message, headers):
        case "transient":
            throttled = status in THROTTLED or (status == 200 and kind in _THROTTLED_TYPES)
            return ModelTransient(
                text,
                request_id=request_id,
                retry_after_s=_asked_wait_s(headers, throttled),
                throttled=throttled,
                said=str(kind if status == 200 else status) if throttled else "",
            )
        case "config":
            return ModelConfig(text, request_id=request_id)
    if status == 413 or "too long" in message:
        text = f"The conversation no longer fits. {text}"
    return ModelPermanent(text, request_id=request_id)


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """How long the API asks us to wait, 0 to RETRY_AFTER_MAX_S: `retry-after-ms`, or `retry-after` in seconds or as an
    HTTP date."""
    millis, value = _number(headers.get("retry-after-ms")), headers.get("retry-after")
    seconds = _number(value) if millis is None else millis / 1000
    if seconds is None and (until := _date(value)) is not None:
        # Against the server's own clock where it tells it: ours may be off by more than the wait.
        seconds = (until - (_date(headers.get("date")) or datetime.now(UTC))).total_seconds()
    return None if seconds is None else min(max(0.0, seconds), RETRY_AFTER_MAX_S)


def resume_after_s(headers: Mapping[str, str]) -> float | None:
    """How long until a limit is free again that this answer has used up, as the `anthropic-ratelimit-…` headers tell
    it, 0 to RETRY_AFTER_MAX_S; None if no limit is used up."""
    waits = []
    for limit in LIMITS:
        left, reset = (headers.get(f"anthropic-ratelimit-{limit}-{what}") for what in ("remaining", "reset"))
        until = _timestamp(reset)
        if _number(left) == 0 and until is not None:
            waits.append((until - (_date(headers.get("date")) or datetime.now(UTC))).total_seconds())
    return min(max(waits), RETRY_AFTER_MAX_S) if waits and max(waits) > 0 else None


def words(value: object) -> str:
    """`value` as one short line that is safe to show and to store: no key, no control characters."""
    line = " ".join(str(value).encode("utf-8", "replace").decode().split())
    # Some gateways repeat the key they refuse.
    line = _KEY.sub(r"\1…", line)
    line = "".join(char for char in line if char.isprintable())
    return line if len(line) <= WORDS_MAX else line[: WORDS_MAX - 1] + "…"


def _from_sdk(error: anthropic.AnthropicError) -> BaseException:
    if isinstance(error, anthropic.APIStatusError):
        return api_fault(error.status_code, error.body, error.response.headers)
    if isinstance(error, anthropic.APIConnectionError):
        cause = error.__cause__
        if cause is None:
            return ModelTransient("The model could not be reached: the connection failed.")
        if isinstance(cause, (httpx2.HTTPError, httpx2.InvalidURL, OSError)):
            return _from_network(cause)
        return cause
    if isinstance(error, anthropic.APIError):
        return ModelTransient(f"The model's answer was garbled: {words(error)}")
    return ModelConfig(f"The credentials for the model cannot be used: {words(error)}")


def _from_network(error: Exception) -> ModelFault:
    if isinstance(error, httpx2.LocalProtocolError):
        # Its words quote the header, key included.
        return ModelConfig(
            "The request cannot be written as HTTP: look for stray characters in ANTHROPIC_API_KEY, "
            "ANTHROPIC_CUSTOM_HEADERS and ANTHROPIC_BASE_URL."
        )
    if isinstance(error, (httpx2.UnsupportedProtocol, httpx2.InvalidURL, httpx2.TooManyRedirects)):
        return ModelConfig(f"ANTHROPIC_BASE_URL does not lead to the API: {words(error)}")
    if _is_certificate_failure(error):
        return ModelConfig(
            f"The API's TLS certificate cannot be verified: {words(error)}. Is ca-certificates installed, "
            "or does SSL_CERT_FILE name the right authority?"
        )
    if isinstance(error, httpx2.ProxyError) and re.match(r"4\d\d\b", str(error)):
        return ModelConfig(f"The HTTP proxy refuses the way to the API: {words(error)}")
    if isinstance(error, httpx2.TimeoutException):
        return ModelTransient(f"The model was silent for too long ({type(error).__name__}).")
    return ModelTransient(f"The connection to the model failed: {type(error).__name__}: {words(error)}")


def _is_certificate_failure(error: BaseException | None) -> bool:
    for _ in range(10):  # httpx2 wraps httpcore2 wraps ssl; a bound in case a chain is a ring
        if error is None:
            return False
        if isinstance(error, ssl.SSLCertVerificationError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _class_of(status: int, kind: Any, code: Any, message: str, headers: Mapping[str, str]) -> str:
    if code in _CONFIG_CODES or message.startswith(_OWN_SPEND_LIMIT) or status in (401, 402, 403):
        return "config"
    if status == 200:
        # In a stream the status was sent before the fault happened: only the type speaks.
        return _class_of_event(kind)
    if headers.get("x-should-retry") == "true" or code in _TRANSIENT_CODES:
        return "transient"
    if status in (408, 409, 429) or status >= 500:
        return "transient"
    if status < 400 or (status in (404, 405) and kind is None):
        # Not the API speaking: a base URL that leads somewhere else would fail every task for good.
        return "config"
    return "permanent"


def _class_of_event(kind: Any) -> str:
    if kind in _CONFIG_TYPES:
        return "config"
    # Known refusals end the task; a type nobody knows yet may pass.
    return "permanent" if kind in ("invalid_request_error", "not_found_error", "request_too_large") else "transient"


def _sentence(status: int, kind: str | None, message: str, request_id: str | None) -> str:
    if kind is None:
        what = f"Something that is not the Messages API answered {status}"
    elif status == 200:
        what = f"The model broke off with {words(kind)}"
    else:
        what = f"The API answered {status} {words(kind)}"
    said = f": {message}" if message else "."
    return what + said + (f" (request {words(request_id)})" if request_id else "")


def _asked_wait_s(headers: Mapping[str, str], throttled: bool) -> float | None:
    asked = retry_after_s(headers)
    return resume_after_s(headers) if asked is None and throttled else asked


def _timestamp(value: str | None) -> datetime | None:
    """RFC 3339, always with its zone."""
    try:
        date = datetime.fromisoformat(value) if value else None
    except ValueError:
        return None
    return date if date is not None and date.tzinfo else None


def _number(value: str | None) -> float | None:
    try:
        number = float(value) if value is not None else None
    except ValueError:
        return None
    return number if number is not None and isfinite(number) else None


def _date(value: str | None) -> datetime | None:
    try:
        date = parsedate_to_datetime(value) if value else None
    except ValueError:
        return None
    if date is None:
        return None
    return date if date.tzinfo else date.replace(tzinfo=UTC)

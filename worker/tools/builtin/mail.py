"""send_email: one message over SMTP. The tool's docstring is read by the model."""

from __future__ import annotations

import hashlib
import re
import smtplib
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from email.message import EmailMessage
from email.policy import SMTP
from email.utils import formatdate, parseaddr
from typing import Annotated
from urllib.parse import SplitResult, unquote, urlsplit

from pydantic import Field

from worker.errors import ToolFailure
from worker.settings import Settings
from worker.tools.base import tool
from worker.tools.context import ToolContext
from worker.tools.plain import clean_text

TIMEOUT_S = 30.0
BODY_MAX_BYTES = 1_000_000
_ADDRESS = re.compile(r"[A-Za-z0-9.!#$%&'*+/=?^_`{|}~-]{1,64}@[A-Za-z0-9.-]{1,253}")
_NOT_SENT = "Nothing was sent."


@tool(effect="side_effect")
def send_email(
    to: Annotated[list[str], Field(min_length=1, max_length=50)],
    subject: Annotated[str, Field(min_length=1, max_length=500)],
    body: str,
    context: ToolContext,
) -> str:
    """Send one plain-text email now. It cannot be called back.

    Returns the Message-ID once the mail server has accepted the message, and names recipients it refused. An
    error says whether nothing was sent, or whether it is unknown: then do not simply send again, but say so.

    Args:
        to: Addresses of the recipients, each a bare address such as "ada@example.org", without a name.
        subject: The subject, one line.
        body: The text of the message.
    """
    server, sender = _setup(context.settings)
    message = _message(to, subject, body, sender, context.idempotency_key)
    with _connected(server, sender) as smtp:
        if context.cancelled:  # asleep past its lease, say: the state of this call is reported as unknown by now
            raise ToolFailure(f"The task is being stopped. {_NOT_SENT}")
        refused = _send(smtp, message)
    accepted = [address for address in to if address not in refused]
    note = f" The server refused: {_refusals(refused)}." if refused else ""
    return f"Sent to {', '.join(accepted)} as {message['Message-ID']}.{note}"


def _setup(settings: Settings) -> tuple[SplitResult, str]:
    """The server's URL and the sender, checked before anything is sent."""
    url = settings.smtp_url.get_secret_value()
    if not url or not settings.smtp_from:
        raise ToolFailure(f"Email is not set up on this worker (BATON_SMTP_URL, BATON_SMTP_FROM). {_NOT_SENT}")
    try:
        server = urlsplit(url)
        usable = server.scheme in ("smtp", "smtps") and bool(server.hostname) and server.port != 0
    except ValueError:
        usable = False
    if not usable:  # without the URL itself: it may hold a password
        raise ToolFailure(f"BATON_SMTP_URL is not smtp://host:port or smtps://host:port. {_NOT_SENT}")
    if not _ADDRESS.fullmatch(parseaddr(settings.smtp_from)[1]):
        raise ToolFailure(f"BATON_SMTP_FROM is not an email address. {_NOT_SENT}")
    return server, settings.smtp_from


def _message(to: list[str], subject: str, body: str, sender: str, key: str) -> EmailMessage:
    for address in to:
        if not _ADDRESS.fullmatch(address):
            raise ToolFailure(f"{address!r} is not a bare email address. {_NOT_SENT}")
    if any(ord(character) < 32 or ord(character) == 127 for character in subject):
        raise ToolFailure(f"The subject must be one line without control characters. {_NOT_SENT}")
    if len(body.encode()) > BODY_MAX_BYTES:
        raise ToolFailure(f"The body is longer than {BODY_MAX_BYTES} bytes. {_NOT_SENT}")
    message = EmailMessage(policy=SMTP)
    message["From"] = sender
    message["To"] = ", ".join(to)
    message["Subject"] = subject
    message["Date"] = formatdate(localtime=False)
    # The same for every run of this call: a server, or a person, can tell a repetition.
    message["Message-ID"] = f"<{hashlib.sha256(key.encode()).hexdigest()[:32]}@{_domain(sender)}>"
    message.set_content(body)
    return message


@contextmanager
def _connected(server: SplitResult, sender: str) -> Iterator[smtplib.SMTP]:
    """A session, encrypted and logged in as far as the URL asks for it. Raises ToolFailure: nothing was sent."""
    try:
        smtp = _open(server, sender)
    except (OSError, ValueError) as error:  # SMTPException is an OSError
        raise ToolFailure(f"The mail server cannot be used: {_why(error)}. {_NOT_SENT}") from error
    try:
        yield smtp
        with suppress(OSError):  # the message is accepted: a bad goodbye changes nothing
            smtp.quit()
    finally:
        smtp.close()


def _open(server: SplitResult, sender: str) -> smtplib.SMTP:
    host, secure = server.hostname or "", server.scheme == "smtps"
    # Without a name smtplib asks DNS for ours, which can take long.
    name = _domain(sender)
    smtp = (
        smtplib.SMTP_SSL(host, server.port or 465, name, timeout=TIMEOUT_S, context=ssl.create_default_context())
        if secure
        else smtplib.SMTP(host, server.port or 587, name, timeout=TIMEOUT_S)
    )
    try:
        smtp.ehlo_or_helo_if_needed()
        if not secure and smtp.has_extn("starttls"):
            smtp.starttls(context=ssl.create_default_context())
            secure = True
        if server.username:
            if not secure and host not in ("localhost", "127.0.0.1", "::1"):
                raise ValueError("it offers no encryption, and the password is not sent in the clear")
            smtp.login(unquote(server.username), unquote(server.password or ""))
    except BaseException:
        smtp.close()
        raise
    return smtp


def _send(smtp: smtplib.SMTP, message: EmailMessage) -> dict[str, tuple[int, bytes]]:
    """Hand the message over; the recipients that were refused while others were accepted."""
    try:
        return smtp.send_message(message)
    except smtplib.SMTPRecipientsRefused as error:
        raise ToolFailure(
            f"The mail server refused every recipient: {_refusals(error.recipients)}. {_NOT_SENT}"
        ) from error
    except smtplib.SMTPResponseException as error:  # a refusal is an answer: it is known that nothing went out
        raise ToolFailure(f"The mail server refused the message: {_why(error)}. {_NOT_SENT}") from error
    except smtplib.SMTPNotSupportedError as error:
        raise ToolFailure(f"The mail server cannot take this message: {_why(error)}. {_NOT_SENT}") from error
    except OSError as error:
        raise ToolFailure(
            f"The connection broke while the message was handed over ({_why(error)}). It is unknown whether it "
            f"was sent; its Message-ID would be {message['Message-ID']}."
        ) from error


def _why(error: Exception) -> str:
    if isinstance(error, smtplib.SMTPResponseException):
        return f"{error.smtp_code} {_words(error.smtp_error)}"
    return clean_text(str(error)) or type(error).__name__


def _refusals(refused: dict[str, tuple[int, bytes]]) -> str:
    return "; ".join(f"{address} ({code} {_words(words)})" for address, (code, words) in refused.items())


def _words(words: bytes | str) -> str:
    return words if isinstance(words, str) else words.decode("utf-8", "replace")


def _domain(sender: str) -> str:
    return parseaddr(sender)[1].rpartition("@")[2]

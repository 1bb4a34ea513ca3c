"""send_email sends one message, and never leaves open whether it did without saying so."""

from __future__ import annotations

import email
import socket
import threading
from collections.abc import Iterator
from email.message import EmailMessage
from email.policy import default
from typing import Any

import pytest

from tests.unit.tools_kit import answer, context, refusal
from worker.errors import ToolFailure
from worker.tools.builtin import send_email
from worker.tools.builtin.mail import _open, _setup

MAIL = {"to": ["ada@example.org"], "subject": "Grüße", "body": "Hello\n.\nBye\n"}


class Server:
    """The least of SMTP. `says`: first word of a command → another answer; None hangs up instead."""

    def __init__(self) -> None:
        self.says: dict[str, bytes | None] = {}
        self.heard: list[str] = []
        self.messages: list[EmailMessage] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def stop(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            with client, client.makefile("rb") as lines:
                client.sendall(b"220 hello\r\n")
                self._session(client, lines)

    def _session(self, client: socket.socket, lines: Any) -> None:
        for line in lines:
            text = line.decode().strip()
            self.heard.append(text)
            verb = text.split(" ")[0].upper()
            reply = self.says.get(text, self.says.get(verb, b"354 go on\r\n" if verb == "DATA" else b"250 ok\r\n"))
            if reply is None:
                return
            client.sendall(reply)
            if verb == "DATA" and reply.startswith(b"354"):
                raw = b"".join(iter(lambda: next(lines), b".\r\n"))
                self.messages.append(email.message_from_bytes(raw.replace(b"\r\n..", b"\r\n."), policy=default))
                done = self.says.get("END", b"250 queued\r\n")
                if done is None:
                    return
                client.sendall(done)


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.stop()


def setup(server: Server, **changes: Any) -> Any:
    settings = {"smtp_url": f"smtp://127.0.0.1:{server.port}", "smtp_from": "Baton <baton@example.com>"}
    return context(settings={**settings, **changes.pop("settings", {})}, **changes)


def test_a_message_arrives_as_it_was_written(server: Server) -> None:
    text = answer(send_email, setup(server), **{**MAIL, "to": ["ada@example.org", "bob@example.org"]})
    [message] = server.messages
    assert message["Subject"] == "Grüße"
    assert message["From"] == "Baton <baton@example.com>"
    assert message["To"] == "ada@example.org, bob@example.org"
    assert message.get_content().replace("\r\n", "\n") == "Hello\n.\nBye\n"
    assert "ehlo example.com" in server.heard, "no DNS lookup for our own name"
    assert text == f"Sent to ada@example.org, bob@example.org as {message['Message-ID']}."


def test_the_message_id_is_the_same_over_every_resume_and_another_for_another_call(server: Server) -> None:
    for key, attempt in (("k1", 1), ("k1", 2), ("k2", 1)):
        answer(send_email, setup(server, idempotency_key=key, attempt=attempt), **MAIL)
    first, again, other = (message["Message-ID"] for message in server.messages)
    assert first == again != other
    assert first.endswith("@example.com>")


INJECTIONS = [
    {"subject": "Hi\r\nBcc: eve@example.org"},
    {"subject": "Hi\nBcc: eve@example.org"},
    {"subject": "Hi\0"},
    {"to": ["ada@example.org\r\nBcc: eve@example.org"]},
    {"to": ["ada@example.org, eve@example.org"]},
    {"to": ["Ada <ada@example.org>"]},
    {"to": ["ada"]},
    {"to": [""]},
    {"to": ["ada@example.org>\r\nRCPT TO:<eve@example.org"]},
]


@pytest.mark.parametrize("change", INJECTIONS)
def test_nothing_can_be_smuggled_into_the_headers(server: Server, change: dict[str, Any]) -> None:
    assert refusal(send_email, setup(server), **{**MAIL, **change}).endswith("Nothing was sent.")
    assert server.heard == []


@pytest.mark.parametrize("change", [{"to": []}, {"to": ["a@b.c"] * 51}, {"subject": ""}, {"to": "ada@example.org"}])
def test_input_out_of_bounds_is_refused_before_a_start_marker(change: dict[str, Any]) -> None:
    assert send_email.check({**MAIL, **change}) is not None
    assert send_email.check(MAIL) is None


@pytest.mark.parametrize(
    "settings",
    [
        {"smtp_url": ""},
        {"smtp_from": ""},
        {"smtp_from": "nobody"},
        {"smtp_url": "http://user:secret@host"},
        {"smtp_url": "smtp://user:secret@host:port"},
    ],
)
def test_a_worker_without_mail_says_what_is_missing(server: Server, settings: dict[str, str]) -> None:
    text = refusal(send_email, setup(server, settings=settings), **MAIL)
    assert "BATON_SMTP_" in text
    assert text.endswith("Nothing was sent.")
    assert "secret" not in text
    assert server.heard == []


def test_a_server_that_cannot_be_reached_means_nothing_was_sent() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"smtp://127.0.0.1:{free.getsockname()[1]}"
        here = context(settings={"smtp_url": url, "smtp_from": "a@example.com"})
        assert refusal(send_email, here, **MAIL).endswith("Nothing was sent.")


@pytest.mark.parametrize("verb", ["MAIL", "RCPT", "DATA", "END"])
def test_a_refusal_is_told_with_the_servers_words(server: Server, verb: str) -> None:
    server.says[verb] = b"554 5.7.1 no thanks\r\n"
    text = refusal(send_email, setup(server), **MAIL)
    assert "554 5.7.1 no thanks" in text
    assert text.endswith("Nothing was sent.")


def test_a_connection_that_breaks_after_the_text_leaves_it_unknown_and_says_so(server: Server) -> None:
    """Guarantee 2: a real result, or that it is unknown. "Failed" would invite a second mail."""
    server.says["END"] = None
    text = refusal(send_email, setup(server), **MAIL)
    assert "unknown whether it was sent" in text
    assert server.messages[0]["Message-ID"] in text


def test_a_bad_goodbye_does_not_turn_a_sent_message_into_a_failure(server: Server) -> None:
    server.says["QUIT"] = None
    assert answer(send_email, setup(server), **MAIL).startswith("Sent to")


def test_recipients_that_were_refused_are_named_beside_those_that_were_not(server: Server) -> None:
    server.says["rcpt TO:<bob@example.org>"] = b"550 who?\r\n"
    text = answer(send_email, setup(server), **{**MAIL, "to": ["ada@example.org", "bob@example.org"]})
    assert text.startswith("Sent to ada@example.org as")
    assert "bob@example.org (550 who?)" in text


def test_a_login_is_made_with_the_urls_decoded_name(server: Server) -> None:
    server.says["ehlo"] = server.says["EHLO"] = b"250-hello\r\n250 AUTH PLAIN\r\n"
    server.says["AUTH"] = b"235 welcome\r\n"
    answer(send_email, setup(server, settings={"smtp_url": f"smtp://u%40x:p%2Fw@127.0.0.1:{server.port}"}), **MAIL)
    assert any(line.startswith("AUTH PLAIN") for line in server.heard)
    server.says["AUTH"] = b"535 wrong\r\n"
    settings = {"smtp_url": f"smtp://u:topsecret@127.0.0.1:{server.port}"}
    text = refusal(send_email, setup(server, settings=settings), **MAIL)
    assert "535 wrong" in text
    assert "topsecret" not in text


def test_a_password_is_not_sent_in_the_clear_over_a_network(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.create_connection
    monkeypatch.setattr(socket, "create_connection", lambda _, *a, **k: real(("127.0.0.1", server.port), *a, **k))
    here = context(settings={"smtp_url": "smtp://u:p@mail.example.com", "smtp_from": "a@example.com"})
    with pytest.raises(ValueError, match="no encryption"):
        _open(*_setup(here.settings))
    assert not any(line.upper().startswith("AUTH") for line in server.heard)


def test_an_oversized_body_is_refused(server: Server) -> None:
    assert "longer than" in refusal(send_email, setup(server), **{**MAIL, "body": "x" * 1_000_001})
    assert server.heard == []


def test_the_tool_can_be_called_by_its_authors_too(server: Server) -> None:
    with pytest.raises(ToolFailure):
        send_email(**MAIL, context=context())

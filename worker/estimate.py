"""How many tokens a model call will use, before it is made: what a budget reserves for it.

The last call's own count, four bytes for a token of what was added to the conversation since, and something for the
answer. Before the first call, and after a resume, all of the request is counted by its bytes. What is reserved is
settled with the real count as soon as that is known, so an estimate only says how close to a limit a call may begin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from worker.state.codec import encode

BYTES_PER_TOKEN = 4
ANSWER = 1_000  # tokens; a longer answer is allowed, and settled


@dataclass
class Estimate:
    """Of one task's next call. `request`: the frozen prefix."""

    request: Mapping[str, Any] = field(default_factory=dict)
    _last: int = 0
    _seen: int = 0  # messages that the last call's count includes

    def learn(self, tokens: int, seen: int) -> None:
        """A call used `tokens`; the conversation has `seen` messages since."""
        self._last, self._seen = tokens, seen

    def next_call(self, messages: Sequence[Mapping[str, Any]]) -> int:
        if self._last:
            known, added = self._last, messages[self._seen :]
        else:
            known, added = 0, [self.request, *messages]
        added_bytes = sum(len(encode(part)) for part in added)
        longest = self.request.get("max_tokens", ANSWER)
        return known + added_bytes // BYTES_PER_TOKEN + min(ANSWER, int(longest))

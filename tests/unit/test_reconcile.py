"""The whole table of design 4.4, as data: every combination has exactly one decision."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from worker.errors import CheckpointDamaged
from worker.reconcile import Decision, Nature, after_asking, decide, when_unknown
from worker.state.codec import digest
from worker.state.ledger import Call, Entry, Marker
from worker.tools import Effect

CALL = Call(3, "toolu_1", "append", {"line": "x", "n": 2**70})

NATURES: dict[str, Nature | None] = {
    "read_only": Nature(Effect.READ_ONLY),
    "idempotent": Nature(Effect.IDEMPOTENT),
    "side_effect": Nature(Effect.SIDE_EFFECT),
    "side_effect, verify": Nature(Effect.SIDE_EFFECT, can_verify=True),
    "side_effect, hold": Nature(Effect.SIDE_EFFECT, on_unknown="hold"),
    "side_effect, verify, hold": Nature(Effect.SIDE_EFFECT, can_verify=True, on_unknown="hold"),
    "vanished": None,
}

BOTH_WAYS = list(itertools.product([True, False], repeat=2))

# What a call that may have been started comes to. One that provably was not runs, whatever it is.
MAY_HAVE_RUN = {
    "read_only": Decision.RERUN,
    "idempotent": Decision.RERUN,
    "side_effect": Decision.UNKNOWN,
    "side_effect, verify": Decision.VERIFY,
    "side_effect, hold": Decision.HOLD,
    "side_effect, verify, hold": Decision.VERIFY,
    "vanished": Decision.UNKNOWN,
}


def entry(name: str = CALL.name, given: Any = None, *, is_error: bool = False) -> Entry:
    return Entry(name, digest(CALL.input if given is None else given), "done", is_error, epoch=1)


def mark(nature: str) -> Marker:
    known = NATURES[nature]
    return Marker(1, known.effect.value if known else "side_effect")


@pytest.mark.parametrize("nature", NATURES)
@pytest.mark.parametrize(("marked", "trusted"), BOTH_WAYS)
def test_a_call_without_an_entry(nature: str, marked: bool, trusted: bool) -> None:
    decision = decide(
        CALL, entry=None, marker=mark(nature) if marked else None, markers_trusted=trusted, nature=NATURES[nature]
    )
    if marked or not trusted:
        assert decision is MAY_HAVE_RUN[nature]
    else:
        assert decision is (Decision.NO_SUCH_TOOL if nature == "vanished" else Decision.RUN)


@pytest.mark.parametrize("nature", NATURES)
@pytest.mark.parametrize("is_error", [True, False])
@pytest.mark.parametrize(("marked", "trusted"), BOTH_WAYS)
def test_a_recorded_call_is_reused_and_never_run(nature: str, is_error: bool, marked: bool, trusted: bool) -> None:
    """Also when the tool is gone after a deploy, and when what it returned was an error (E13)."""
    marker = mark(nature) if marked else None
    found = entry(is_error=is_error)
    assert decide(CALL, entry=found, marker=marker, markers_trusted=trusted, nature=NATURES[nature]) is Decision.REUSE


@pytest.mark.parametrize("nature", NATURES)
@pytest.mark.parametrize(
    "other",
    [entry("prepend"), entry(given={"line": "y"}), entry(given={"n": 2**70, "line": "x"}), entry("prepend", {})],
    ids=["name", "input", "key order", "both"],
)
def test_an_entry_of_another_call_is_damage(nature: str, other: Entry) -> None:
    """A07: reused ids were taken for replays, and the old result given. Neither reuse nor run: a person has to look."""
    with pytest.raises(CheckpointDamaged, match="of another call"):
        decide(CALL, entry=other, marker=mark(nature), markers_trusted=True, nature=NATURES[nature])


@pytest.mark.parametrize("nature", [name for name in NATURES if name not in ("read_only", "idempotent")])
@pytest.mark.parametrize("trusted", [True, False])
def test_a_side_effect_that_may_have_happened_is_never_simply_run(nature: str, trusted: bool) -> None:
    """Guarantee 1, as a property of the table."""
    marker = mark(nature) if trusted else None
    decision = decide(CALL, entry=None, marker=marker, markers_trusted=trusted, nature=NATURES[nature])
    assert decision not in (Decision.RUN, Decision.RERUN)


@pytest.mark.parametrize(
    ("nature", "expected"),
    [
        (None, Decision.UNKNOWN),
        (Nature(Effect.SIDE_EFFECT), Decision.UNKNOWN),
        (Nature(Effect.SIDE_EFFECT, can_verify=True, on_unknown="hold"), Decision.HOLD),
    ],
)
def test_what_follows_when_verify_cannot_tell(nature: Nature | None, expected: Decision) -> None:
    assert when_unknown(nature) is expected


@pytest.mark.parametrize("today", ["read_only", "idempotent"])
def test_a_deploy_cannot_make_a_call_harmless_that_was_begun_as_a_side_effect(today: str) -> None:
    """The tool was marked anew between the crash and the resume; what is out there happened under the old mark."""
    begun = Marker(1, Effect.SIDE_EFFECT.value)
    nature = NATURES[today]
    assert decide(CALL, entry=None, marker=begun, markers_trusted=True, nature=nature) is Decision.UNKNOWN
    control = decide(CALL, entry=None, marker=mark(today), markers_trusted=True, nature=nature)
    assert control is Decision.RERUN


def test_not_happened_is_final_only_of_a_process_that_is_dead() -> None:
    """A holder paused between its marker and the call: verify truthfully said "no", the successor ran the call, and
    the first one woke up and ran it too."""
    nature = Nature(Effect.SIDE_EFFECT, can_verify=True)
    hold = Nature(Effect.SIDE_EFFECT, can_verify=True, on_unknown="hold")
    dead, asleep = Marker(1), Marker(1, holder_gone=False)
    assert after_asking("not_happened", dead, nature) is Decision.RUN, "control"
    for marker in (asleep, None):  # None: Redis lost the marker, so nobody knows whose call it was
        assert after_asking("not_happened", marker, nature) is Decision.UNKNOWN
        assert after_asking("not_happened", marker, hold) is Decision.HOLD
    for marker in (dead, asleep, None):
        assert after_asking("happened", marker, nature) is Decision.VERIFY
        assert after_asking("unknown", marker, nature) is Decision.UNKNOWN

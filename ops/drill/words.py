"""The verdict for people: lines for a terminal, and the same as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from ops.drill.verdict import Guarantee, Spread, Verdict

COUNTS = {
    "lost": "tasks that did not end",
    "duplicated": "side effects that ran again",
    "unknown": "results reported as unknown",
    "recovered": "times a task was taken from a holder that was gone",
    "redelivered": "times a lost job was delivered again",
    "reused": "calls answered from the ledger",
    "rerun": "calls run again, harmless by their nature",
    "verified": "calls whose tool was asked what had become of them",
    "held": "calls that waited for a person, who could not tell either",
    "paidTwice": "model answers that were asked for again",
}

Rows = list[tuple[str, ...]]


def guarantee_rows(verdict: Verdict) -> Rows:
    return [(str(one.number), one.title, f"{one.checked} {one.unit}", _broken(one)) for one in verdict.guarantees]


def _broken(one: Guarantee) -> str:
    if one.broken:
        return f"{len(one.broken)} broken"
    return "0" if one.checked else "not put to the test"


def count_rows(verdict: Verdict) -> Rows:
    return [(name, str(verdict.counts[name]), about) for name, about in COUNTS.items()]


def recovery_rows(verdict: Verdict) -> Rows:
    return [
        (kind, f"{one.number} of {one.hit}", *(f"{s:.2f} s" if one.number else "-" for s in _times(one)))
        for kind, one in verdict.recovery.items()
    ]


def _times(one: Spread) -> tuple[float, float, float]:
    return one.p50_s, one.p99_s, one.max_s


def examples(verdict: Verdict, each_max: int = 5) -> list[str]:
    """What broke, in sentences."""
    lines = []
    for one in verdict.guarantees:
        for broken in one.broken[:each_max]:
            call = f", call {broken.call}" if broken.call else ""
            lines.append(f"{one.number}: task {broken.task}{call}: {broken.what}")
        if len(one.broken) > each_max:
            lines.append(f"{one.number}: and {len(one.broken) - each_max} more")
    return lines


def overhead_line(verdict: Verdict) -> str:
    cost = verdict.overhead()
    if cost is None:
        return f"It took {verdict.seconds:.1f} s. There is no run without kills to compare with."
    more = (cost["seconds"] / cost["secondsWithoutKills"] - 1) * 100
    extra = cost["requests"] - cost["requestsWithoutKills"]
    return (
        f"It took {cost['seconds']:.1f} s, {cost['secondsWithoutKills']:.1f} s without kills ({more:+.0f} %); "
        f"{extra:+d} model requests to {cost['requestsWithoutKills']}."
    )


def ends_line(verdict: Verdict) -> str:
    counts = verdict.counts
    ends = [f"{counts[name]} {name}" for name in ("succeeded", "failed", "cancelled", "dead", "lost") if counts[name]]
    return f"{counts['tasks']} tasks: {', '.join(ends)}; {counts['calls']} calls; {counts['kills']} kills"


def last_line(verdict: Verdict) -> str:
    if verdict.control is not None and not verdict.control.holds:
        return f"Broken even without kills: guarantee {_numbers(verdict.control.broken)}."
    if verdict.broken:
        return f"Broken: guarantee {_numbers(verdict.broken)}."
    untested = [one.number for one in verdict.guarantees if not one.checked]
    but = f" Not put to the test: guarantee {_numbers(untested)}." if untested else ""
    return f"No guarantee broken.{but}"


def table(headings: Sequence[str], rows: Rows) -> list[str]:
    """Aligned columns."""
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (tuple(headings), *rows)
    ]


def markdown_table(headings: Sequence[str], rows: Sequence[tuple[str, ...]]) -> list[str]:
    lines: Rows = [tuple(headings), ("---",) * len(headings), *rows]
    return [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in lines]


GUARANTEE_HEADINGS = ("", "guarantee", "checked", "broken")
RECOVERY_HEADINGS = ("killed", "tasks", "p50", "p99", "max")


def lines_of(verdict: Verdict) -> list[str]:
    """The whole verdict for a terminal."""
    found = ["", ends_line(verdict), "", *table(GUARANTEE_HEADINGS, guarantee_rows(verdict)), ""]
    found += [f"  {line}" for line in examples(verdict)]
    found += table(("", "times", ""), count_rows(verdict))
    if verdict.recovery:
        found += ["", "From the kill to the next claim of the task:"]
        found += table(RECOVERY_HEADINGS, recovery_rows(verdict))
    if verdict.control is not None and not verdict.control.holds:
        found += ["", "In the run without kills:", *(f"  {line}" for line in examples(verdict.control))]
    return [*found, "", overhead_line(verdict), last_line(verdict)]


def _numbers(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))

"""The picture of a drill: one row a worker, one bar an ownership of a task, kills marked where they fell."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from ops.drill.facts import Facts, Hit
from ops.drill.spans import Span, spans

# Colours that stay apart for colour-blind eyes (Okabe and Ito).
ENDED, CUT, OTHER, AWAY, STOPPED = "#56b4e9", "#e69f00", "#bbbbbb", "#000000", "#cc79a7"
COLOURS = {"ended": ENDED, "recovered": CUT, "other": OTHER}
MARKS = {"worker": ("X", "#d55e00"), "horse": ("v", "#d55e00"), "both": ("D", "#d55e00"), "stop": ("s", STOPPED),
         "redis": ("|", AWAY), "sweeper": ("o", "#009e73"), "job": ("*", "#0072b2"),
         "term": ("P", "#cc79a7")}  # fmt: skip
LABELS = {"stop": "stopped, until it was let go on", "job": "job lost or doubled", "term": "worker told to go"}
BAR = 0.62
LABEL_MIN_S = 0.9  # a shorter bar has no room for the number of its task


def draw(facts: Facts, zero: float) -> Figure:
    """`zero`: the start, in seconds since 1970."""
    bars = spans(facts, zero)
    last_s = max([span.end_s for span in bars] + [(hit.until or hit.at) - zero for hit in facts.hits], default=1.0)
    place = _places(facts, bars)
    figure = Figure(figsize=(max(10.0, min(16.0, last_s / 2.8)), 1.5 + 0.5 * len(place)), layout="constrained")
    axes = figure.add_subplot()
    numbers = {task.id: number for number, task in enumerate(facts.tasks, 1)}
    for span in bars:
        _bar(axes, span, place[span.slot], numbers[span.task])
    for hit in facts.hits:
        _mark(axes, hit, hit.at - zero, (hit.until or hit.at) - zero, place[_row(hit.slot)])
    axes.set_yticks(list(place.values()), list(place))
    axes.set_ylim(-0.6, max(len(place) - 0.4, 0.6))
    axes.set_xlim(0, last_s * 1.01)
    axes.set_xlabel("seconds")
    axes.grid(axis="x", color="#eeeeee", zorder=0)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    about = "a bar is a task in the hands of a worker; its number is the task's"
    axes.set_title(f"{len(facts.tasks)} tasks, {len(facts.hits)} kills: {about}", loc="left", fontsize=10)
    legend = _legend({hit.kind for hit in facts.hits})
    figure.legend(handles=legend, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return figure


def _places(facts: Facts, bars: list[Span]) -> dict[str, int]:
    """Row → its height: the workers on top, then the sweepers and the server, if any of these was killed."""
    rows = sorted({slot for _, slot in facts.workers} | {span.slot for span in bars}, key=_number)
    rows += [row for row in ("sweepers", "redis") if row in {_row(hit.slot) for hit in facts.hits}]
    rows += sorted({_row(hit.slot) for hit in facts.hits} - set(rows), key=_number)
    return {name: len(rows) - 1 - at for at, name in enumerate(rows)}


def _row(slot: str) -> str:
    if slot.startswith(("lost ", "doubled ")):
        return "jobs"
    return "redis" if slot == "server" else "sweepers" if slot.startswith("sweeper") else slot


def _bar(axes: Any, span: Span, row: int, number: int) -> None:
    width = max(span.end_s - span.start_s, 0.02)
    axes.barh(
        row, width, left=span.start_s, height=BAR, color=COLOURS[span.end], edgecolor="white", linewidth=0.8, zorder=2
    )
    if width >= LABEL_MIN_S:
        axes.text(span.start_s + width / 2, row + 0.06, str(number), ha="center", va="center", fontsize=7, zorder=3)


def _mark(axes: Any, hit: Hit, at_s: float, until_s: float, row: int) -> None:
    marker, colour = MARKS[hit.kind]
    if hit.kind == "redis":
        axes.axvspan(at_s, until_s, color=AWAY, alpha=0.1, linewidth=0, zorder=1)
        axes.barh(row, until_s - at_s, left=at_s, height=BAR / 2, color=AWAY, zorder=2)
        return
    if hit.kind == "stop":
        low = row - BAR / 2 + 0.05
        axes.plot([at_s, until_s], [low, low], color=STOPPED, linewidth=3, solid_capstyle="butt", zorder=4)
    axes.plot(at_s, row, marker=marker, color=colour, markersize=8, markeredgecolor="white", zorder=5)


def _legend(kinds: set[str]) -> list[Any]:
    handles: list[Any] = [
        Patch(color=ENDED, label="task ended here"),
        Patch(color=CUT, label="task taken over by another"),
    ]
    for kind, (marker, colour) in MARKS.items():
        if kind not in kinds:
            continue
        if kind == "redis":
            handles.append(Patch(color=AWAY, label="redis killed, and away"))
        else:
            label = LABELS.get(kind, f"{kind} killed")
            handles.append(Line2D([], [], marker=marker, color=colour, linestyle="", markersize=7, label=label))
    return handles


def _number(name: str) -> tuple[str, int]:
    head, _, tail = name.rpartition("-")
    return (head, int(tail)) if tail.isdigit() else (name, 0)

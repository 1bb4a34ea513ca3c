"""What has to become of a call after a death at each crash point: the reconcile table, once more and independently.

Held against what became of it. Pure but for reading the user's tools and script.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ops.drill.check import Broken
from ops.drill.conversation import results_given
from ops.drill.facts import Facts, Json, TaskFacts
from ops.drill.script import own_script
from ops.drill.verdict import judge
from worker.errors import InvalidInput
from worker.settings import load_settings
from worker.tools import load_toolbox

OWN_CALLS = ("look", "put", "send", "pay")


@dataclass(frozen=True)
class Probe:
    """A tool, and the call that it is tried with. `sure`: its `verify` is the drill's own, so its answer is known."""

    tool: str
    call: Json
    effect: str
    verifies: bool
    holds: bool = False
    sure: bool = True

    @property
    def nature(self) -> str:
        extra = ", verify" * self.verifies + ", hold" * self.holds
        return self.effect + extra


@dataclass(frozen=True)
class End:
    """What became of a call. `result`: "real", "unknown", or "none" for one that waits for a person."""

    decided: str
    runs: int
    result: str

    def __str__(self) -> str:
        times = "once" if self.runs == 1 else f"{self.runs} times"
        return f"{self.decided} → ran {times}, result {self.result}"


@dataclass(frozen=True)
class Line:
    """One line of the matrix. `died`: a process reached the point, and died there. `broken`: of the guarantees."""

    label: str
    probe: Probe
    death: str
    died: bool
    got: End
    expected: End
    broken: tuple[Broken, ...] = field(default=())

    @property
    def ok(self) -> bool:
        return self.got == self.expected and not self.broken and self.died == reaches(self.label, self.probe)

    @property
    def text(self) -> str:
        where = f"{self.label:<21} × {self.probe.tool} ({self.probe.nature}) × {self.death}"  # noqa: RUF001  # meant
        nobody = "" if self.died else " (nobody passed this point)"
        if self.ok:
            return f"ok   {where} → {self.got}, as expected{nobody}"
        broken = "".join(f"; {one.what}" for one in self.broken)
        return f"NOT  {where} → {self.got}, expected {self.expected}{nobody}{broken}"

    def document(self) -> Json:
        about = {"label": self.label, "tool": self.probe.tool, "nature": self.probe.nature, "death": self.death}
        found = {"died": self.died, "got": vars(self.got), "expected": vars(self.expected), "ok": self.ok}
        return {**about, **found, "broken": [one.what for one in self.broken]}


def probes_of(tools: str, script: Path | None) -> list[Probe]:
    """The drill's own tools; or each of the user's that the script calls with plain input."""
    if not tools:
        box = load_toolbox(["ops.drill.tools"], load_settings({}))
        calls = {name: {"name": name, "input": {"item": "a thing", "takes_ms": 20}} for name in OWN_CALLS}
    else:
        box = load_toolbox([tools], load_settings({}))
        calls = _first_calls(script) if script else {}
    found = []
    for name, call in calls.items():
        if tool := box.get(name):
            hold = tool.on_unknown == "hold"
            found.append(Probe(name, call, tool.effect.value, tool.verify is not None, hold, sure=not tools))
    if not found:
        raise InvalidInput(f"the script {script} calls no tool of {tools} with plain input: there is nothing to try")
    return found


def _first_calls(script: Path) -> dict[str, Json]:
    calls: dict[str, Json] = {}
    for one in own_script(script).scripts:
        for turn in one.turns:
            for call in turn.calls:
                plain = "{{" not in str(call.input) and "{%" not in str(call.input)
                if plain and call.name not in calls:
                    calls[call.name] = {"name": call.name, "input": call.input}
    return calls


def reaches(label: str, probe: Probe) -> bool:
    """A read-only call has no start marker, so nobody passes that point."""
    return not (label == "after-start-mark" and probe.effect == "read_only")


def expected(label: str, probe: Probe, asked: str = "") -> End:
    """`asked`: what `verify` answered, where that is the user's affair."""
    if label == "after-effect-write":
        return End("reuse", 1, "real")
    if label not in ("after-start-mark", "after-effect") or not reaches(label, probe):
        return End("run", 1, "real")
    ran = 1 if label == "after-effect" else 0
    if probe.effect == "read_only":
        return End("run", ran + 1, "real")
    if probe.effect == "idempotent":
        return End("rerun", ran + 1, "real")
    if probe.verifies:
        answer = asked or ("happened" if ran else "not_happened")
        if answer != "unknown":
            return End(f"verify: {answer}", ran if answer == "happened" else ran + 1, "real")
    if probe.holds:
        return End("hold", ran, "none")
    return End("verify: unknown" if probe.verifies else "unknown", ran, "unknown")


def judge_line(label: str, probe: Probe, death: str, died: bool, task: TaskFacts) -> Line:
    """Hold a case against the table, and its task against the guarantees."""
    asked = [line["outcome"] for line in task.effects if line["what"] == "asked"]
    wanted = expected(label, probe, asked[-1] if asked and not probe.sure else "")
    how = "" if wanted.decided == "hold" else "succeeded"
    verdict = judge(Facts((task,), expected=how))
    broken = tuple(one for guarantee in verdict.guarantees for one in guarantee.broken)
    return Line(label, probe, death, died, became_of(task), wanted, broken)


def became_of(task: TaskFacts) -> End:
    decided = [what for event in task.events if event.kind == "answered" for what in event.data["decisions"].values()]
    runs = sum(line["what"] == "began" for line in task.effects)
    if not decided:
        held = any(event.kind == "parked" for event in task.events)
        return End("hold" if held else "nothing", runs, "none")
    unknown = any(result.is_unknown for result in results_given(task))
    return End(str(decided[0]), runs, "unknown" if unknown else "real")

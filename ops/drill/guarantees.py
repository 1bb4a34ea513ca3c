"""The guarantees as checks: each a pure function of the facts that gives what it looked at and what was broken.

Whatever a task says of itself is held against the effect log and the model's request log.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator

from ops.drill.check import Broken, Check
from ops.drill.conversation import Calls, Result, calls_of, problems_of_requests, results_given, stored_as_asked
from ops.drill.facts import Facts, Json, TaskFacts
from ops.drill.farewell import farewells_cost_nothing
from ops.transcript import text_of

TITLES = {
    1: "a side-effect call runs at most once",
    2: "a result given to the model is real, or says that it is unknown",
    3: "every call has exactly one result, in the next message, in every request",
    4: "no accepted task is lost; each ends once, with a reason",
    5: "one holder writes; turns and tokens never go back; one answer a crash is paid for twice",
    6: "what Redis acknowledged is there after its crash",
    7: "a worker that is told to go is gone in time, and its tasks lose nothing",
}


def runs_at_most_once(facts: Facts) -> Check:
    """A second `began` is allowed only where `verify` said in between that it had not happened. Runs of one call of any
    nature share one idempotency key."""
    check = Check("side effects")
    for task in facts.tasks:
        calls: dict[tuple[int, str], list[Json]] = defaultdict(list)
        for line in task.effects:
            calls[line["turn"], line["call"]].append(line)
        for (_, call), lines in calls.items():
            began = [line for line in lines if line["what"] == "began"]
            if not began:
                continue
            keys = {line["key"] for line in began}
            allowed = 1 + sum(line["what"] == "asked" and line["outcome"] == "not_happened" for line in lines)
            if began[0]["effect"] == "side_effect":
                check.look(task.id, len(began) <= allowed, f"{began[0]['tool']} ran {len(began)} times", call)
            if problem := _verify_lied(lines):
                check.broken.append(Broken(task.id, problem, call))
            if len(keys) > 1:
                check.broken.append(Broken(task.id, f"{began[0]['tool']} ran under {len(keys)} idempotency keys", call))
        for key, (tool, call) in _once(task, facts.stopped).items():
            times = sum(line["key"] == key for line in task.world)
            if times > 1:
                check.broken.append(Broken(task.id, f"{tool} happened {times} times in the world", call))
    return check


def _verify_lied(lines: list[Json]) -> str:
    """Of one call: "it has not happened", after a run of it had returned and said so."""
    returned = False
    for line in lines:
        returned = returned or (line["what"] == "did" and not line["isError"])
        if returned and line["what"] == "asked" and line["outcome"] == "not_happened":
            return f"{line['tool']} had returned, and then its verify said that it had not happened"
    return ""


def _once(task: TaskFacts, stopped: frozenset[int]) -> dict[str, tuple[str, str]]:
    """Idempotency key → tool and call, of all side effects that began. Not of those begun by a process that was
    stopped in the middle: what `verify` said of it was right when it was asked, and the process finishes later."""
    began = [line for line in task.effects if line["what"] == "began" and line["effect"] == "side_effect"]
    open_end = {line["key"] for line in began if line["pid"] in stopped}
    return {line["key"]: (line["tool"], line["call"]) for line in began if line["key"] not in open_end}


def results_are_real(facts: Facts) -> Check:
    """Each result in the last request has come from a run or from `verify`, or is an error that says so; and what was
    recorded once is what the model was given."""
    check = Check("results")
    for task in facts.tasks:
        calls = calls_of(task)
        for result in results_given(task):
            check.look(task.id, *_real(result, calls, facts.expected), result.call)
        recorded = [event.data.get("call", "") for event in task.events if event.kind == "call-recorded"]
        for call in sorted({call for call in recorded if recorded.count(call) > _uses(task, call)}):
            check.broken.append(Broken(task.id, "recorded, and yet run and recorded again", call))
    return check


def _real(result: Result, calls: Calls, expected: str) -> tuple[bool, str]:
    call = f"{result.turn}:{result.call}"
    if result.is_unknown:
        return call not in calls.recorded, "the model was told that it is unknown, though its result was recorded"
    if result.content in calls.returned.get(call, set()):
        return True, ""
    if result.is_error and call not in calls.began and expected != "succeeded":
        return True, ""  # of a user's script: refused before it could run: bad input, no such tool, cancelled
    ran = "returned something else" if call in calls.returned else "never returned"
    return False, f"the model was given a result; the call {ran}"


def _uses(task: TaskFacts, call: str) -> int:
    """Models use ids again: in how many turns this one was."""
    return sum(name.partition(":")[2] == call for name in task.ledger) or 1


def conversations_are_valid(facts: Facts) -> Check:
    """As strict as the API, over everything that was sent; each request continues the one before, byte for byte."""
    check = Check("requests")
    for task in facts.tasks:
        check.checked += len(task.requests)
        check.broken += [Broken(task.id, problem) for problem in problems_of_requests(task)]
    return check


def tasks_end_once(facts: Facts) -> Check:
    """In time, once, with a reason, and as they do without kills, where that is known."""
    check = Check("tasks")
    for task in facts.tasks:
        check.look(task.id, *_end(task, facts.expected))
    return check


def _end(task: TaskFacts, expected: str) -> tuple[bool, str]:
    if not task.status:
        return False, "lost: Redis knows nothing of it"
    if not task.ended:
        return False, f"lost: still {task.status} ({task.reason or 'no reason given'})"
    ends = sum(event.kind == "ended" for event in task.events)
    if ends != 1 or task.events[-1].kind != "ended":
        return False, f"ended {ends} times, and its last event is {task.events[-1].kind}"
    if not task.reason:
        return False, f"{task.status} without a reason"
    if task.status == "succeeded" and task.result not in _answers(task):
        return False, f"succeeded with a result that the model never gave: {task.result[:80]!r}"
    right = task.status == expected if expected else not task.reason.startswith("damaged")
    return right, f"{task.status}: {task.reason}"


def _answers(task: TaskFacts) -> set[str]:
    answers = (line["response"] for line in task.requests if line.get("response"))
    return {text_of(one["content"]) for one in answers if one["stop_reason"] in ("end_turn", "stop_sequence")}


def one_holder_writes(facts: Facts) -> Check:
    """Every write belongs to the ownership that was current, steps follow each other without a gap or a repetition,
    and the sums are those of the answers that were saved."""
    check = Check("writes")
    for task in (task for task in facts.tasks if task.status):
        check.checked += sum(event.kind in WRITES for event in task.events)
        for rule in (_sequence, _ownership, _sums, _paid, _stored):
            check.broken += [Broken(task.id, what, call) for what, call in rule(task)]
        check.broken += [Broken(task.id, what, call) for what, call in _began_late(task, facts)]
    return check


COUNTERS = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens")
STEPS = frozenset({"responded", "call-started", "call-recorded", "answered"})
WRITES = STEPS | {"ended"}
LETS_GO = frozenset({"recovered", "parked", "handed-over", "ended"})
Problems = Iterator[tuple[str, str]]


def _sequence(task: TaskFacts) -> Problems:
    """claimed with ever higher epochs; turn 1 responded, answered, turn 2 responded …"""
    epoch = turn = answered = 0
    held = False
    for event in task.events:
        number = int(event.data.get("turn", 0))
        if event.kind in STEPS and not held:
            yield f"turn {number}: {event.kind} was written while nobody held the task", event.data.get("call", "")
        held = event.kind == "claimed" or (held and event.kind not in LETS_GO)
        if event.kind == "claimed":
            if event.data["epoch"] <= epoch:
                yield f"claimed with epoch {event.data['epoch']} after {epoch}", ""
            epoch = event.data["epoch"]
        elif event.kind == "responded":
            if number != turn + 1:
                yield f"turn {number} was saved after turn {turn}", ""
            turn = number
        elif event.kind == "answered":
            if number != turn or number <= answered:
                yield f"results of turn {number} were saved in turn {turn}, after those of {answered}", ""
            answered = number


def _ownership(task: TaskFacts) -> Problems:
    """What a marker or an entry says of its writer's epoch is the epoch claimed last when it was written."""
    epoch = 0
    entries: dict[str, int] = {}
    markers: dict[str, int] = {}
    for event in task.events:
        if event.kind == "claimed":
            epoch = event.data["epoch"]
        elif event.kind in ("call-recorded", "call-started"):
            written = entries if event.kind == "call-recorded" else markers
            written[f"{event.data['turn']}:{event.data['call']}"] = epoch
    for name, stored, expected in (("result", task.ledger, entries), ("start marker", task.started, markers)):
        for call, document in stored.items():
            if document["epoch"] != expected.get(call):
                who = f"epoch {document['epoch']} while the task was held under {expected.get(call)}"
                yield f"its {name} was written by {who}", call.partition(":")[2]


def _sums(task: TaskFacts) -> Problems:
    saved = [event for event in task.events if event.kind == "responded"]
    if task.turns != len(saved):
        yield f"{task.turns} turns are counted, {len(saved)} answers were saved", ""
    for event in saved:
        asked = [line for line in task.requests if _turn_of(line) == event.data["turn"] and line.get("response")]
        if event.data["tokens"] not in (spent := {_spent(line["response"]) for line in asked}):
            yield f"turn {event.data['turn']} counts {event.data['tokens']} tokens, the model's log says {spent}", ""
    if task.total_tokens != (tokens := sum(event.data["tokens"] for event in saved)):
        yield f"{task.total_tokens} tokens are counted, the answers saved have {tokens}", ""
    if (by_name := sum(int(task.tokens_used.get(name, 0)) for name in COUNTERS)) != task.total_tokens:
        yield f"{task.total_tokens} tokens are counted, and {by_name} one by one", ""


def _turn_of(line: Json) -> int:
    """Which answer a request asks for."""
    return int(1 + sum(message["role"] == "assistant" for message in line["body"]["messages"]))


def _spent(response: Json) -> int:
    usage: dict[str, int | None] = response["usage"]
    return sum(usage.get(name) or 0 for name in COUNTERS)


def _paid(task: TaskFacts) -> Problems:
    # Of hand-overs those that gave a call up, and deaths of workers that were told to go, which count as no crash.
    cut = sum(e.kind == "handed-over" and bool(e.data.get("abandoned") or e.data.get("proof")) for e in task.events)
    allowed = task.turns + task.crashes + task.parks + cut
    if task.paid > allowed:
        yield f"{task.paid} answers were paid for, for {task.turns} turns and {task.crashes} crashes", ""


def _stored(task: TaskFacts) -> Problems:
    if task.message_count != len(task.messages):
        yield f"{task.message_count} messages are counted, {len(task.messages)} are stored", ""
    if task.status == "succeeded" and (not task.messages or task.messages[-1]["role"] != "assistant"):
        yield "the last answer is not stored", ""
    if problem := stored_as_asked(task):
        yield problem, ""


def _began_late(task: TaskFacts, facts: Facts) -> Problems:
    """A call began under an epoch that was over. A process that was stopped between its last look and the call cannot
    know; any other has to."""
    epoch = 0
    for line in sorted((line for line in task.effects if line["what"] == "began"), key=lambda line: line["mono"]):
        if line["epoch"] < epoch and line["pid"] not in facts.stopped:
            yield f"{line['tool']} began under epoch {line['epoch']}, after one under {epoch}", line["call"]
        epoch = max(epoch, line["epoch"])


def acknowledged_is_there(facts: Facts) -> Check:
    check = Check("tasks over a crash")
    for outage in facts.outages:
        check.checked += outage.compared
        check.broken += [Broken(task, f"forgotten: {what}") for task, what in outage.forgotten.items()]
    return check


CHECKS: dict[int, Callable[[Facts], Check]] = {
    1: runs_at_most_once,
    2: results_are_real,
    3: conversations_are_valid,
    4: tasks_end_once,
    5: one_holder_writes,
    6: acknowledged_is_there,
    7: farewells_cost_nothing,
}

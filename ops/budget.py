"""`baton budget`: how many tokens the fleet, or all tasks with a tag, may use."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import click

from enqueue.command import print_json
from enqueue.plain import duration
from enqueue.request import TAG_MAX, TOKENS_MAX
from ops.reach import reach
from ops.tables import print_table
from worker.errors import InvalidInput
from worker.state.budget import FLEET, Budget
from worker.state.store import Store

DAY_MS = 86_400_000
PERIODS = {"": 0, "hour": DAY_MS // 24, "day": DAY_MS, "week": 7 * DAY_MS, "month": 30 * DAY_MS}
_NAMES = {ms: f"/{name}" if name else "" for name, ms in PERIODS.items()}
_FACTORS = {"": 1, "k": 1_000, "M": 1_000_000, "G": 1_000_000_000}
_AMOUNT = re.compile(r"tokens=(\d{1,16}(?:\.\d{1,9})?)([kMG]?)(?:/(hour|day|week|month))?", re.ASCII)


@click.group("budget", invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_context
def budget(context: click.Context, as_json: bool) -> None:
    """List budgets: what is allowed, used and reserved, when each begins anew, how many tasks wait for it.

    A task that a budget has no room for is parked and goes on by itself when there is room.
    """
    if context.invoked_subcommand is None:
        _list(reach().store, as_json=as_json)


@budget.command("set")
@click.argument("scope")
@click.argument("amount", metavar="tokens=N[/PERIOD]")
def set_(scope: str, amount: str) -> None:
    """Allow SCOPE so many tokens: `baton budget set tag=team-a tokens=5M/day`.

    SCOPE is `fleet`, or `tag=NAME` for all tasks with that tag. N may end in k, M or G. PERIOD is hour, day, week or
    month (30 days), counted in UTC; without one it is N tokens in all. What is used stays counted as long as the
    period stays the same.
    """
    store, name = reach().store, _scope(scope)
    limit, period_ms = _amount(amount)
    woken = store.set_budget(name, limit, period_ms)
    click.echo(f"{name}: {limit} tokens{_NAMES[period_ms]}{_went_on(woken)}")


@budget.command("clear")
@click.argument("scope")
def clear(scope: str) -> None:
    """Take SCOPE's budget away; tasks that wait for it go on."""
    store, name = reach().store, _scope(scope)
    woken = store.clear_budget(name)
    if woken is None:
        raise InvalidInput(f"{name} has no budget")
    click.echo(f"{name}: no budget any more{_went_on(woken)}")


def _scope(scope: str) -> str:
    tag = scope.removeprefix("tag=")
    if scope == FLEET or (tag != scope and tag.strip() and tag.isprintable() and len(tag) <= TAG_MAX):
        return scope
    raise InvalidInput(f"{scope[:80]!a} is no scope: write fleet, or tag=NAME")


def _amount(amount: str) -> tuple[int, int]:
    """(tokens, ms of the period)."""
    found = _AMOUNT.fullmatch(amount)
    if not found:
        raise InvalidInput(f"{amount[:80]!a} is no budget: write tokens=5M/day, tokens=200k/hour, tokens=1G")
    whole, _, part = found[1].partition(".")
    scaled = int(whole + part) * _FACTORS[found[2]]
    tokens = scaled // 10 ** len(part)
    if not 1 <= tokens <= TOKENS_MAX:
        raise InvalidInput(f"a budget is 1 to {TOKENS_MAX} tokens, not {tokens}")
    return tokens, PERIODS[found[3] or ""]


def _went_on(woken: list[str]) -> str:
    return f"; {len(woken)} waiting tasks go on" if woken else ""


def _list(store: Store, *, as_json: bool) -> None:
    budgets, waiting = store.list_budgets(), _waiting(store)
    if as_json:
        print_json([_document(one, waiting[one.scope]) for one in budgets])
        return
    now = store.clock.server_ms(store.client.time())
    rows = [_row(one, waiting[one.scope], now) for one in budgets]
    print_table(("SCOPE", "LIMIT", "USED", "RESERVED", "ANEW IN", "TASKS WAITING"), rows, empty="no budgets")


def _waiting(store: Store) -> Counter[str]:
    counts: Counter[str] = Counter()
    for waiting in store.all_waiting_for_budgets():
        counts.update(one.scope for one in waiting.values() if not one.woken)
    return counts


def _row(one: Budget, waiting: int, now_ms: int) -> tuple[object, ...]:
    anew = "never" if one.anew_ms is None else duration((one.anew_ms - now_ms) / 1000)
    return one.scope, f"{one.limit}{_NAMES.get(one.period_ms, '')}", one.used, one.reserved, anew, waiting


def _document(one: Budget, waiting: int) -> dict[str, Any]:
    return {
        "scope": one.scope,
        "limit": one.limit,
        "periodMs": one.period_ms or None,
        "used": one.used,
        "reserved": one.reserved,
        "beginsAnewMs": one.anew_ms,
        "tasksWaiting": waiting,
    }

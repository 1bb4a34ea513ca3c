"""Tables for people: drawn by rich on a terminal, aligned columns everywhere else.

Cells may hold anything a model or a task's author wrote; they are cleaned here, and never read as markup.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

import click

from enqueue.plain import one_line

CELL_MAX = 400


def print_table(headings: Sequence[str], rows: Sequence[Sequence[object]], *, empty: str) -> None:
    """One line a row; the last column takes what room is left. `empty` goes to stderr when there are no rows."""
    cells = [[one_line(str(cell), CELL_MAX) for cell in row] for row in rows]
    if not cells:
        click.echo(empty, err=True)
    elif sys.stdout.isatty():
        _draw(headings, cells)
    else:
        _align(headings, cells)


def print_fields(fields: Mapping[str, object]) -> None:
    """`name  value` lines; what is None or empty is left out."""
    shown = {name: str(value) for name, value in fields.items() if value not in (None, "", ())}
    width = max(map(len, shown), default=0)
    for name, value in shown.items():
        click.echo(f"{name:<{width}}  {one_line(value, CELL_MAX)}")


def _draw(headings: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for heading, width in zip(headings[:-1], _widths(headings, cells)[:-1], strict=True):
        table.add_column(heading, no_wrap=True, width=width)
    table.add_column(headings[-1])  # the only one that may wrap gives way; its texts are cut instead
    for row in cells:
        table.add_row(*map(Text, row[:-1]), Text(row[-1], no_wrap=True, overflow="ellipsis"))
    Console(markup=False, highlight=False, emoji=False).print(table)


def _align(headings: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    widths = _widths(headings, cells)
    for row in (headings, *cells):
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _widths(headings: Sequence[str], cells: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(headings, *cells, strict=True)]

"""`baton settings`: what every BATON_* variable is, here and by default."""

from __future__ import annotations

import json
from typing import Any

import click
from pydantic import SecretStr
from pydantic_core import PydanticUndefined
from rich.console import Console
from rich.table import Table
from rich.text import Text

from worker.settings import PREFIX, Settings, load_settings
from worker.state.transact import shown_url


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON document: name → {value, default, about}.")
@click.option("--markdown", is_flag=True, help="The table of the README: names, defaults, meanings.")
def settings(as_json: bool, markdown: bool) -> None:
    """Print every setting, its value here, and what it means."""
    if markdown:
        click.echo(markdown_table())
        return
    current = load_settings()
    rows = [(name, _shown(getattr(current, field)), default, about) for field, name, default, about in described()]
    if as_json:
        found = {name: {"value": value, "default": default, "about": about} for name, value, default, about in rows}
        click.echo(json.dumps(found, indent=2))
        return
    table = Table("variable", "value", "meaning", box=None, pad_edge=False)
    for name, value, default, about in rows:
        table.add_row(name, Text(value, style="" if value == default else "bold"), about)
    Console().print(table)


def described() -> list[tuple[str, str, str, str]]:
    """(field, variable, default, meaning) of every setting, in the order of the code."""
    return [
        (field, PREFIX + field.upper(), _shown(info.default), info.description or "")
        for field, info in Settings.model_fields.items()
        if info.default is not PydanticUndefined
    ]


def markdown_table() -> str:
    """As the README has it; a test compares the two."""
    lines = ["| variable | default | meaning |", "|---|---|---|"]
    for _, name, default, about in described():
        lines.append(f"| `{name}` | {f'`{default}`' if default else ''} | {about} |")
    return "\n".join(lines)


def _shown(value: Any) -> str:
    if isinstance(value, SecretStr):
        return "***" if value.get_secret_value() else ""
    if isinstance(value, bool):
        return str(value).lower()
    return shown_url(str(value)) if "://" in str(value) else str(value)

"""Where the text of a task comes from: an argument, a file, standard input. Bytes go in as they are, or not at all."""

from __future__ import annotations

import os
import shlex
import stat
import sys
from collections.abc import Callable, Sequence
from typing import BinaryIO

import click

from enqueue.request import too_long
from worker.errors import InvalidInput


class TextCommand(click.Command):
    """A command whose argument is prose, which may begin with a dash.

    Sorts the words before click sees them. `-` is standard input. A word with white space in what would be its
    option's name (`- [ ] x`, `-f is broken`) is text. An option that needs a value does not swallow another option.
    What looks like an option and is none is refused, with a hint. Options are never abbreviated.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        options, texts = self._sorted(ctx, args)
        try:
            return super().parse_args(ctx, [*options, "--", *texts])
        except click.NoSuchOption as error:
            raise click.UsageError(f"{error.format_message()} {_hint(ctx)}", ctx) from None

    def _sorted(self, ctx: click.Context, args: Sequence[str]) -> tuple[list[str], list[str]]:
        takes_value = {
            name: not (param.is_flag or param.count)
            for param in self.get_params(ctx)
            if isinstance(param, click.Option)
            for name in param.opts
        }
        options: list[str] = []
        texts: list[str] = []
        words = iter(args)
        for word in words:
            name = word.partition("=")[0]
            if word == "--":
                texts += words
            elif word == "-":
                options.append("--stdin")
            elif not word.startswith("-") or any(c.isspace() for c in name):
                texts.append(word)
            elif takes_value.get(name) and "=" not in word:
                value = next(words, None)
                if value is None or value == "--" or value.partition("=")[0] in takes_value:
                    raise click.UsageError(f"{name} needs a value (--option=VALUE takes any). {_hint(ctx)}", ctx)
                options.append(f"{name}={value}")
            else:
                options.append(word)
        return options, texts


def text_from(texts: Sequence[str], file: str | None, from_stdin: bool, bytes_max: int) -> str:
    """The one text that was given. Raises click.UsageError, or InvalidInput for one that cannot be read."""
    if len(texts) > 1:
        quoted = shlex.quote(" ".join(texts))
        raise click.UsageError(f"the text must be one argument, not {len(texts)}; quote it: {quoted[:200]}")
    if len(texts) + (file is not None) + from_stdin > 1:
        raise click.UsageError("the text was given more than once: as TEXT, with --file or with -")
    if texts:
        return texts[0]
    if from_stdin or file == "-":
        return _content("standard input", lambda: open(0, "rb", closefd=False), bytes_max)
    if file is not None:
        return _content(ascii(file), lambda: open(file, "rb"), bytes_max)  # noqa: PTH123
    if sys.stdin is not None and not sys.stdin.isatty():
        raise click.UsageError("no text. To read it from standard input, say so: … | enqueue-task -")
    raise click.UsageError('no text: enqueue-task "what is to be done"')


def _content(name: str, start: Callable[[], BinaryIO], bytes_max: int) -> str:
    """All of it; stops reading as soon as it is too long."""
    try:
        with start() as stream:
            about = os.fstat(stream.fileno())
            if stat.S_ISREG(about.st_mode) and about.st_size > bytes_max:
                raise too_long(name, str(about.st_size), bytes_max)
            content = stream.read(bytes_max + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        why = error.strerror if isinstance(error, OSError) else error
        raise InvalidInput(f"cannot read {name}: {why}") from None
    if len(content) > bytes_max:
        raise too_long(name, f"more than {bytes_max}", bytes_max)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{name} is not valid UTF-8: see byte {error.start}") from None


def _hint(ctx: click.Context) -> str:
    return f'If it is the text, put -- before it: {ctx.info_name} -- "…"'

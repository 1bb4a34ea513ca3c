"""What `enqueue-task` and `baton` share: exit codes, and the one place where errors become a sentence."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any, TextIO

import click

from worker.errors import BatonError

FAILED, WRONG_USE, INTERRUPTED = 1, 2, 130


def run_command(command: click.Command, name: str, args: Sequence[str] | None = None) -> int:
    """Run a click command; its exit code. Never a traceback for anything that a person caused or can mend."""
    argv = list(sys.argv[1:] if args is None else args)
    for stream in (sys.stdout, sys.stderr):
        # An answer in Chinese on an ASCII terminal is no reason to fail after the work is done.
        getattr(stream, "reconfigure", lambda **options: None)(errors="backslashreplace")
    try:
        with command.make_context(name, argv) as context:
            code = command.invoke(context)
            return code if isinstance(code, int) else 0
    except click.exceptions.Exit as over:
        return over.exit_code
    except BrokenPipeError:  # `baton tasks | head`: the reader has seen enough
        forget_stdout()
        return 0
    except KeyboardInterrupt as interrupted:
        said = str(interrupted) or "interrupted"
        return _fail(name, argv, said, INTERRUPTED)
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx else name
        return _fail(where, argv, f"{error.format_message()}\nTry '{where} --help' for help.", WRONG_USE)
    except click.ClickException as error:
        return _fail(name, argv, error.format_message(), error.exit_code)
    except Exception as error:
        return _fail_for(error, name, argv)


def print_json(document: Any, out: TextIO | None = None) -> None:
    """One JSON document; pure ASCII, so no text in it can play tricks on a terminal."""
    click.echo(json.dumps(document, indent=2), file=out)


def note(name: str, line: str) -> None:
    """A remark for the person, on stderr."""
    click.echo(f"{name}: {line}", err=True)


def _fail_for(error: Exception, name: str, argv: list[str]) -> int:
    """Ours and Redis's. All others are bugs, and those show where they are."""
    if "redis" in sys.modules:
        import redis

        from enqueue.trouble import in_words
        from worker.errors import RedisUnavailable
        from worker.settings import load_settings

        if isinstance(error, redis.RedisError | RedisUnavailable):
            error = in_words(error, load_settings().redis_url)
    if not isinstance(error, BatonError):
        raise error
    return _fail(name, argv, str(error), error.exit_code)


def _fail(name: str, argv: list[str], said: str, exit_code: int) -> int:
    options = argv[: argv.index("--")] if "--" in argv else argv
    if "--json" in options:
        print_json({"error": said, "exitCode": exit_code})
    else:
        note(name, said)
    return exit_code


def forget_stdout() -> None:
    """Nobody reads it any more; without this the interpreter complains when it flushes it at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)

"""What all commands share: messages on standard error, exit codes, values from the command line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from earlystop.errors import ConfigError, EarlyStopError
from earlystop.policy import FIELDS, key_of

OK, FAILED, BAD_INPUT, BROKEN_LINES, INTERRUPTED = 0, 1, 2, 3, 130
"""Exit codes: all went well; something failed; nothing was started because of bad input; every valid prompt was run,
but some lines were broken; stopped by Ctrl-C."""

err = Console(stderr=True, highlight=False)
out = Console(highlight=False)


def say(text: str) -> None:
    """A message for people, on standard error."""
    err.print(text, markup=False, soft_wrap=True)


def stop(text: str, code: int = BAD_INPUT) -> typer.Exit:
    """Prints an error and gives what to raise."""
    say(f"error: {text}")
    return typer.Exit(code)


@contextmanager
def errors_end() -> Iterator[None]:
    """Turns our own errors into a message and an exit code."""
    try:
        yield
    except (ConfigError, EarlyStopError) as error:
        raise stop(str(error)) from error


def pairs(options: list[str], flag: str) -> dict[str, str]:
    """``name=value`` options as a dictionary.

    Raises:
        ConfigError: an option without ``=``, or a name that came twice.
    """
    found: dict[str, str] = {}
    for option in options:
        name, equals, value = option.partition("=")
        name = name.strip()
        if not equals or not name:
            raise ConfigError(f"{flag} {option!r} is not allowed: write {flag} name=value", field=flag)
        if name in found:
            raise ConfigError(f"{flag} {name} was given twice", field=name)
        found[name] = value
    return found


def literal(text: str) -> Any:
    """A value from the command line: JSON where it is JSON (numbers, true, null, lists, objects), else the text."""
    lowered = text.strip().lower()
    if lowered in ("true", "false"):
        return lowered == "true"
    if lowered in ("none", "null"):
        return None
    try:
        return json.loads(text)
    except ValueError:
        return text


def policy_value(name: str, text: str) -> Any:
    """The value of a policy field, in the type that the field wants where the text can be read so."""
    kind = FIELDS[name].type if name in FIELDS else "text"
    if kind in ("int", "number", "flag"):
        for read in (int, float):
            try:
                return read(text)
            except ValueError:
                continue
        if kind == "flag" and text.strip().lower() in ("true", "false"):
            raise ConfigError(f"{key_of(name)}={text} is not allowed: write 1 for true, 0 for false", field=name)
    return text


def existing(path: Path, what: str) -> Path:
    """A file that exists.

    Raises:
        ConfigError: it does not.
    """
    if not path.is_file():
        raise ConfigError(f"{what} {path} does not exist or is no file", field=what)
    return path

"""`earlystop watch`: the signals of running engines, as they are made."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Annotated

import typer

from earlystop.cli.console import errors_end, say
from earlystop.signals import Signal
from earlystop.watch import watch as watch_bus


def watch(
    endpoint: Annotated[str | None, typer.Option(help="ipc:// or tcp://; default: all engines of this user.")] = None,
    id: Annotated[str | None, typer.Option(help="Only this stream.")] = None,
    timeout: Annotated[float | None, typer.Option(help="End after so many seconds without a signal.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON record a line.")] = False,
    all_kinds: Annotated[bool, typer.Option("--all", help="Progress and traces too.")] = False,
) -> None:
    """Print signals live, until Ctrl-C or the timeout."""
    with errors_end(), watch_bus(endpoint, id, timeout) as signals:
        try:
            for signal in signals:
                if all_kinds or signal.kind not in ("progress", "trace"):
                    typer.echo(json.dumps(signal.to_dict(), ensure_ascii=False) if as_json else _line(signal))
        except KeyboardInterrupt:
            pass
        if signals.lost:
            say(f"{signals.lost} batches of signals came too late for any buffer")


def _line(signal: Signal) -> str:
    when = datetime.fromtimestamp(signal.milliseconds / 1000, UTC).astimezone()
    parts = [f"{when:%H:%M:%S}", signal.id[:12] or "-", str(signal.kind), str(signal.reason or "")]
    for name in ("tokens", "used", "budget", "confidence", "entropy", "similarity", "end_margin"):
        value = getattr(signal, name)
        if value is not None:
            parts.append(f"{name}={value:.4g}")
    error = (signal.data or {}).get("error")
    return "  ".join(part for part in [*parts, str(error or "")] if part)

"""`earlystop doctor`: what is installed, what works, and what to do about what does not."""

from __future__ import annotations

import json
from typing import Annotated

import msgspec
import typer
from rich.table import Table

from earlystop.cli.checks import CHECKS, Finding
from earlystop.cli.console import FAILED, OK, out

_MARK = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "fault": "[red]fault[/]"}


def doctor(as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output.")] = False) -> None:
    """Look at this installation. Exit code 0 if early stopping works here, 1 if not."""
    findings = [finding for check in CHECKS for finding in _safely(check)]
    works = all(finding.state != "fault" for finding in findings)
    if as_json:
        typer.echo(json.dumps({"works": works, "findings": msgspec.to_builtins(findings)}, indent=2))
    else:
        table = Table(show_header=False, box=None, pad_edge=False)
        for finding in findings:
            table.add_row(_MARK[finding.state], finding.name, finding.text)
            if finding.remedy:
                table.add_row("", "", f"[bold]do:[/] {finding.remedy}")
        out.print(table)
        out.print("early stopping works here" if works else "early stopping does not work here")
    raise typer.Exit(OK if works else FAILED)


def _safely(check: object) -> list[Finding]:
    """A check that breaks is a finding too."""
    name = getattr(check, "__name__", "check").removeprefix("_")
    try:
        return check()  # type: ignore[operator,no-any-return]
    except Exception as error:
        return [Finding(name, "fault", f"{type(error).__name__}: {error}")]

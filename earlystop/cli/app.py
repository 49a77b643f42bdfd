"""All commands, put together."""

from __future__ import annotations

from typing import Annotated

import typer

import earlystop
from earlystop.cli.demo import demo
from earlystop.cli.doctor import doctor
from earlystop.cli.profile import app as profile
from earlystop.cli.report import report
from earlystop.cli.run import run
from earlystop.cli.watch import watch

app = typer.Typer(
    name="earlystop",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (run, report, demo, doctor, watch):
    app.command()(command)
app.add_typer(profile, name="profile")


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"earlystop {earlystop.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Early stopping inside stock vLLM."""

"""All commands, put together."""

from __future__ import annotations

import typer

from earlystop.cli.demo import demo
from earlystop.cli.run import run

app = typer.Typer(
    name="earlystop",
    help="Early stopping inside stock vLLM.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (run, demo):
    app.command()(command)


@app.callback()
def _root() -> None:
    """Early stopping inside stock vLLM."""

"""The `earlystop` command; `python -m earlystop` is the same."""

from __future__ import annotations

import sys
import warnings


def main() -> None:
    """Entry point of the console script."""
    try:
        from earlystop.cli.app import app
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("typer", "rich", "zmq"):
            raise
        sys.exit(f"the earlystop command needs {error.name}: pip install 'earlystop[cli,bus]'")
    warnings.filterwarnings("ignore", category=FutureWarning)  # of libraries about each other, at every start
    app()

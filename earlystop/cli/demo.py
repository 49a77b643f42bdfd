"""`earlystop demo`: a real model in real vLLM, plain and with early stopping."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from earlystop.cli.console import FAILED, OK, err, errors_end, say


def demo(
    model: Annotated[str | None, typer.Option(help="Checkpoint folder; default: SmolLM2-135M-Instruct.")] = None,
    runner: Annotated[Literal["auto", "v1", "v2"], typer.Option(help="vLLM's model runner.")] = "auto",
    results: Annotated[Path, typer.Option(help="Folder for demo.json and demo.png.")] = Path("results"),
) -> None:
    """Run two dozen everyday prompts plain and with `classic`, and show what was saved.

    Exit code 1 if the early texts are not what they should be: on a CPU, beginnings of the plain ones, and nowhere cut
    inside a code block or a character.
    """
    from earlystop.demo.arms import run_demo, verdict
    from earlystop.demo.show import as_json, picture, table

    with errors_end():
        results.mkdir(parents=True, exist_ok=True)
        say("two arms over 24 prompts, at most 512 tokens each; minutes on a small CPU")
        with Progress(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=err) as bar:
            task = bar.add_task("starting vLLM", total=None)
            outcome = run_demo(model, runner=runner, scratch=results, note=say, step=_steps(bar, task))
    Console(width=None if err.is_terminal else 150).print(table(outcome))
    good, lines = verdict(outcome)
    for line in lines:
        typer.echo(line)
    target = results / "demo.json"
    target.write_text(json.dumps(as_json(outcome), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    picture(outcome, results / "demo.png")
    say(f"written: {target}, {results / 'demo.png'}")
    raise typer.Exit(OK if good else FAILED)


def _steps(bar: Progress, task: object) -> Callable[[str], Callable[[int], None]]:
    def arm(name: str) -> Callable[[int], None]:
        tokens = 0

        def step(new: int) -> None:
            nonlocal tokens
            tokens += new
            bar.update(task, description=f"{name}: {tokens} tokens")  # type: ignore[arg-type]

        return step

    return arm

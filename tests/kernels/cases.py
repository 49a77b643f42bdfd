"""What the kernel tests share: which back ends and device they run on, and rows to run them with.

By default the CPU back ends run. ``EARLYSTOP_TEST_KERNELS=triton`` runs the same tests on the Triton kernels, under
``TRITON_INTERPRET=1`` (test_interpreter.py starts such a run) or with ``EARLYSTOP_TEST_DEVICE=cuda`` on a GPU.
"""

from __future__ import annotations

import os

import torch

BACKENDS = os.environ.get("EARLYSTOP_TEST_KERNELS", "cpu,torch").split(",")
DEVICE = os.environ.get("EARLYSTOP_TEST_DEVICE", "cpu")
INTERPRETED = "triton" in BACKENDS and DEVICE == "cpu"

NAN, INF = float("nan"), float("inf")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

#: Over vocabularies, odd ones among them; rows are few where the interpreter would take long.
SHAPES = [
    (3, 1, FP32),
    (4, 2, BF16),
    (1, 127, FP16),
    (300, 127, BF16),
    (5, 1000, BF16),
    (2, 1000, FP32),
    (2, 32_000, FP16),
    (2, 49_152, BF16),
    (1, 50_257, FP32),
    (2, 50_257, BF16),
    (1, 128_256, BF16),
    (1, 151_936, FP32),
    (2, 151_936, BF16),
]


def rows_of(rows: int, vocab: int, dtype: torch.dtype, *, seed: int = 0, scale: float = 4.0) -> torch.Tensor:
    """Logits as models make them: a bell with a few values far above it."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=generator) * scale
    peaks = torch.randint(vocab, (rows, 3), generator=generator)
    logits.scatter_(1, peaks, torch.rand(rows, 3, generator=generator) * 10 + 3 * scale)
    return logits.to(dtype).to(DEVICE)


def int32(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def ending_of(vocab: int) -> torch.Tensor:
    """One think end and two EOS ids inside the vocabulary, one outside, padded."""
    return int32([[vocab // 2, -1, -1, -1], [vocab - 1, 0, vocab + 5, -1]])

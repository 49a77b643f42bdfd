from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from earlystop.kernels import cpu, cpu_mask, cpu_similarity, mask, reference, similarity, stats

from .cases import BF16, ending_of, int32, rows_of


def test_entry_modules_load_no_compiler() -> None:
    """Importing the entry modules imports neither triton nor numba nor vllm; the first call does."""
    code = """
import sys
import torch
before = set(sys.modules)
import earlystop.kernels.mask, earlystop.kernels.similarity, earlystop.kernels.stats
new = {name.split(".")[0] for name in set(sys.modules) - before}
sys.exit(str(new & {"triton", "numba", "vllm"}) if new & {"triton", "numba", "vllm"} else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where numba is missing the CPU paths are plain torch, with the same results."""
    monkeypatch.setitem(sys.modules, "numba", None)
    caches = (cpu._kernel, cpu_mask._kernel, cpu_similarity._loops)
    for cache in caches:
        cache.cache_clear()
    try:
        assert not cpu.available()
        logits = rows_of(3, 1000, BF16)
        got, want = stats.logit_stats(logits, ending_of(1000)), reference.logit_stats(logits, ending_of(1000))
        torch.testing.assert_close(got.values, want.values, rtol=1e-5, atol=1e-5)
        rows = logits.float()
        mask.write_rows(rows, int32([5, -1, -1]), int32([0, 0, 0]), ending_of(1000), int32([]), int32([0, 0, 0]))
        assert torch.isfinite(rows).sum(dim=1).tolist() == [1, 1000, 1000]
        state = similarity.alloc_units(1, 8)
        pending = torch.zeros(1, 1, 8)
        similarity.stash_hidden(torch.ones(1, 8), int32([0]), int32([0]), pending)
        out = torch.empty(1, 1)
        for _ in range(2):
            similarity.unit_similarity(pending, int32([1]), int32([[1]]), int32([0]), state, out)
        assert out.item() == pytest.approx(1.0)
    finally:
        for cache in caches:
            cache.cache_clear()


def test_warmup_leaves_nothing_to_compile() -> None:
    """After a warm-up the first real call adds no compiled variant."""
    from earlystop.kernels import numba_stats

    stats.warmup("cpu", BF16, 1000)
    variants = len(numba_stats.rows_stats.signatures)
    stats.logit_stats(rows_of(2, 1000, BF16), ending_of(1000))
    assert len(numba_stats.rows_stats.signatures) == variants

from __future__ import annotations

import math

import pytest
import torch

from earlystop.kernels import reference, stats

from .cases import BACKENDS, BF16, DEVICE, FP16, FP32, INF, INTERPRETED, NAN, SHAPES, ending_of, int32, rows_of

pytestmark = pytest.mark.parametrize("backend", BACKENDS)


def check(logits: torch.Tensor, ending: torch.Tensor, backend: str) -> stats.Stats:
    """Measure and compare with float64: entropy to 1e-5 nats, the others to float32's relative precision."""
    before = logits.clone()
    got = stats.logit_stats(logits, ending, backend=backend)
    want = reference.logit_stats(logits.cpu(), ending.cpu())
    assert got.argmax.tolist() == want.argmax.tolist()
    assert got.values.dtype is torch.float32
    assert got.argmax.dtype is torch.int32
    values = got.values.cpu()
    torch.testing.assert_close(values[:, 0], want.values[:, 0], rtol=3e-6, atol=1e-9, equal_nan=True)
    torch.testing.assert_close(values[:, 1], want.values[:, 1], rtol=0, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(values[:, 2:], want.values[:, 2:], rtol=1e-6, atol=0, equal_nan=True)
    assert bool((values[:, 1] >= 0).logical_or(values[:, 1].isnan()).all())
    torch.testing.assert_close(logits, before, rtol=0, atol=0, equal_nan=True)
    return got


@pytest.mark.parametrize(("rows", "vocab", "dtype"), SHAPES)
def test_agrees_with_the_float64_loop(backend: str, rows: int, vocab: int, dtype: torch.dtype) -> None:
    """Every vocabulary, dtype and batch size gives what the reference loop gives."""
    check(rows_of(rows, vocab, dtype), ending_of(vocab), backend)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_strides(backend: str, dtype: torch.dtype) -> None:
    """Rows of a wider buffer, every second row, transposed, strided and broadcast views are read where they lie."""
    vocab = 1000
    wide = rows_of(6, 1064, dtype)
    wide[:, vocab:] = 90.0  # padding that must not be seen
    ending = ending_of(vocab)
    check(wide[:, :vocab], ending, backend)
    check(wide[::2, 8 : vocab + 8 - 64], ending_of(vocab - 64), backend)
    check(rows_of(vocab, 3, dtype).t(), ending, backend)
    check(rows_of(2, 2 * vocab, dtype)[:, ::2], ending, backend)
    check(rows_of(1, vocab, dtype).expand(3, vocab), ending, backend)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_masks(backend: str, dtype: torch.dtype) -> None:
    """Entries of -inf count nothing, wherever they lie; an ending that is masked out is infinitely far."""
    logits = rows_of(6, 9000, dtype)
    logits[0, ::2] = -INF
    logits[1, :8500] = -INF  # nothing finite in the first tiles
    logits[2, 10:] = -INF
    logits[3] = -INF
    logits[3, 4711] = -2.5  # one survivor: certain
    logits[4, 4500] = -INF
    logits[5, [8999, 0]] = -INF
    got = check(logits, ending_of(9000), backend).values.tolist()
    assert got[3][:2] == [1.0, 0.0]
    assert got[4][2] == INF
    assert got[5][3] == INF


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("poison", [NAN, -NAN, INF])
@pytest.mark.parametrize("where", [0, 4099, 8999])
def test_undefined_rows(backend: str, dtype: torch.dtype, poison: float, where: int) -> None:
    """A NaN of either sign, or +inf, makes its row undefined and no other."""
    logits = rows_of(3, 9000, dtype)
    logits[1, where] = poison
    if math.isnan(poison) and math.copysign(1.0, poison) < 0:
        logits[1, where] = -logits[1, where].abs()
    got = check(logits, ending_of(9000), backend)
    assert got.values[1].isnan().all()
    assert got.argmax.tolist()[1] == -1


def test_rows_without_a_finite_logit(backend: str) -> None:
    """All -inf, all NaN, all +inf, -inf and NaN: no evidence, never certainty."""
    logits = torch.full((5, 300), -INF, device=DEVICE)
    logits[1], logits[2], logits[3, 200], logits[4, 200] = NAN, INF, NAN, INF
    got = check(logits, ending_of(300), backend)
    assert got.values.isnan().all()


def test_empty_and_partly_known_endings(backend: str) -> None:
    """Without ids a margin is undefined; ids outside of the vocabulary are no ids; 0 where the model would end."""
    logits = torch.tensor([[0.0, 3.0, 1.0]], device=DEVICE)
    nothing = check(logits, int32([[-1], [-1]]), backend).values.tolist()[0]
    assert math.isnan(nothing[2])
    assert math.isnan(nothing[3])
    outside = check(logits, int32([[3, -1, -1], [-1, 2, 77]]), backend).values.tolist()[0]
    assert math.isnan(outside[2])
    assert outside[3] == 2.0
    assert check(logits, int32([[1], [0]]), backend).values.tolist()[0][2:] == [0.0, 3.0]


def test_ties_take_the_lowest_index(backend: str) -> None:
    """Equal maxima in one group, in one tile, across tiles and parts; +0 and -0 are equal."""
    logits = torch.full((6, 70_000), -3.0, device=DEVICE)
    for row, ids in enumerate([(5, 6), (40, 4000), (69_999, 3), (50_000, 30_000, 65_000), (17_000, 16_383)]):
        logits[row, list(ids)] = 9.0
    logits[5, 12], logits[5, 30_001], logits[5, 60_000] = 0.0, -0.0, 0.0
    logits[5, 7] = -0.0
    for dtype in (BF16, FP32):
        assert check(logits.to(dtype), ending_of(70_000), backend).argmax.tolist() == [5, 40, 3, 30_000, 16_383, 7]


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_large_magnitudes(backend: str, dtype: torch.dtype) -> None:
    """Logits around ±1e4 and maxima that grow by thousands while reading cost no precision and never overflow."""
    vocab = 20_000
    logits = torch.stack(
        [
            rows_of(1, vocab, FP32)[0] + 1e4,
            rows_of(1, vocab, FP32)[0] - 1e4,
            torch.linspace(-1e4, 1e4, vocab, device=DEVICE),
            torch.linspace(1e4, -1e4, vocab, device=DEVICE),
            torch.full((vocab,), 3.0e38, device=DEVICE),
            torch.full((vocab,), -3.0e38, device=DEVICE),
        ]
    ).to(dtype)
    check(logits, ending_of(vocab), backend)


def test_near_one_hot_rows_have_no_negative_entropy(backend: str) -> None:
    """However sure the model is, entropy stays at or above zero and top-1 at or under one."""
    gaps = [0.0, 1.0, 5.0, 10.0, 20.0, 40.0, 80.0, 88.0, 100.0, 1000.0]
    logits = torch.zeros(len(gaps), 5000, device=DEVICE)
    logits[:, 1234] = torch.tensor(gaps, device=DEVICE)
    values = check(logits, ending_of(5000), backend).values
    assert bool((values[:, 0] <= 1.0).all())
    assert values[-1, :2].tolist() == [1.0, 0.0]
    assert values[0, 1].item() == pytest.approx(math.log(5000), abs=1e-5)


def test_same_bits_every_time_and_beside_any_neighbour(backend: str) -> None:
    """A second run gives the same bits; so does a row among others of the same launch shape."""
    logits = rows_of(4, 33_000, BF16)
    ending = ending_of(33_000)
    once, again = (stats.logit_stats(logits, ending, backend=backend).values for _ in range(2))
    assert torch.equal(once, again)
    shuffled = stats.logit_stats(logits.flip(0), ending, backend=backend).values
    assert torch.equal(once, shuffled.flip(0))


def test_given_buffers_are_used(backend: str) -> None:
    """Results land in the leading rows of the caller's buffers and the rest keeps its bits; no rows, no work."""
    out = stats.alloc_stats(5, DEVICE)
    out.values.fill_(-7.0)
    out.argmax.fill_(-7)
    logits = rows_of(3, 20_000, BF16)
    got = stats.logit_stats(logits, ending_of(20_000), out, backend=backend)
    assert got.values.data_ptr() == out.values.data_ptr()
    assert out.values[3:].eq(-7.0).all()
    assert out.argmax[3:].eq(-7).all()
    fresh = stats.logit_stats(logits, ending_of(20_000), backend=backend)
    assert torch.equal(fresh.values, out.values[:3])
    assert stats.logit_stats(logits[:0], ending_of(20_000), backend=backend).values.shape == (0, 4)


def test_wrong_input_is_refused(backend: str) -> None:
    """The message says what was got and what is allowed."""
    logits, ending = rows_of(2, 10, FP32), ending_of(10)
    with pytest.raises(ValueError, match=r"\[rows, vocab >= 1\], got \(10,\)"):
        stats.logit_stats(logits[0], ending, backend=backend)
    with pytest.raises(ValueError, match=r"got torch\.float64"):
        stats.logit_stats(logits.double(), ending, backend=backend)
    with pytest.raises(ValueError, match=r"int32 \[2, M\]"):
        stats.logit_stats(logits, ending[0], backend=backend)
    with pytest.raises(ValueError, match="allocate more"):
        stats.logit_stats(logits, ending, stats.alloc_stats(1, DEVICE), backend=backend)
    with pytest.raises(ValueError, match="'abacus'"):
        stats.logit_stats(logits, ending, backend="abacus")


def test_cpu_exponential_keeps_its_promise(backend: str) -> None:
    """2^t is within 2e-7 of the true value over its whole range, exact at 0 and zero at the bottom."""
    if backend != "cpu":
        pytest.skip("the CPU path's own exponential")
    import numpy as np

    from earlystop.kernels import numba_stats

    t = np.linspace(-125.9, 0.0, 20_001, dtype=np.float32)
    got = np.array([numba_stats.exp2(x) for x in t], dtype=np.float64)
    true = np.exp2(t.astype(np.float64))
    assert np.max(np.abs(got - true) / true) < 2e-7
    assert numba_stats.exp2(np.float32(0.0)) == 1.0
    assert numba_stats.exp2(np.float32(-127.0)) == 0.0


def test_splitting_a_row_changes_nothing_but_rounding(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One part or many: the same argmax and margins to the bit, the sums within float32 rounding."""
    if backend != "triton":
        pytest.skip("only the GPU kernel splits rows")
    from earlystop.kernels import triton_stats

    logits = rows_of(2, 151_936 if not INTERPRETED else 50_000, BF16)
    logits[1, 100:40_000] = -INF
    logits[0, [5, 5 + 8192, 5 + 16_384, 5 + 32_768]] = 60.0  # a tie between the tiles of one thread
    ending = ending_of(logits.shape[1])
    results = []
    for unsplit, programs in ((1, 1), (192, 2), (192, 6), (192, 528)):
        monkeypatch.setattr(triton_stats, "UNSPLIT_ROWS", unsplit)
        monkeypatch.setattr(triton_stats, "SPLIT_PROGRAMS", programs)
        results.append(check(logits, ending, backend))
    for other in results[1:]:
        assert torch.equal(results[0].argmax, other.argmax)
        assert torch.equal(results[0].values[:, 2:], other.values[:, 2:])
        torch.testing.assert_close(results[0].values[:, :2], other.values[:, :2], rtol=1e-6, atol=2e-6)

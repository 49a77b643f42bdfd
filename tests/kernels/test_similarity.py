from __future__ import annotations

import pytest
import torch

from earlystop.kernels import reference, similarity
from earlystop.kernels.similarity import UnitState, alloc_units, reset, stash_hidden, unit_similarity

from .cases import BACKENDS, BF16, DEVICE, FP16, FP32, INF, NAN, int32

UNIT_BACKENDS = ["triton"] if "triton" in BACKENDS else ["cpu", "reference"]
pytestmark = pytest.mark.parametrize("backend", UNIT_BACKENDS)


class Oracle:
    """Units of one request kept as plain lists, cosines in float64."""

    def __init__(self, centre: torch.Tensor | None, mode: str) -> None:
        self.centre, self.mode = centre, mode
        self.tokens: list[torch.Tensor] = []
        self.last: torch.Tensor | None = None

    def commit(self, x: torch.Tensor, *, ends: bool) -> float:
        self.tokens.append(x.double())
        if not ends:
            return NAN
        unit = torch.stack(self.tokens).mean(dim=0) if self.mode == "mean" else self.tokens[-1]
        if self.centre is not None:
            unit = unit - self.centre.double()
        cosine = NAN if self.last is None else reference.unit_cosine(unit.tolist(), self.last.tolist())
        self.tokens, self.last = [], unit
        return cosine


def run(pending, n_commit, unit_end, slots, state, backend, mode="mean"):
    out = torch.full(unit_end.shape, -7.0, device=DEVICE)
    return unit_similarity(pending, n_commit, unit_end, slots, state, out, mode=mode, backend=backend)


@pytest.mark.parametrize(
    ("hidden", "dtype"), [(1, FP32), (64, FP16), (576, BF16), (576, FP32), (900, BF16), (8192, BF16)]
)
@pytest.mark.parametrize(("mode", "centred"), [("mean", True), ("last", False)])
def test_histories_agree_with_the_oracle(
    backend: str, hidden: int, dtype: torch.dtype, mode: similarity.Mode, centred: bool
) -> None:
    """Steps with 0 to K commits, units of any length, slots in any order: as one list a request would give."""
    generator = torch.Generator().manual_seed(hidden)
    n_slots, width, requests = 5, 3, 3
    centre = torch.randn(hidden, generator=generator) * 0.1 if centred else None
    state = alloc_units(n_slots, hidden, DEVICE, centre)
    pending = torch.zeros(n_slots, width, hidden, dtype=dtype, device=DEVICE)
    oracles = {slot: Oracle(centre, mode) for slot in range(n_slots)}
    for _ in range(8):
        slots = torch.randperm(n_slots, generator=generator)[:requests].tolist()
        slots[1] = -1
        hidden_rows = (torch.randn(requests * width, hidden, generator=generator) + 0.5).to(dtype).to(DEVICE)
        row_slot = int32([slot for slot in slots for _ in range(width)])
        stash_hidden(hidden_rows, row_slot, int32(list(range(width)) * requests), pending, backend=backend)
        n_commit = torch.randint(0, width + 1, (requests,), generator=generator).tolist()
        ends = torch.randint(0, 2, (requests, width), generator=generator).tolist()
        want = [[NAN] * width for _ in slots]
        for r, slot in enumerate(slots):
            for i in range(n_commit[r] if slot >= 0 else 0):
                want[r][i] = oracles[slot].commit(hidden_rows[r * width + i].cpu(), ends=bool(ends[r][i]))
        got = run(pending, int32(n_commit), int32(ends), int32(slots), state, backend, mode)
        torch.testing.assert_close(got.cpu(), torch.tensor(want), rtol=0, atol=5e-6, equal_nan=True)


def test_undefined_cosines(backend: str) -> None:
    """First unit, zero norm, NaN, infinity: undefined, and defined again two units later."""
    state = alloc_units(1, 8, DEVICE)
    units = torch.ones(9, 8)
    units[1] = 0.0
    units[4, 3] = NAN
    units[7, 0] = INF
    got = []
    for unit in units:
        pending = unit.reshape(1, 1, 8).to(DEVICE)
        got.append(run(pending, int32([1]), int32([[1]]), int32([0]), state, backend).item())
    assert [value == value for value in got] == [False, False, False, True, False, False, True, False, False]
    assert got[3] == pytest.approx(1.0, abs=1e-6)


def test_more_commits_than_room_are_cut(backend: str) -> None:
    """A count beyond K takes K, a count of 0 changes nothing."""
    state = alloc_units(2, 8, DEVICE)
    pending = torch.ones(2, 2, 8, device=DEVICE)
    got = run(pending, int32([9, 0]), int32([[1, 1], [1, 1]]), int32([1, 0]), state, backend)
    assert got.isnan().tolist() == [[True, False], [True, True]]
    assert state.prev_valid.tolist() == [0, 1]


def test_reset_forgets_the_named_slots_only(backend: str) -> None:
    """A recycled slot starts with no unit and no history; its neighbours keep theirs."""
    state = alloc_units(3, 8, DEVICE)
    pending = torch.ones(3, 1, 8, device=DEVICE)
    everyone = int32([0, 1, 2])
    for ends in (1, 0):
        run(pending, int32([1] * 3), int32([[ends]] * 3), everyone, state, backend)
    reset(int32([2, -1, 0]), state, backend=backend)
    assert state.unit_count.tolist() == [0, 1, 0]
    assert state.prev_valid.tolist() == [0, 1, 0]
    assert state.unit_sum.sum(dim=1).tolist() == [0.0, 8.0, 0.0]
    got = run(pending, int32([1] * 3), int32([[1]] * 3), everyone, state, backend)
    assert got.isnan().flatten().tolist() == [True, False, True]
    reset(int32([]), state, backend=backend)


def test_stash_skips_and_casts(backend: str) -> None:
    """Rows without a slot or beyond K are dropped; strided rows and another dtype are taken."""
    pending = torch.full((2, 2, 6), -1.0, dtype=BF16, device=DEVICE)
    rows = torch.arange(60.0, device=DEVICE).reshape(5, 12)
    stash_hidden(rows[:, :6], int32([1, -1, 0, 0, 1]), int32([0, 0, 2, -1, 1]), pending, backend=backend)
    assert pending[0].eq(-1).all()
    assert torch.equal(pending[1].float(), rows[[0, 4], :6])
    stash_hidden(rows[:2, ::2].bfloat16(), int32([0, 0]), int32([0, 1]), pending, backend=backend)
    assert torch.equal(pending[0].float(), rows[:2, ::2])
    stash_hidden(rows[:0, :6], int32([]), int32([]), pending, backend=backend)


def test_same_bits_every_time(backend: str) -> None:
    """Two runs from the same state agree to the bit."""

    def once() -> UnitState:
        state = alloc_units(4, 600, DEVICE)
        for seed in range(3):
            pending = torch.randn(4, 2, 600, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
            run(pending, int32([2] * 4), int32([[0, 1]] * 4), int32([3, 1, 2, 0]), state, backend)
        return state

    first, second = once(), once()
    assert all(torch.equal(a, b) for a, b in zip(first[:4], second[:4], strict=True))


def test_wrong_input_is_refused(backend: str) -> None:
    """Width, layout, mode, centre: named with what is allowed."""
    state = alloc_units(1, 8, DEVICE)
    good = (int32([1]), int32([[1]]), int32([0]), state, torch.zeros(1, 1, device=DEVICE))
    with pytest.raises(ValueError, match=r"\[slots, 1, 8\]"):
        unit_similarity(torch.zeros(1, 1, 9, device=DEVICE), *good, backend=backend)
    with pytest.raises(ValueError, match="contiguous"):
        unit_similarity(torch.zeros(1, 8, 1, device=DEVICE).mT.expand(2, 1, 8), *good, backend=backend)
    with pytest.raises(ValueError, match="'median'"):
        unit_similarity(torch.zeros(1, 1, 8, device=DEVICE), *good, mode="median", backend=backend)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'abacus'"):
        reset(int32([0]), state, backend="abacus")
    with pytest.raises(ValueError, match="run without similarity"):
        alloc_units(1, similarity.MAX_HIDDEN + 1)
    with pytest.raises(ValueError, match=r"centre must be \[8\]"):
        alloc_units(1, 8, centre=torch.zeros(7))
    with pytest.raises(ValueError, match=r"hidden must be \[rows, 8\]"):
        stash_hidden(torch.zeros(1, 9), int32([0]), int32([0]), torch.zeros(1, 1, 8), backend=backend)

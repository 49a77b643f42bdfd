from __future__ import annotations

import itertools
import math

import pytest
import torch

from earlystop.kernels import mask, reference
from earlystop.kernels.mask import INVALID, MASK_RESERVED, MOVE_EOS

from .cases import BACKENDS, DEVICE, FP32, INF, NAN, int32, rows_of

MASK_BACKENDS = ["triton"] if "triton" in BACKENDS else ["cpu", "reference"]
pytestmark = pytest.mark.parametrize("backend", MASK_BACKENDS)

VOCAB = 2500
THINK, EOS, EOS_2 = 40, 2499, 3
ENDING = [[THINK, -1, -1], [EOS, EOS_2, EOS]]  # an id twice must not count twice
RESERVED = [7, 8, 2400, 7, -1]  # here too


def write(
    logits: torch.Tensor,
    backend: str,
    *,
    force: list[int] | None = None,
    flags: list[int] | None = None,
    grammar: list[int] | None = None,
    ending: list[list[int]] = ENDING,
    reserved: list[int] = RESERVED,
) -> torch.Tensor:
    """Run the back end and the reference on copies, compare, return the rows; untouched values keep their bits."""
    rows = logits.shape[0]
    verdict = (int32(force or [-1] * rows), int32(flags or [0] * rows))
    tables = (int32(ending), int32(reserved), int32(grammar or [0] * rows))
    want = logits.cpu().clone()
    reference.write_rows(want, *(t.cpu() for t in (*verdict, *tables)))
    got = logits.clone(memory_format=torch.preserve_format)
    mask.write_rows(got, *verdict, *tables, backend=backend)
    torch.testing.assert_close(got.cpu(), want, rtol=1e-6, atol=1e-6, equal_nan=True)
    same = (want == logits.cpu()) & torch.isfinite(want)
    assert torch.equal(got.cpu()[same], logits.cpu()[same])
    return got


def test_rows_without_a_verdict_keep_every_bit(backend: str) -> None:
    """NaN payloads and signed zeros included."""
    logits = rows_of(4, VOCAB, FP32)
    logits[1, 3], logits[2, :] = -0.0, -INF
    logits.view(torch.int32)[0, 5] = 0x7FC12345
    got = write(logits, backend, grammar=[0, 1, 0, 1])
    assert torch.equal(got.view(torch.int32), logits.view(torch.int32))


@pytest.mark.parametrize("token", [0, 1, 1023, 1024, VOCAB - 1])
def test_a_forced_row_has_one_finite_logit(backend: str, token: int) -> None:
    """Zero at the id, -inf elsewhere, whatever stood there, and neighbours untouched."""
    logits = rows_of(3, VOCAB, FP32)
    logits[1, token] = -INF
    logits[1, 9] = NAN
    got = write(logits, backend, force=[-1, token, -1], flags=[0, MOVE_EOS | MASK_RESERVED, 0])
    assert got[1, token] == 0.0
    assert torch.isfinite(got[1]).sum() == 1
    assert torch.equal(got[::2], logits[::2])


def test_a_grammar_is_never_forced(backend: str) -> None:
    """Under a grammar only a token it allows is forced; INVALID overrules; ids outside of the vocabulary do nothing."""
    logits = rows_of(7, VOCAB, FP32)
    logits[1, 50], logits[2, 50], logits[3, 50], logits[4, 50], logits[5, 50] = -INF, NAN, -INF, NAN, INF
    got = write(
        logits,
        backend,
        force=[50, 50, 50, 50, 50, 50, VOCAB],
        flags=[0, 0, 0, INVALID, INVALID, 0, INVALID],
        grammar=[1, 1, 1, 1, 1, 1, 0],
    )
    finite = torch.isfinite(got).sum(dim=1).tolist()
    assert [n == 1 for n in finite] == [True, False, False, True, True, False, False]


def test_eos_mass_moves_to_the_end_tag(backend: str) -> None:
    """Probability is conserved: the end tag gets its own and that of every EOS id, once each."""
    logits = rows_of(4, VOCAB, FP32)
    logits[1, THINK] = -INF
    logits[2, [EOS, EOS_2]] = -INF
    logits[3, [THINK, EOS, EOS_2]] = -INF
    got = write(logits, backend, flags=[MOVE_EOS] * 4)
    before, after = logits.double().softmax(dim=1), got.double().softmax(dim=1)
    assert after[:, [EOS, EOS_2]].eq(0).all()
    torch.testing.assert_close(after[:, THINK], before[:, [THINK, EOS, EOS_2]].sum(dim=1), rtol=1e-5, atol=0)


def test_eos_stays_where_moving_it_has_no_meaning(backend: str) -> None:
    """No end tag, a grammar that forbids it, NaN or +inf among the values: the row keeps its bits."""
    logits = rows_of(5, VOCAB, FP32)
    logits[0, THINK] = -INF
    logits[1, EOS] = NAN
    logits[2, THINK] = INF
    logits[3, EOS_2] = INF
    got = write(logits, backend, flags=[MOVE_EOS] * 5, grammar=[1, 0, 0, 0, 1])
    assert torch.equal(got[:4].view(torch.int32), logits[:4].view(torch.int32))
    assert got[4, EOS] == -INF
    for none in ([[-1], [EOS]], [[VOCAB], [EOS]]):
        assert torch.equal(write(logits[4:], backend, flags=[MOVE_EOS], ending=none), logits[4:])


def test_end_tag_that_is_an_eos_id(backend: str) -> None:
    """Where the end tag is itself listed as EOS it keeps its place and gets the rest."""
    got = write(rows_of(2, VOCAB, FP32), backend, flags=[MOVE_EOS] * 2, ending=[[EOS, -1], [EOS, EOS_2]])
    assert torch.isfinite(got[:, EOS]).all()
    assert got[:, EOS_2].eq(-INF).all()


def test_reserved_ids_are_masked_unless_nothing_would_remain(backend: str) -> None:
    """A row keeps at least one finite logit, also together with a moved EOS."""
    logits = rows_of(5, VOCAB, FP32)
    logits[1] = -INF
    logits[1, [7, 2400]] = 1.0  # only reserved ids are finite
    logits[2] = -INF
    logits[2, [7, 2450]] = 1.0  # the survivor lies in the last block
    logits[3] = -INF
    logits[3, [7, EOS]] = 1.0  # EOS leaves, its mass arrives at the end tag
    logits[4] = -INF
    got = write(logits, backend, flags=[MASK_RESERVED, MASK_RESERVED, MASK_RESERVED, MOVE_EOS | MASK_RESERVED, 2])
    assert torch.isfinite(got).any(dim=1).tolist() == [True, True, True, True, False]
    assert got[0, [7, 8, 2400]].eq(-INF).all()
    assert got[1, 7] == 1.0
    assert torch.isfinite(got[3]).nonzero().flatten().tolist() == [THINK]
    assert torch.equal(write(logits, backend, flags=[MASK_RESERVED] * 5, reserved=[]), logits)


def test_reserved_end_tag(backend: str) -> None:
    """An end tag that is reserved as well ends masked if other logits remain, else it keeps what moved to it."""
    logits = rows_of(2, VOCAB, FP32)
    logits[1] = -INF
    logits[1, [EOS, 7]] = 1.0
    got = write(logits, backend, flags=[MOVE_EOS | MASK_RESERVED] * 2, reserved=[7, THINK, VOCAB + 1])
    assert got[0, THINK] == -INF
    assert math.isfinite(got[1, THINK])


def test_every_combination_leaves_a_finite_logit(backend: str) -> None:
    """Force × flags × grammar × a row that is plain, nearly or wholly masked: as the reference, never an empty row."""
    combinations = list(itertools.product([-1, 40, 300], range(4), [0, 1], range(3)))
    logits = rows_of(len(combinations), 400, FP32)
    for row, (*_, kind) in enumerate(combinations):
        if kind == 1:
            logits[row, 1:] = -INF
        elif kind == 2:
            logits[row] = -INF
            logits[row, [7, 40]] = 0.5
    force, flags, grammar, _ = (list(column) for column in zip(*combinations, strict=True))
    got = write(
        logits, backend, force=force, flags=flags, grammar=grammar, ending=[[40, -1], [399, 0]], reserved=[7, 8]
    )
    assert torch.isfinite(got).any(dim=1).all()


def test_strided_rows(backend: str) -> None:
    """Rows of a wider buffer and transposed rows are written where they lie, their padding is not."""
    wide = torch.full((4, VOCAB + 60), 5.0, device=DEVICE)
    tables = (int32(ENDING), int32(RESERVED), int32([0, 0]))
    mask.write_rows(wide[::2, :VOCAB], int32([9, -1]), int32([0, 3]), *tables, backend=backend)
    assert wide[0, 9] == 0.0
    assert torch.isfinite(wide[0, :VOCAB]).sum() == 1
    assert wide[:, VOCAB:].eq(5.0).all()
    assert wide[1::2].eq(5.0).all()
    turned = torch.full((VOCAB, 2), 5.0, device=DEVICE)
    mask.write_rows(turned.t(), int32([9, -1]), int32([0, 3]), *tables, backend=backend)
    assert torch.equal(turned.t(), wide[::2, :VOCAB])


def test_wrong_input_is_refused(backend: str) -> None:
    """Another dtype or length is named with what is allowed."""
    good = (int32([-1]), int32([0]), int32(ENDING), int32(RESERVED), int32([0]))
    with pytest.raises(ValueError, match="float32"):
        mask.write_rows(torch.zeros(1, 4, device=DEVICE).half(), *good, backend=backend)
    with pytest.raises(ValueError, match=r"force must be int32 \[2\]"):
        mask.write_rows(torch.zeros(2, 4, device=DEVICE), *good, backend=backend)
    with pytest.raises(ValueError, match="'abacus'"):
        mask.write_rows(torch.zeros(1, 4, device=DEVICE), *good, backend="abacus")

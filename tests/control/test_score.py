from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from earlystop.control import layout, lower
from earlystop.control.layout import O_DECIDED, RC_CONFIDENT
from earlystop.control.params import policy_columns
from earlystop.profile import References, Score

from .harness import BLANK, EOS, Request, W, play, resolved, toy_table

PLAIN = lower.python_namespace()
weights = st.floats(-5, 5)
features = st.floats(0, 3)


@settings(deadline=None, max_examples=500)
@given(st.integers(0, 2**31 - 2))
@example(0)
@example(1)
@example(2**31 - 2)
def test_log1p_is_the_math_library_to_1e_15(count: int) -> None:
    """Relative error under 1e-15, by halving and a series alone."""
    assert PLAIN["log1p"](count) == pytest.approx(math.log1p(count), rel=1e-15, abs=0)


def test_log1p_is_the_same_in_numba() -> None:
    """To the bit, for every small count and for large ones."""
    compiled = lower.numba_namespace()["log1p"]
    for count in (*range(3000), *range(3000, 2**31 - 1, 7_654_321)):
        assert compiled(count) == PLAIN["log1p"](count)


def scored(score: Score, *, top1: float, entropy: float, similarity: float, margin: float, tokens: int) -> float:
    """The device's score for a unit of one token, as a probability."""
    ints, floats = columns(score)
    ints[layout.TOKENS], ints[layout.UNIT_STATS] = tokens, 1
    floats[layout.UNIT_TOP1], floats[layout.UNIT_ENTROPY], floats[layout.LAST_MARGIN] = top1, entropy, margin
    PLAIN["scored"](ints, 0, floats, 0, np.float64(similarity))
    z = float(floats[layout.LAST_SCORE])
    return math.nan if math.isnan(z) else 0.5 * (1 + math.tanh(z / 2))


def columns(score: Score, **fields: Any) -> tuple[np.ndarray, np.ndarray]:
    """A slot with a score."""
    policy = resolved(score=score, references=References(top1_mean=0.7, entropy_mean=1.3), **fields)
    ints, floats = np.zeros(layout.N_INTS, np.int32), np.zeros(layout.N_FLOATS)
    ints[: layout.PHASE], floats[: layout.BUDGET] = policy_columns(
        policy, thinks=False, limit=100, min_end=0, grammar=False, similarity=True, stop_ids={}, default_stop=3,
        prompt_len=1, epoch=1,
    )  # fmt: skip
    return ints, floats


@settings(deadline=None, max_examples=300)
@given(
    weights, weights, weights, weights, weights, weights, features, features, st.floats(-1, 1), st.integers(0, 10**6)
)
def test_the_score_is_the_profiles(
    bias: float,
    a: float,
    b: float,
    c: float,
    d: float,
    e: float,
    top1: float,
    entropy: float,
    cosine: float,
    tokens: int,
) -> None:
    """The device's logit gives `Score.value` within 1e-12."""
    score = Score(bias=bias, relative_confidence=a, relative_entropy=b, similarity=c, end_margin=d, length=e)
    ours = scored(score, top1=top1, entropy=entropy, similarity=cosine, margin=entropy, tokens=tokens)
    theirs = score.value(
        relative_confidence=top1 / 0.7,
        relative_entropy=entropy / 1.3,
        similarity=cosine,
        end_margin=entropy,
        tokens=tokens,
    )
    assert ours == pytest.approx(theirs, abs=1e-12)


@pytest.mark.parametrize("name", ["relative_confidence", "relative_entropy", "similarity", "end_margin"])
def test_an_undefined_feature_matters_only_with_a_weight(name: str) -> None:
    """NaN without weight is nothing, with a weight the score is undefined."""
    values = {"top1": 0.5, "entropy": 0.5, "similarity": 0.5, "margin": 0.5, "tokens": 9}
    key = {"relative_confidence": "top1", "relative_entropy": "entropy", "end_margin": "margin"}.get(name, name)
    values[key] = math.nan
    assert math.isfinite(scored(Score(bias=0.5), **values))
    assert math.isnan(scored(Score(bias=0.5, **{name: 0.1}), **values))


def test_an_undefined_score_interrupts_a_streak() -> None:
    """Confident, undefined, confident, confident: only the last two are in a row."""
    ints, floats = columns(Score(bias=3.0, similarity=0.1), confident_threshold=0.9, patience=2)
    fired = []
    for similarity in (0.5, math.nan, 0.5, 0.5):
        ints[layout.UNIT_STATS] = 1
        fired.append(PLAIN["scored"](ints, 0, floats, 0, np.float64(similarity)))
    assert fired == [0, 0, 0, RC_CONFIDENT]


def test_a_unit_that_nobody_measured_leaves_the_streak_as_it_is() -> None:
    """Every second unit without statistics: the others still agree one after the other."""
    request = play(
        [*([*W[:5], BLANK] * 6), EOS], toy_table(thinks=False), score=Score(bias=3.0), confident_threshold=0.9,
        patience=2, stats=lambda p: (math.nan,) * 4 if p // 6 % 2 else (0.5, 1.0, 1.0, 1.0), max_tokens=40,
    )  # fmt: skip
    assert request.at(O_DECIDED) == [18]


@settings(deadline=None, max_examples=200)
@given(st.floats(-6, 6), st.floats(0.001, 0.999))
def test_thresholds_in_probability_are_compared_as_logits(z: float, threshold: float) -> None:
    """score >= threshold as probabilities is the device's comparison of logits."""
    probability = 1 / (1 + math.exp(-z))
    if abs(probability - threshold) < 1e-12:
        return
    ints, floats = columns(Score(bias=z), confident_threshold=threshold, patience=1)
    ints[layout.UNIT_STATS] = 1
    fired = PLAIN["scored"](ints, 0, floats, 0, np.float64(math.nan)) == RC_CONFIDENT
    assert fired == (probability >= threshold)


@pytest.mark.parametrize(("threshold", "fires"), [(0.0, True), (1.0, False), (None, False)])
def test_thresholds_at_the_ends(threshold: float | None, fires: bool) -> None:
    """0 always fires, 1 never, none is off."""
    ints, floats = columns(Score(bias=700.0), confident_threshold=threshold, patience=1)
    ints[layout.UNIT_STATS] = 1
    assert (PLAIN["scored"](ints, 0, floats, 0, np.float64(0.0)) == RC_CONFIDENT) == fires


def test_streaks_count_agreement_in_a_row() -> None:
    """The patience is reached at its count and stays reached until a disagreement."""
    ints = np.zeros(layout.N_INTS, np.int32)
    ints[layout.PATIENCE] = 3
    agrees = [True, True, False, True, True, True, True, False]
    reached = [PLAIN["streak"](ints, 0, layout.LOW_STREAK, a) for a in agrees]
    assert reached == [0, 0, 0, 0, 0, 1, 1, 0]


def test_a_unit_without_statistics_is_not_scored() -> None:
    """Units of forced or unmeasured tokens alone say nothing."""
    request: Request = play(
        [*W[:5], BLANK] * 4, toy_table(thinks=False), score=Score(bias=9.0), confident_threshold=0.5, patience=1,
        stats=lambda p: (math.nan,) * 4, max_tokens=24,
    )  # fmt: skip
    assert request.forced == []

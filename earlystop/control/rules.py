"""Rules 2, 3, 4 and 7: what the signals say about going on (portable source).

Undefined signals (NaN) give no evidence: they neither raise a streak nor fill a window.
"""

from __future__ import annotations

from typing import Any

from earlystop.control.layout import (
    CONFIDENT_AT,
    CONFIDENT_STREAK,
    E_BUSY,
    E_CYCLE,
    E_LOOP,
    E_STRICT,
    FLOOR,
    HOPELESS_AT,
    HOPELESS_STREAK,
    LAST_CONFIDENCE,
    LAST_ENTROPY,
    LAST_MARGIN,
    LAST_NOVELTY,
    LAST_SCORE,
    LAST_SIMILARITY,
    LOW_STREAK,
    NOVELTY,
    PATIENCE,
    RC_CONFIDENT,
    RC_CONVERGED,
    RC_HOPELESS,
    RC_LOW_CONFIDENCE,
    RC_REPETITION,
    REF_ENTROPY,
    REF_TOP1,
    REPETITION,
    SIMILAR_STREAK,
    SIMILARITY,
    TOKENS,
    UNIT_ENTROPY,
    UNIT_STATS,
    UNIT_TOP1,
    UNITS,
    W_BIAS,
    W_CONFIDENCE,
    W_ENTROPY,
    W_LENGTH,
    W_MARGIN,
    W_SIMILARITY,
    WINDOW,
    WINDOW_ENTROPY,
    WINDOW_N,
    WINDOW_TOP1,
)
from earlystop.control.portable import f64, load, real, store


def log1p(count: Any) -> Any:
    """Natural logarithm of 1 + count, count >= 0, in float64.

    By halving and a series, not by a math library: numba, Triton and Python link different ones, and the
    last bit must not depend on which. ln x = 2 artanh((x-1)/(x+1)); after halving 1 <= x < 2, so the 17
    terms leave less than 1e-17.
    """
    x = f64(count) + real(1.0)
    exponent = real(0.0)
    while x >= 2.0:
        x = x * 0.5
        exponent = exponent + 1.0
    z = (x - 1.0) / (x + 1.0)
    square = z * z
    term = z
    total = real(0.0)
    k = real(1.0)
    while k < 34.0:
        total = total + term / k
        term = term * square
        k = k + 2.0
    return exponent * real(0.6931471805599453) + real(2.0) * total


def streak(ints: Any, base: Any, column: Any, agrees: Any) -> Any:
    """Counts how often in a row a rule agreed; returns 1 when its patience is reached."""
    n = 0
    if agrees:
        n = load(ints, base + column) + 1
    store(ints, base + column, n)
    reached = 0
    if n >= load(ints, base + PATIENCE):
        reached = 1
    return reached


def take_statistics(ints: Any, base: Any, floats: Any, fbase: Any, top1: Any, entropy: Any) -> Any:
    """Adds one valid statistic to the open window and unit; RC_LOW_CONFIDENCE when rule 2 fires, else 0.

    Windows are disjoint and undefined until full (Fu et al., DeepConf, arXiv 2508.15260, uses sliding ones).
    """
    reason = 0
    store(ints, base + UNIT_STATS, load(ints, base + UNIT_STATS) + 1)
    store(floats, fbase + UNIT_TOP1, load(floats, fbase + UNIT_TOP1) + top1)
    store(floats, fbase + UNIT_ENTROPY, load(floats, fbase + UNIT_ENTROPY) + entropy)
    n = load(ints, base + WINDOW_N) + 1
    top1_sum = load(floats, fbase + WINDOW_TOP1) + top1
    entropy_sum = load(floats, fbase + WINDOW_ENTROPY) + entropy
    if n >= load(ints, base + WINDOW):
        mean = top1_sum / f64(n)
        store(floats, fbase + LAST_CONFIDENCE, mean)
        store(floats, fbase + LAST_ENTROPY, entropy_sum / f64(n))
        low = mean / load(floats, fbase + REF_TOP1) < load(floats, fbase + FLOOR)
        if streak(ints, base, LOW_STREAK, low) == 1:
            reason = RC_LOW_CONFIDENCE
        n = 0
        top1_sum = top1_sum * 0.0
        entropy_sum = entropy_sum * 0.0
    store(ints, base + WINDOW_N, n)
    store(floats, fbase + WINDOW_TOP1, top1_sum)
    store(floats, fbase + WINDOW_ENTROPY, entropy_sum)
    return reason


def converged(ints: Any, base: Any, floats: Any, fbase: Any, event: Any, similarity: Any) -> Any:
    """Rule 3 at a unit boundary: RC_CONVERGED or 0. Units that held code, JSON or a tool call do not count."""
    reason = 0
    if similarity == similarity:
        store(floats, fbase + LAST_SIMILARITY, similarity)
    alike = (similarity > load(floats, fbase + SIMILARITY)) & ((event & E_STRICT) == 0)
    stale = load(floats, fbase + LAST_NOVELTY) <= load(floats, fbase + NOVELTY)
    if (streak(ints, base, SIMILAR_STREAK, alike) == 1) & stale:
        reason = RC_CONVERGED
    return reason


def weighted(floats: Any, fbase: Any, column: Any, feature: Any) -> Any:
    """Weight times feature; an undefined feature without weight does not matter."""
    term = real(0.0)
    weight = load(floats, fbase + column)
    if weight != 0.0:
        term = weight * feature
    return term


def scored(ints: Any, base: Any, floats: Any, fbase: Any, similarity: Any) -> Any:
    """Rule 4 at a unit boundary: RC_CONFIDENT, RC_HOPELESS or 0.

    The score is a logistic model's linear part, so the certified thresholds are compared on the logit scale.
    Undefined features leave it undefined, which interrupts both streaks.
    """
    n = load(ints, base + UNIT_STATS)
    size = real(1.0)
    if n > 0:
        size = f64(n)
    top1 = load(floats, fbase + UNIT_TOP1) / size
    entropy = load(floats, fbase + UNIT_ENTROPY) / size
    score = load(floats, fbase + W_BIAS)
    score = score + weighted(floats, fbase, W_CONFIDENCE, top1 / load(floats, fbase + REF_TOP1))
    score = score + weighted(floats, fbase, W_ENTROPY, entropy / load(floats, fbase + REF_ENTROPY))
    score = score + weighted(floats, fbase, W_SIMILARITY, similarity)
    score = score + weighted(floats, fbase, W_MARGIN, load(floats, fbase + LAST_MARGIN))
    score = score + weighted(floats, fbase, W_LENGTH, log1p(load(ints, base + TOKENS)))
    reason = 0
    if n > 0:
        store(floats, fbase + LAST_SCORE, score)
        hopeless = streak(ints, base, HOPELESS_STREAK, score <= load(floats, fbase + HOPELESS_AT))
        confident = streak(ints, base, CONFIDENT_STREAK, score >= load(floats, fbase + CONFIDENT_AT))
        if hopeless == 1:
            reason = RC_HOPELESS
        if confident == 1:
            reason = RC_CONFIDENT
    return reason


def at_unit_end(ints: Any, base: Any, floats: Any, fbase: Any, event: Any, similarity: Any) -> Any:
    """Rules 3 and 4 where a unit ends; starts the next unit's statistics."""
    store(ints, base + UNITS, load(ints, base + UNITS) + 1)
    reason = converged(ints, base, floats, fbase, event, similarity)
    by_score = scored(ints, base, floats, fbase, similarity)
    if by_score > 0:
        reason = by_score
    store(ints, base + UNIT_STATS, 0)
    store(floats, fbase + UNIT_TOP1, real(0.0))
    store(floats, fbase + UNIT_ENTROPY, real(0.0))
    return reason


def repetition(ints: Any, base: Any, event: Any) -> Any:
    """Rule 7: RC_REPETITION or 0; inside code, JSON and tool calls only the long count."""
    reason = 0
    cycles = ((event & E_CYCLE) > 0) & ((event & E_BUSY) == 0)
    if (load(ints, base + REPETITION) == 1) & (cycles | ((event & E_LOOP) > 0)):
        reason = RC_REPETITION
    return reason


def rest(ints: Any, base: Any) -> None:
    """Clears the streaks: rules 2 to 4 rest while the model answers and begin anew after."""
    store(ints, base + LOW_STREAK, 0)
    store(ints, base + SIMILAR_STREAK, 0)
    store(ints, base + CONFIDENT_STREAK, 0)
    store(ints, base + HOPELESS_STREAK, 0)

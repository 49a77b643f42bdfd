"""Rule 1: what was spent, the one adaptation of the budget, the warning (portable source)."""

from __future__ import annotations

from typing import Any

from earlystop.control.closing import run_again
from earlystop.control.layout import (
    ADAPT,
    ADAPT_ENTROPY,
    ADAPT_N,
    ADAPT_WINDOW,
    ADAPTED,
    BUDGET,
    E_SHUT,
    E_TAG,
    E_THINK,
    EXTRA,
    O_ADJUSTED,
    O_WARNING,
    OUR_CLOSE,
    PHASE,
    PHASE_ENDING,
    RC_BUDGET,
    REASON,
    REASONING,
    REF_ENTROPY,
    ROOM_UNTIL,
    SCOPE,
    THINKING,
    TOKENS,
    USED,
    WARN_AT,
    WARNED,
)
from earlystop.control.portable import f64, load, real, store

# The published adaptation, to the digit: entropy over 1.2 times the reference adds 30 %, under 0.7 takes 20 %.
ENTROPY_HIGH, ENTROPY_LOW = 1.2, 0.7
BUDGET_UP, BUDGET_DOWN = 1.3, 0.8


def spend(ints: Any, base: Any, floats: Any, fbase: Any, event: Any, cost: Any, shut_len: Any) -> None:
    """Counts one committed token and adds its cost where it lies in the budget's scope.

    Thinking tokens exclude the tags: the leading tokens of a closing tag of several tokens counted as
    thinking until the tag was whole, and are taken back here (at this token's cost).
    """
    store(ints, base + TOKENS, load(ints, base + TOKENS) + 1)
    used = load(floats, fbase + USED)
    thinking = 0
    if (event & E_THINK) > 0:
        thinking = 1
    if ((event & E_SHUT) > 0) & ((event & E_TAG) > 0):
        thinking = 1 - shut_len
    store(ints, base + REASONING, load(ints, base + REASONING) + thinking)
    if load(ints, base + SCOPE) == 1:
        used = used + cost * f64(thinking)
    else:
        used = used + cost
    store(floats, fbase + USED, used)


def adapt_budget(ints: Any, base: Any, floats: Any, fbase: Any, entropy: Any) -> Any:
    """Once, after ADAPT_WINDOW valid statistics: scales the budget by the mean entropy; O_ADJUSTED or 0."""
    bits = 0
    reference = load(floats, fbase + REF_ENTROPY)
    if (load(ints, base + ADAPT) == 1) & (load(ints, base + ADAPTED) == 0) & (reference == reference):
        n = load(ints, base + ADAPT_N) + 1
        total = load(floats, fbase + ADAPT_ENTROPY) + entropy
        store(ints, base + ADAPT_N, n)
        store(floats, fbase + ADAPT_ENTROPY, total)
        if n >= load(ints, base + ADAPT_WINDOW):
            store(ints, base + ADAPTED, 1)
            mean = total / f64(n)
            budget = load(floats, fbase + BUDGET)
            scaled = budget
            if mean > real(ENTROPY_HIGH) * reference:
                scaled = budget * real(BUDGET_UP)
            if mean < real(ENTROPY_LOW) * reference:
                scaled = budget * real(BUDGET_DOWN)
            if scaled != budget:
                store(floats, fbase + BUDGET, scaled)
                bits = O_ADJUSTED
    return bits


def foresee_budget(ints: Any, base: Any, floats: Any, fbase: Any, depth: Any) -> None:
    """On the copy of a slot that plans drafts: takes the budget for grown where their statistics may let it grow.

    A stop comes a few tokens late then, like that of any rule that waits for statistics, and never early.
    """
    reference = load(floats, fbase + REF_ENTROPY)
    open_yet = (load(ints, base + ADAPT) == 1) & (load(ints, base + ADAPTED) == 0) & (reference == reference)
    if open_yet & (load(ints, base + ADAPT_N) + depth > load(ints, base + ADAPT_WINDOW)):
        store(floats, fbase + BUDGET, load(floats, fbase + BUDGET) * real(BUDGET_UP))


def take_extra(ints: Any, base: Any, floats: Any, fbase: Any) -> Any:
    """Takes in budget that was added from outside: re-arms the warning, calls off an ending for the budget."""
    bits = 0
    extra = load(floats, fbase + EXTRA)
    if extra > 0.0:
        store(floats, fbase + EXTRA, extra * 0.0)
        budget = load(floats, fbase + BUDGET) + extra
        store(floats, fbase + BUDGET, budget)
        store(ints, base + WARNED, 0)
        bits = O_ADJUSTED
        ending = (load(ints, base + PHASE) == PHASE_ENDING) & (load(ints, base + REASON) == RC_BUDGET)
        if ending & (load(floats, fbase + USED) < budget):
            run_again(ints, base)
    return bits


def warn(ints: Any, base: Any, floats: Any, fbase: Any) -> Any:
    """O_WARNING the first time that more than `warn_at` of the budget is used, else 0."""
    bits = 0
    mark = load(floats, fbase + WARN_AT) * load(floats, fbase + BUDGET)
    if (load(ints, base + WARNED) == 0) & (load(floats, fbase + USED) > mark):
        store(ints, base + WARNED, 1)
        bits = O_WARNING
    return bits


def exhausted(ints: Any, base: Any, floats: Any, fbase: Any) -> Any:
    """1 when the budget binds now.

    In scope `thinking` it rests while the thinking is closed. In scope `response`, an answer that follows a
    close of ours may run for its answer room before the budget binds again.
    """
    binds = 0
    used = load(floats, fbase + USED)
    if used >= load(floats, fbase + BUDGET):
        binds = 1
    if (load(ints, base + SCOPE) == 1) & (load(ints, base + THINKING) == 0):
        binds = 0
    if (load(ints, base + OUR_CLOSE) == 1) & (load(ints, base + THINKING) == 0):
        if used < load(floats, fbase + ROOM_UNTIL):
            binds = 0
    return binds

"""From a resolved policy to the policy columns of a slot."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from earlystop.control import layout
from earlystop.resolved import Resolved

INT32_MAX = 2**31 - 1
_FINISH = {"auto": layout.FINISH_AUTO, "close_thinking": layout.FINISH_CLOSE, "end": layout.FINISH_END}


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _logit(probability: float | None) -> float:
    """The score's threshold on the logit scale; NaN where there is none, which no comparison passes."""
    if probability is None:
        return math.nan
    if probability <= 0.0:
        return -math.inf
    return math.inf if probability >= 1.0 else math.log(probability / (1.0 - probability))


def policy_columns(
    policy: Resolved,
    *,
    thinks: bool,
    limit: int,
    min_end: int,
    grammar: bool,
    similarity: bool,
    stop_ids: Mapping[int, int],
    default_stop: int,
    prompt_len: int,
    epoch: int,
) -> tuple[np.ndarray[Any, np.dtype[np.int32]], np.ndarray[Any, np.dtype[np.float64]]]:
    """The host-written columns of a slot: int32 [PHASE] and float64 [BUDGET].

    Args:
        policy: the resolved request.
        thinks: whether the tokenizer has thinking tags; `auto` budgets count thinking tokens then.
        limit: most tokens the request can generate.
        min_end: the request's own min_tokens, before which it does not end.
        grammar: whether the request has structured outputs.
        similarity: whether unit similarity can be had.
        stop_ids: token id per reason code.
        default_stop: token id of reasons that `stop_ids` lacks.
        prompt_len: tokens of the prompt.
        epoch: the slot's admission counter.
    """
    ints = np.zeros(layout.PHASE, np.int32)
    mode = layout.MODE_ON
    if policy.mode == "observe":
        mode |= layout.MODE_OBSERVE
    elif policy.audited:
        mode |= layout.MODE_AUDIT
    ints[layout.MODE] = mode
    scope = policy.budget_scope
    ints[layout.SCOPE] = int(scope == "thinking" or (scope == "auto" and thinks))
    for column, value in (
        (layout.MIN_TOKENS, policy.min_tokens),
        (layout.WINDOW, policy.window),
        (layout.PATIENCE, policy.patience),
        (layout.GRACE, policy.grace),
        (layout.HARD_GRACE, policy.hard_grace),
        (layout.ADAPT, int(policy.adapt)),
        (layout.ADAPT_WINDOW, policy.adapt_window),
        (layout.ANSWER_ROOM, policy.answer_room if thinks else 0),
        (layout.LIMIT, limit),
        (layout.MIN_END, min_end),
        (layout.FINISH, _FINISH[policy.finish]),
        (layout.HAS_GRAMMAR, int(grammar)),
        (layout.NEEDS_SIMILARITY, int(similarity)),
        (layout.REPETITION, int(policy.repetition)),
        (layout.EPOCH, epoch),
        (layout.PROMPT_LEN, prompt_len),
    ):
        ints[column] = min(int(value), INT32_MAX)
    ints[layout.STOP_IDS : layout.STOP_IDS + layout.N_REASONS] = default_stop
    for code, token in stop_ids.items():
        ints[layout.STOP_IDS + code] = token

    floats = np.full(layout.BUDGET, math.nan, np.float64)
    floats[layout.BUDGET0] = math.inf if policy.budget is None else policy.budget
    floats[layout.WARN_AT] = policy.warn_at
    floats[layout.FLOOR] = _or_nan(policy.confidence_floor)
    floats[layout.SIMILARITY] = _or_nan(policy.similarity)
    floats[layout.NOVELTY] = policy.novelty
    floats[layout.EXTRA] = 0.0
    if policy.references is not None:
        floats[layout.REF_TOP1] = policy.references.top1_mean
        floats[layout.REF_ENTROPY] = policy.references.entropy_mean
    floats[layout.W_CONFIDENCE : layout.W_BIAS + 1] = 0.0
    if policy.score is not None:
        score = policy.score
        floats[layout.W_CONFIDENCE] = score.relative_confidence
        floats[layout.W_ENTROPY] = score.relative_entropy
        floats[layout.W_SIMILARITY] = score.similarity
        floats[layout.W_MARGIN] = score.end_margin
        floats[layout.W_LENGTH] = score.length
        floats[layout.W_BIAS] = score.bias
        floats[layout.CONFIDENT_AT] = _logit(policy.confident_threshold)
        floats[layout.HOPELESS_AT] = _logit(policy.hopeless_threshold)
    return ints, floats

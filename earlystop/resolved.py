"""The outcome of resolution: one request's policy with every value concrete."""

from __future__ import annotations

import hashlib
from typing import Any, Literal

import msgspec

from earlystop.profile import References, Score


class Resolved(msgspec.Struct, frozen=True, kw_only=True):
    """One request's policy with every value concrete. A rule whose threshold is None is off."""

    mode: Literal["observe", "active"]
    """``observe`` decides everything and touches nothing."""
    policy: str
    """The preset or profile asked for."""
    profile: str | None = None
    """Name of the profile in use, None without one."""
    task: str = "default"
    id: str = ""
    """Stream id; empty where the request brought none."""
    audited: bool = False
    """Signal rules (2 to 5 and 7) only observe; budget, limits and control bind."""
    budget: float | None = None
    """Cost units; 0 is a budget of zero, None is none."""
    budget_scope: Literal["auto", "thinking", "response"] = "auto"
    """``auto`` only where the identity does not say whether the tokenizer has thinking tags."""
    warn_at: float = 0.8
    adapt: bool = False
    """Whether the budget adapts; needs `references`."""
    adapt_window: int = 100
    min_tokens: int = 64
    window: int = 32
    confidence_floor: float | None = None
    """Rule 2; None without references."""
    similarity: float | None = None
    """Rule 3."""
    novelty: float = 0.1
    patience: int = 2
    repetition: bool = False
    """Rule 7."""
    references: References | None = None
    score: Score | None = None
    """Rule 4's score, None where neither threshold is set."""
    confident_threshold: float | None = None
    hopeless_threshold: float | None = None
    finish: Literal["auto", "close_thinking", "end"] = "auto"
    grace: int = 64
    hard_grace: int = 2048
    answer_room: int = 0
    max_loss: float | None = None
    """The certified loss in use, None without one."""
    audit: float = 0.0
    guarantee: dict[str, Any] | None = None
    """The certified cell as JSON types, with the profile's name; None where nothing is guaranteed."""
    no_guarantee: str | None = None
    """Why `guarantee` is None."""
    warnings: tuple[str, ...] = ()
    """What the user should hear: rules that rest, keys without effect, profiles that do not fit."""

    @property
    def signal_rules(self) -> bool:
        """Whether any rule but budget, limits and control can stop this request."""
        thresholds = (self.confidence_floor, self.similarity, self.confident_threshold, self.hopeless_threshold)
        return self.repetition or any(threshold is not None for threshold in thresholds)


def is_audited(stream_id: str, share: float) -> bool:
    """Whether a stream belongs to the audited share: a stable hash of its id, the same on every rank and day.

    Args:
        stream_id: The stream id; an empty one is never audited.
        share: The audited share, [0, 1].
    """
    digest = hashlib.blake2b(stream_id.encode(), digest_size=8, person=b"earlystop-audit").digest()
    return bool(stream_id) and int.from_bytes(digest, "big") < share * 2**64

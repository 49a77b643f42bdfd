"""What is served, what a profile was made on, and whether the two are the same."""

from __future__ import annotations

import math
from typing import Annotated, Any, NamedTuple

import msgspec

TEMPERATURE_TOLERANCE = 0.05
"""A profile speaks for temperatures this close to its own (design: §10, *fits*)."""

NonEmpty = Annotated[str, msgspec.Meta(min_length=1)]


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sampling parameters other than the temperature; defaults are vLLM's."""

    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0


class Provenance(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a profile comes from: all that its numbers depend on."""

    model: NonEmpty
    """The model's name or path, for people; `weights_hash` is what is compared."""
    weights_hash: NonEmpty
    """Fingerprint of the weights."""
    tokenizer_fingerprint: NonEmpty
    """Fingerprint of vocabulary, merges and special tokens."""
    temperature: Annotated[float, msgspec.Meta(ge=0)]
    sampling: Sampling = Sampling()
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Most tokens a full trace could take; None is up to the context's end."""
    revision: str | None = None
    runner: str | None = None
    """``v1`` or ``v2``; noted, not compared."""
    dtype: str | None = None
    """Noted, not compared."""
    chat_template_hash: str | None = None
    close_text_hash: str | None = None
    quantisation: str | None = None
    speculation: str | None = None
    """The speculative method, None without drafts."""
    decision_code_hash: str | None = None
    """Fingerprint of the code that decides."""
    seed: int | None = None
    data_hash: str | None = None
    """Fingerprint of the calibration questions and traces."""
    created: str | None = None
    """ISO 8601, UTC."""
    attempts: tuple[dict[str, Any], ...] = ()
    """Every attempt to certify on this data, the failed ones included."""
    notes: str | None = None


class ServedIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """What is served to one request; None is unknown or absent."""

    model: str = ""
    weights_hash: str | None = None
    tokenizer_fingerprint: str | None = None
    lora: str | None = None
    """Name of the LoRA adapter, None without one."""
    temperature: float = 1.0
    sampling: Sampling = Sampling()
    max_tokens: int | None = None
    runner: str | None = None
    dtype: str | None = None
    chat_template_hash: str | None = None
    close_text_hash: str | None = None
    quantisation: str | None = None
    speculation: str | None = None
    decision_code_hash: str | None = None
    has_thinking: bool | None = None
    """Whether the tokenizer has thinking tags, None if unknown."""


class Fit(NamedTuple):
    """Whether a profile may be used."""

    references_ok: bool
    """References and score inputs may be used."""
    certified_ok: bool
    """Certified cells may be used; implies `references_ok`."""
    reasons: tuple[str, ...] = ()
    """Why not, one sentence each; empty if both are ok."""
    notes: tuple[str, ...] = ()
    """Differences that matter to neither."""


_CERTIFIED = (
    ("max_tokens", "max_tokens"),
    ("chat_template_hash", "chat template"),
    ("close_text_hash", "close text"),
    ("quantisation", "quantisation"),
    ("speculation", "speculative decoding"),
    ("decision_code_hash", "decision code"),
)
_NOTED = (("runner", "runner"), ("dtype", "dtype"))


def compare(made_on: Provenance, served: ServedIdentity | None) -> Fit:
    """Whether a profile made on one thing speaks for another (design: §10).

    References need the same weights and tokenizer, no LoRA and a temperature within `TEMPERATURE_TOLERANCE`; certified
    cells in addition the same sampling parameters, max_tokens, chat template, close text, quantisation, speculation
    and decision code. Unknown weights or tokenizer are different ones.
    """
    if served is None:
        return Fit(False, False, ("the served model is not known here",))
    first = []
    for field, name in (("weights_hash", "model weights"), ("tokenizer_fingerprint", "tokenizer")):
        if getattr(made_on, field) != getattr(served, field):
            first.append(f"{name} differ: profile {getattr(made_on, field)}, served {getattr(served, field)}")
    if served.lora is not None:
        first.append(f"a LoRA adapter is active: {served.lora}")
    if not abs(made_on.temperature - served.temperature) <= TEMPERATURE_TOLERANCE + 1e-9:
        first.append(
            f"temperature differs: profile {made_on.temperature:g}, served {served.temperature:g} "
            f"(±{TEMPERATURE_TOLERANCE} is allowed)"
        )
    second = [
        f"{name} differs: profile {getattr(made_on, field)}, served {getattr(served, field)}"
        for field, name in _CERTIFIED
        if getattr(made_on, field) != getattr(served, field)
    ]
    for field in Sampling.__struct_fields__:
        ours, theirs = getattr(made_on.sampling, field), getattr(served.sampling, field)
        if not math.isclose(ours, theirs, rel_tol=1e-6, abs_tol=1e-9):
            second.append(f"{field} differs: profile {ours:g}, served {theirs:g}")
    notes = tuple(
        f"{name} differs: profile {getattr(made_on, field)}, served {getattr(served, field)}"
        for field, name in _NOTED
        if getattr(made_on, field) != getattr(served, field)
    )
    return Fit(not first, not first and not second, tuple(first + second), notes)

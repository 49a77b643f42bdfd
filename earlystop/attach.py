"""Opting a request in: a policy put into sampling parameters, without touching the originals.

vLLM is not imported: the new object is built by the class of the one that was given, so that its own validation runs.
"""

from __future__ import annotations

import copy
import uuid
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from earlystop.errors import ConfigError
from earlystop.policy import PREFIX, Policy
from earlystop.reserved import reserved_stop_ids

Params = TypeVar("Params")
"""vLLM's ``SamplingParams``."""


def attach(
    params: Params,
    policy: str | Policy | None = None,
    *,
    task: str | None = None,
    budget: float | None = None,
    tokenizer: Any = None,
    **fields: Any,
) -> Params:
    """New sampling parameters that ask for early stopping.

    Args:
        params: vLLM's ``SamplingParams``; never changed.
        policy: A preset or profile name, or a `Policy`; None leaves the choice to the server's default.
        task: The profile's task.
        budget: Cost units (tokens unless a cost table is loaded); 0 is a budget of zero, None is none.
        tokenizer: The served tokenizer. With it, unused ids are listed in ``stop_token_ids``, so that ``stop_reason``
            tells why; ``token_ids`` then end with such an id.
        **fields: Any other field of `Policy`; what is given here wins over the `Policy`, which wins over keys already
            in ``params.extra_args``.

    Returns:
        A new object of the same class, with a stream id of its own unless one is given.

    Raises:
        ConfigError: An unknown field, a value that is not allowed, or something that is no ``SamplingParams``.
    """
    asked = _asked(params, policy, {**fields, "task": task, "budget": budget})
    return _rebuilt(params, asked if asked.id else Policy(id=uuid.uuid4().hex).over(asked), tokenizer)


def attach_each(
    params: Params,
    n: int,
    policy: str | Policy | None = None,
    *,
    task: str | None = None,
    budget: float | None = None,
    tokenizer: Any = None,
    **fields: Any,
) -> list[Params]:
    """`n` copies with a stream id each, for the prompts of an offline batch.

    Args:
        params: As for `attach`.
        n: How many, at least 0.
        policy: As for `attach`.
        task: As for `attach`.
        budget: As for `attach`.
        tokenizer: As for `attach`.
        **fields: As for `attach`; an `id` given here becomes ``id-0``, ``id-1``, ...

    Returns:
        `n` new objects that share nothing.

    Raises:
        ConfigError: As for `attach`, or `n` is no whole number of at least 0.
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 0:
        raise ConfigError(f"n={n!r} is not allowed: give a whole number of at least 0", field="n")
    asked = _asked(params, policy, {**fields, "task": task, "budget": budget})
    ids = [f"{asked.id}-{i}" if asked.id else uuid.uuid4().hex for i in range(n)]
    return [_rebuilt(params, Policy(id=stream_id).over(asked), tokenizer) for stream_id in ids]


def _asked(params: Any, policy: str | Policy | None, fields: Mapping[str, Any]) -> Policy:
    """The policy that the arguments come to."""
    if not (isinstance(params, msgspec.Struct) and hasattr(params, "extra_args") and hasattr(params, "stop_token_ids")):
        raise ConfigError(
            f"params is {type(params).__name__}, not SamplingParams: early stopping needs vLLM's SamplingParams "
            "(beam search and pooling have no single stream to stop)",
            field="params",
        )
    if policy is not None and not isinstance(policy, str | Policy):
        raise ConfigError(
            f"policy={policy!r} ({type(policy).__name__}) is not allowed: give the name of a preset or profile, or "
            "a Policy",
            field="policy",
        )
    named = policy if isinstance(policy, Policy) else Policy(policy=policy)
    asked = Policy.from_fields(fields).over(named).over(Policy.from_extra_args(params.extra_args) or Policy())
    asked.refuse_serving_fields()
    return asked


def _rebuilt(params: Params, asked: Policy, tokenizer: Any) -> Params:
    """The same parameters with our keys, through the class's own constructor.

    Every field is handed over as it stands, derived ones too: the constructor validates, and its derivations leave
    values that are derived already as they are.
    """
    values = {name: copy.deepcopy(getattr(params, name)) for name in params.__struct_fields__}  # type: ignore[attr-defined]
    others = {key: value for key, value in (values["extra_args"] or {}).items() if not str(key).startswith(PREFIX)}
    values["extra_args"] = {**others, **asked.to_extra_args()}
    if tokenizer is not None and asked.policy not in ("off", "observe"):
        ids = reserved_stop_ids(tokenizer).values()
        values["stop_token_ids"] = list(dict.fromkeys([*(values["stop_token_ids"] or []), *ids]))
    return type(params)(**values)

"""Requests that opt in, with their signals: what a test of the plugin asks an engine for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from support.engines import Engine


def run(
    engine: Engine, prompts: Sequence[Any], sampling: dict[str, Any], timeout: float = 300.0, **policy: Any
) -> list[dict[str, Any]]:
    """Generates with the policy attached to every prompt.

    Args:
        engine: A real engine with the plugin.
        prompts: Token ids or texts.
        sampling: `SamplingParams` fields, one dictionary for all.
        timeout: Seconds.
        **policy: Fields of the policy; `policy="classic"` unless given.

    Returns:
        Per prompt: `token_ids, text, finish_reason, stop_reason`, `signals` (plain dictionaries in order) and
        `summary`.
    """
    return engine.call(in_engine, [*prompts], sampling, {"policy": "classic", **policy}, timeout=timeout)


def mixed(engine: Engine, requests: Sequence[tuple[Any, dict[str, Any], dict[str, Any] | None]]) -> list[Any]:
    """Like `run` for one batch of unlike requests: (prompt, sampling, policy fields or None for a plain one)."""
    prompts, sampling, policies = zip(*requests, strict=True)
    return engine.call(in_engine, [*prompts], [*sampling], [*policies])


def in_engine(llm: Any, prompts: list[Any], sampling: Any, policies: Any) -> list[dict[str, Any]]:
    """Runs inside the engine's process."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    import earlystop
    from earlystop.bus import default_endpoint, recall

    sampling = sampling if isinstance(sampling, list) else [sampling] * len(prompts)
    policies = policies if isinstance(policies, list) else [policies] * len(prompts)
    params = []
    for fields, policy in zip(sampling, policies, strict=True):
        known = dict(fields)
        if "structured_outputs" in known:
            known["structured_outputs"] = StructuredOutputsParams(**known["structured_outputs"])
        one = SamplingParams(**known)
        if policy is not None:
            one = earlystop.attach(one, **policy)
        params.append(one)
    prompts = [{"prompt_token_ids": p} if isinstance(p, list) else p for p in prompts]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    opted_in = any(policy is not None for policy in policies)
    signals = recall(default_endpoint()) if opted_in else []
    summaries = earlystop.summarize(outputs, signals)
    found = []
    for output, one in zip(outputs, params, strict=True):
        stream = (one.extra_args or {}).get("earlystop_id")
        mine = [s.to_dict() for s in signals if s.id == stream]
        for choice in output.outputs:
            summary = next(s for s in summaries if s.request_id == output.request_id and s.index == choice.index)
            found.append(
                {
                    "token_ids": list(choice.token_ids),
                    "text": choice.text,
                    "finish_reason": choice.finish_reason,
                    "stop_reason": choice.stop_reason,
                    "index": choice.index,
                    "signals": [s for s in mine if s["index"] in (None, choice.index)],
                    "summary": {name: getattr(summary, name) for name in summary.__struct_fields__},
                }
            )
    return found


def kinds(result: dict[str, Any]) -> list[str]:
    """The kinds of a result's signals, progress and traces left out."""
    return [s["kind"] for s in result["signals"] if s["kind"] not in ("progress", "trace")]

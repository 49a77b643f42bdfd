"""Replaying what `observe` recorded gives the verdicts that the engine gave, token for token; both runners."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from support.engines import Engine
    from support.scripted import ScriptedModel

POLICIES: list[dict[str, Any]] = [
    {},
    {"similarity": 0.9, "novelty": 0.5},
    {"budget": 25, "budget_scope": "response", "grace": 16},
    {"budget": 11, "budget_scope": "response", "grace": 0, "patience": 1},
]


@pytest.mark.parametrize("policy", POLICIES, ids=[str(p) for p in POLICIES])
@pytest.mark.parametrize("key", ["loop", "fresh", "sure"])
def test_replay_equals_online(
    scripted_engine: Engine, scripted: ScriptedModel, key: str, policy: dict[str, Any]
) -> None:
    """The recorded trace under the same policy: the same bits after every token that the worker saw."""
    online, replayed = scripted_engine.call(observe_and_replay, scripted.prompt(key), policy)
    assert replayed == online
    assert online or key == "sure"  # one unit of text, nothing to decide


def observe_and_replay(llm: Any, prompt: list[int], policy: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """Runs inside the engine's process: (kind, tokens, reason) as signalled, and as replayed."""
    from vllm import SamplingParams

    import earlystop
    from earlystop.bus import default_endpoint, recall
    from earlystop.control import layout
    from earlystop.control.params import policy_columns
    from earlystop.control.replay import Trace, replay
    from earlystop.engine.plugin import live_processors
    from earlystop.policy import Policy
    from earlystop.resolve import resolve
    from earlystop.signals import StopReason

    params = earlystop.attach(SamplingParams(temperature=0.0, max_tokens=90), "observe", **policy)
    llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
    stream = params.extra_args["earlystop_id"]
    signals = [s for s in recall(default_endpoint()) if s.id == stream]
    (processor,) = live_processors()
    resolved = resolve(Policy.from_extra_args(params.extra_args), processor.config, {}, processor.served.identity)
    assert resolved is not None
    columns = policy_columns(
        resolved,
        thinks=processor.served.table.thinks,
        limit=90,
        min_end=0,
        grammar=False,
        similarity=True,
        stop_ids={},
        default_stop=3,
        prompt_len=len(prompt),
        epoch=1,
    )
    verdicts = replay(Trace.from_signals(signals), columns, processor.tables)
    named = {"budget_warning": layout.O_WARNING, "would_stop": layout.O_WOULD}
    online = sorted((str(s.kind), int(s.tokens or 0), str(s.reason)) for s in signals if s.kind in named)
    again = sorted(
        (kind, index + 1, str(StopReason.from_code(int(verdicts.reason[index])) if kind == "would_stop" else None))
        for kind, bit in named.items()
        for index, bits in enumerate(verdicts.bits)
        if bits & bit
    )
    progress = [("progress", int(s.tokens or 0)) for s in signals if s.kind == "progress"]
    units = [("progress", index + 1) for index, bits in enumerate(verdicts.bits) if bits & layout.O_PROGRESS]
    # The very last progress is the flush at the end of the stream, wherever it stood.
    return online + [p for p in progress if p in units], again + units

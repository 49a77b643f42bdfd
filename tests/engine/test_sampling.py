"""A forced sequence comes exactly once under every sampling setting, both runners."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from support.opted_in import run

from engine.test_reasoning import closing

if TYPE_CHECKING:
    from support.engines import Engine
    from support.scripted import ScriptedModel

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 1.0, "seed": 1},
    "top_k": {"temperature": 1.0, "top_k": 5, "seed": 1},
    "top_p": {"temperature": 1.3, "top_p": 0.8, "seed": 2},
    "min_p": {"temperature": 1.0, "min_p": 0.2, "seed": 3},
    "penalties": {"temperature": 0.7, "presence_penalty": 1.5, "frequency_penalty": 1.5, "seed": 4},
    "repetition": {"temperature": 1.0, "repetition_penalty": 1.8, "seed": 5},
    "logprobs": {"temperature": 0.0, "logprobs": 3},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_closing_sequence_is_forced_exactly_once(
    scripted_engine: Engine, scripted: ScriptedModel, setting: str
) -> None:
    """One finite logit in the row: nothing that follows in the sampler can undo it."""
    close = closing(scripted_engine)
    sampling = {**SETTINGS[setting], "max_tokens": 4 + len(close) + 1}
    (out,) = run(scripted_engine, [scripted.prompt("reasons_long")], sampling, budget=4, grace=0, answer_room=0)
    tokens = out["token_ids"]
    assert tokens[4 : 4 + len(close)] == close
    assert close[0] not in tokens[:4]


@pytest.mark.parametrize("ban", ["bad_words", "allowed_token_ids", "logit_bias"])
def test_bans_of_the_request_do_not_hold_the_end_back(
    scripted_engine: Engine, scripted: ScriptedModel, ban: str
) -> None:
    """B10: EOS banned by the request; the forced row still has its one finite logit, and never gives token 0."""
    eos = scripted.ids["eos"]
    words = scripted.plan("endless")[:40]
    fields: dict[str, Any] = {
        "bad_words": {"bad_words": ["<|end|>"]},
        "allowed_token_ids": {"allowed_token_ids": sorted(set(words))},
        "logit_bias": {"logit_bias": {eos: -100.0}},
    }[ban]
    sampling = {"temperature": 0.0, "max_tokens": 20, **fields}
    (out,) = run(scripted_engine, [scripted.prompt("endless")], sampling, budget_scope="response", budget=6, grace=0)
    assert out["token_ids"] == [*words[:6], eos]

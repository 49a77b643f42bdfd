"""The tests' own support: scripted plans hold on the real engine, under both runners."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
from support.catalogue import SCRIPTS, WORDS
from support.engines import EngineCallError, EngineDiedError
from support.scripted import Script, Step, entropy_of, gap_for, make_scripted

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.engines import Engine
    from support.scripted import ScriptedModel

GREEDY = {"temperature": 0.0, "max_tokens": 60}
RUNNERS = [pytest.param("v1", id="v1"), pytest.param("v2", id="v2", marks=pytest.mark.v2)]


@pytest.fixture(scope="module", params=RUNNERS)
def plain(request: pytest.FixtureRequest, scripted: ScriptedModel, make_engine: Callable[..., Engine]) -> Engine:
    """The scripted model on plain vLLM, without the plugin: what is tested here is the support alone."""
    return make_engine(scripted, runner=request.param, plugin=False)


def force(llm: Any, prompt: list[int], tokens: dict[int, int], count: int) -> list[int]:
    """Generates greedily one token at a time, putting `tokens` in their places as a processor of ours would."""
    from vllm import SamplingParams

    ids = list(prompt)
    for i in range(count):
        forced = [tokens[i]] if i in tokens else None
        params = SamplingParams(temperature=0.0, max_tokens=1, allowed_token_ids=forced, ignore_eos=True)
        (output,) = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
        ids.extend(output.outputs[0].token_ids)
    return ids[len(prompt) :]


def end_process(llm: Any) -> None:
    """Ends the engine's process at once, as a crash would."""
    import os

    os._exit(7)


def test_every_script_is_followed_greedily(plain: Engine, scripted: ScriptedModel) -> None:
    """In one batch, each prompt is continued with its own plan, position by position, or its answer after the tag."""
    keys = [key for key in SCRIPTS if key not in {"nan", "one_nan", "plus_inf", "all_minus_inf"}]
    outputs = plain.generate([scripted.prompt(key) for key in keys], GREEDY)
    for key, output in zip(keys, outputs, strict=True):
        expected = scripted.expected(key)[:60]
        assert output["token_ids"] == expected, key
        assert output["finish_reason"] == ("stop" if expected[-1] == scripted.ids["eos"] else "length"), key


def test_sampling_at_temperature_one_follows_a_sure_plan(plain: Engine, scripted: ScriptedModel) -> None:
    """The default gap leaves sampling no choice."""
    params = {"temperature": 1.0, "seed": 3, "max_tokens": 10}
    (output,) = plain.generate([scripted.prompt("short")], params)
    assert output["token_ids"] == scripted.plan("short")


def test_plan_goes_on_by_position_after_a_forced_token(plain: Engine, scripted: ScriptedModel) -> None:
    """Tokens that were forced in between change nothing of what follows."""
    got = plain.call(force, scripted.prompt("endless"), {2: 99, 3: 0}, 8)
    plan = scripted.plan("endless")
    assert got == [*plan[:2], 99, 0, *plan[4:8]]


@pytest.mark.parametrize("at", [0, 5, 25])
def test_answer_follows_the_end_tag_wherever_it_stands(plain: Engine, scripted: ScriptedModel, at: int) -> None:
    """A script with an answer gives it right after the end tag, then ends."""
    answer = [step for step in SCRIPTS["reasons"].answer or () if isinstance(step, int)]
    close = scripted.ids["end_think"]
    got = plain.call(force, scripted.prompt("reasons"), {at: close}, at + 1 + len(answer) + 2)
    eos = scripted.ids["eos"]
    assert got == [*scripted.plan("reasons")[:at], close, *answer, eos, eos]


def test_confidence_is_what_the_script_says(plain: Engine, scripted: ScriptedModel) -> None:
    """The engine's log-probabilities show the wanted top-1, and the entropy that goes with it."""
    (output,) = plain.generate([scripted.prompt("sure")], {"temperature": 0.0, "max_tokens": 3, "logprobs": 5})
    assert math.exp(output["logprobs"][1][WORDS[1]]) == pytest.approx(0.97, abs=1e-4)
    assert entropy_of(gap_for(0.97)) == pytest.approx(-0.97 * math.log(0.97) - 0.03 * math.log(0.03 / 1023))


def test_a_nan_row_stays_in_its_place(plain: Engine, scripted: ScriptedModel) -> None:
    """The row before and the rows after it, and its neighbour in the batch, are as scripted."""
    bad, good = plain.generate(
        [scripted.prompt("nan"), scripted.prompt("short")], {"temperature": 0.0, "max_tokens": 10}
    )
    plan = scripted.plan("nan")
    assert bad["token_ids"][:4] == plan[:4]
    assert bad["token_ids"][4] != plan[4]
    assert bad["token_ids"][5:] == plan[5:]
    assert good["token_ids"] == scripted.plan("short")


def test_text_is_decoded_by_a_real_tokenizer(plain: Engine, scripted: ScriptedModel) -> None:
    """Characters split over tokens come out whole, and a chat reaches its script through the template."""
    (output,) = plain.chat([scripted.chat("a15_split_character")], GREEDY)
    assert output["prompt_token_ids"] == scripted.prompt("a15_split_character")
    assert output["text"] == " red fox😀 runs好ď over green"


def test_errors_come_back_with_their_type_and_the_engine_lives(plain: Engine, scripted: ScriptedModel) -> None:
    """A refused request raises here as what it was there; the next one is served."""
    with pytest.raises(EngineCallError, match="max_tokens") as caught:
        plain.generate([scripted.prompt("short")], {"max_tokens": -5})
    assert caught.value.kind.endswith("Error")
    (output,) = plain.generate([scripted.prompt("short")], GREEDY)
    assert output["finish_reason"] == "stop"


def test_each_engine_runs_the_runner_it_was_asked_for(
    make_engine: Callable[..., Engine], scripted: ScriptedModel
) -> None:
    """Facts come from the engine's own configuration."""
    assert make_engine(scripted, runner="v1", plugin=False).facts["v2"] is False
    assert make_engine(scripted, runner="v2", plugin=False).facts["v2"] is True


def test_shared_engines_follow_plans_with_the_plugin_installed(
    scripted_engine: Engine, scripted: ScriptedModel
) -> None:
    """The session's engines load the plugin, which changes nothing for requests that do not ask for it."""
    keys = ["short", "a1_tool_call", "a15_split_character"]
    outputs = scripted_engine.generate([scripted.prompt(key) for key in keys], GREEDY)
    assert [output["token_ids"] for output in outputs] == [scripted.expected(key) for key in keys]


@pytest.mark.slow
@pytest.mark.parametrize("runner", RUNNERS)
def test_asynchronous_scheduling_can_be_kept_on(
    runner: str, make_engine: Callable[..., Engine], scripted: ScriptedModel
) -> None:
    """The CPU platform's switching-off is undone, and plans are followed all the same."""
    engine = make_engine(scripted, runner=runner, plugin=False, env={"FORCE_ASYNC_SCHEDULING": "1"})
    assert engine.facts["async_scheduling"] is True
    outputs = engine.generate([scripted.prompt(key) for key in ("short", "reasons")], GREEDY)
    assert [output["token_ids"] for output in outputs] == [scripted.expected(key) for key in ("short", "reasons")]


def test_a_tag_of_three_pieces_opens_the_answer_too(tmp_path: Path, make_engine: Callable[..., Engine]) -> None:
    """Where `</think>` is no single token, its last piece counts, and the tokenizer encodes it as three."""
    script = Script([11, 12, 20, 21, 22], prompt=[11], answer=[Step(14, topic=1), 3])
    model = make_scripted(tmp_path, {"only": script}, tags="pieces")
    engine = make_engine(model, runner="v1", plugin=False)
    (output,) = engine.generate([model.prompt("only")], GREEDY)
    assert output["token_ids"] == [11, 12, 20, 21, 22, 14, 3]
    (encoded,) = engine.generate(["</think>"], {"max_tokens": 1})
    assert encoded["prompt_token_ids"] == [20, 21, 22]


@pytest.mark.slow
def test_a_dead_engine_is_reported(tmp_path: Path, scripted: ScriptedModel) -> None:
    """A process that is gone raises with its exit code, not a hang."""
    from support.engines import Engine

    with Engine(scripted, plugin=False) as engine, pytest.raises(EngineDiedError, match="exit code 7"):
        engine.call(end_process)


def test_smollm2_answers(smollm2: Path, make_engine: Callable[..., Engine]) -> None:
    """The demo's model loads, has its chat template, and ends its turn by itself."""
    engine = make_engine(smollm2, runner="v1", plugin=False)
    (output,) = engine.chat([[{"role": "user", "content": "What is the capital of France?"}]], GREEDY)
    assert "Paris" in output["text"]
    assert output["finish_reason"] == "stop"
    assert output["stop_reason"] is None

"""Tiny Llama checkpoints whose every next token, and how sure the model is of it, a test can script.

vLLM loads them as ordinary `LlamaForCausalLM` models, under both runners, with its own tokenizer and chat template::

    model = make_scripted(tmp_path, {"talk": Script(prompt=[1], plan=[11, 12, 2, 13, 3])})
    engine = Engine(model)
    engine.generate([model.prompt("talk")], {"temperature": 0.0, "max_tokens": 8})   # token_ids [11, 12, 2, 13, 3]

A plan is followed position by position: generated token number i is `plan[i]`, whatever was sampled or forced before
it. A script with an `answer` changes over to it once the end tag stands in the response, whoever put it there: the
token right after the tag is `answer[0]`. After the plan's or answer's last token the model ends (EOS, for ever).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from support.scripted_weights import Cell, build_weights, config_for
from support.vocabulary import FIRST_SCRIPT, SCRIPT_SLOTS, VOCABULARY_SIZE, Tags, save_tokenizer, token_ids

SURE: Final = 20.0
"""Default logit gap: top-1 is 1 - 2e-6, so that sampling at temperature 1 follows the plan too."""


@dataclass(frozen=True)
class Step:
    """One position of a plan.

    Attributes:
        token: The id that the model prefers here.
        gap: Its logit; all others have `fill` unless `logits` says otherwise. `gap_for` gives that of a wanted top-1.
        logits: More logits, id to value; an entry for `token` replaces its gap. Infinities and NaN are allowed.
        fill: The logit of all ids not named: 0, -inf or NaN (a row that is NaN throughout).
        topic: Direction of the final hidden state: equal topics, equal directions (cosine above .99); None is a new one
            at every position (cosine near 0).
    """

    token: int
    gap: float = SURE
    logits: Mapping[int, float] = field(default_factory=dict)
    fill: float = 0.0
    topic: int | None = None


@dataclass(frozen=True)
class Script:
    """What one prompt is answered with.

    Attributes:
        plan: Ids, or `Step` where more than the id matters.
        prompt: Ids that end the prompt, after the two that choose the script. `[1]` opens a thinking block.
        answer: What follows the end tag; None carries on with the plan by position. A script with an answer must have
            at most one end tag in prompt and response together; what it says after a second one is undefined.
    """

    plan: Sequence[int | Step]
    prompt: Sequence[int] = ()
    answer: Sequence[int | Step] | None = None


@dataclass(frozen=True)
class ScriptedModel:
    """A scripted checkpoint on disk.

    Attributes:
        path: The checkpoint folder, for `LLM(model=str(path))`.
        ids: Token ids by name, see `support.vocabulary.token_ids`.
        scripts: The scripts by key.
        tags: How the thinking tags are tokens.
        dtype: What to run it in. Engines must be told: vLLM takes a float32 checkpoint down to bfloat16 by itself.
    """

    path: Path
    ids: Mapping[str, int]
    scripts: Mapping[str, Script]
    tags: Tags
    dtype: str

    def mark(self, key: str) -> int:
        """The id that chooses a script; it stands second in its prompt."""
        return FIRST_SCRIPT + list(self.scripts).index(key)

    def prompt(self, key: str) -> list[int]:
        """The prompt's token ids. Use it unchanged: a plan's positions are counted from its end."""
        return [self.ids["ref"], self.mark(key), *self.scripts[key].prompt]

    def plan(self, key: str) -> list[int]:
        """The plan's token ids."""
        return [_step(step).token for step in self.scripts[key].plan]

    def expected(self, key: str) -> list[int]:
        """What plain greedy decoding gives: the plan, its answer after the first end tag, and EOS after either."""
        script, plan, end = self.scripts[key], self.plan(key), self.ids["eos"]
        tag = self.ids["end_3"] if self.tags == "pieces" else self.ids["end_think"]
        if script.answer is not None and tag in plan:
            plan = plan[: plan.index(tag) + 1] + [_step(step).token for step in script.answer]
        return plan[: plan.index(end) + 1] if end in plan else [*plan, end]

    def chat(self, key: str) -> list[dict[str, str]]:
        """Messages that render to `prompt(key)` through the chat template, for scripts whose prompt is `[1]`."""
        return [{"role": "user", "content": f"<|script_{list(self.scripts).index(key)}|>"}]


def make_scripted(
    path: Path,
    scripts: Mapping[str, Script | Sequence[int | Step]],
    *,
    tags: Tags = "added",
    dtype: str = "float32",
    max_positions: int = 2048,
) -> ScriptedModel:
    """Writes a scripted checkpoint.

    Args:
        path: The folder to make; it may exist.
        scripts: Scripts by key, at most 512; a bare list of ids is a plan whose prompt is only the script's mark.
        tags: "added" (Qwen's way: single ids that are not special), "special", or "pieces" (`</think>` is three tokens
            and no single id stands for it; its last piece `>` then counts as the tag for answers).
        dtype: The dtype to run it in. Logits are exact to 1e-4 in float32, to some per cent in bfloat16.
        max_positions: Longest prompt and response together.

    Raises:
        ValueError: Too many scripts, an id outside the vocabulary, or positions beyond `max_positions`.
    """
    named = {key: value if isinstance(value, Script) else Script(value) for key, value in scripts.items()}
    if len(named) > SCRIPT_SLOTS:
        raise ValueError(f"got {len(named)} scripts, at most {SCRIPT_SLOTS} fit into one checkpoint")
    ids = token_ids()
    cells = [cell for number, script in enumerate(named.values()) for cell in _cells(number, script, max_positions)]
    end_tag = ids["end_3"] if tags == "pieces" else ids["end_think"]
    weights = build_weights(cells, reference=ids["ref"], end_tag=end_tag, eos=ids["eos"], positions=max_positions)
    path.mkdir(parents=True, exist_ok=True)
    weights.save(path / "model.safetensors")
    config = config_for(weights, dtype=dtype, positions=max_positions, bos=ids["ref"], eos=ids["eos"])
    (path / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    generation = {"bos_token_id": ids["ref"], "eos_token_id": ids["eos"]}
    (path / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    save_tokenizer(path, tags)
    return ScriptedModel(path, ids, named, tags, dtype)


def gap_for(top1: float) -> float:
    """The gap that gives the planned token this probability, the rest being spread evenly.

    Args:
        top1: Wanted softmax probability, in (1/1024, 1).
    """
    return math.log(top1 * (VOCABULARY_SIZE - 1) / (1.0 - top1))


def entropy_of(gap: float) -> float:
    """Entropy in nats of a row with one logit at `gap` and the rest at 0."""
    rest = VOCABULARY_SIZE - 1
    total = math.exp(gap) + rest
    return math.log(total) - gap * math.exp(gap) / total


def _step(step: int | Step) -> Step:
    return step if isinstance(step, Step) else Step(step)


def _cells(number: int, script: Script, max_positions: int) -> list[Cell]:
    """The model's memory of one script: for each position (or distance from the end tag) the row to give."""
    first = 1 + len(script.prompt)  # The last prompt token's position: there the first token is predicted.
    if first + len(script.plan) > max_positions:
        raise ValueError(
            f"script {number} needs {first + len(script.plan)} positions, max_positions is {max_positions}"
        )
    with_answer = script.answer is not None
    plan = [
        Cell(number, first + i, _row(_step(step)), _step(step).topic, False if with_answer else None)
        for i, step in enumerate(script.plan)
    ]
    answer = [Cell(number, i, _row(_step(step)), _step(step).topic, True) for i, step in enumerate(script.answer or ())]
    return plan + answer


def _row(step: Step) -> tuple[Mapping[int, float], float]:
    """Logits of the ids that are named, and that of all others."""
    row = {step.token: step.gap, **step.logits}
    for i in row:
        if not 0 <= i < VOCABULARY_SIZE:
            raise ValueError(f"id {i} is outside the vocabulary of {VOCABULARY_SIZE}")
    return row, step.fill

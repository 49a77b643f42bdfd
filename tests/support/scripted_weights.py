"""The weights of a scripted model: a one-layer Llama that is a lookup table over (script, position).

Nothing is trained; every number is placed. The residual stream is split into named ranges of dimensions (`_Layout`).

1. **Embedding.** Every token sets one large constant, so that each RMS norm divides by the same known number and acts
   as a plain copy. Three kinds of token carry a flag: the reference (first in the prompt), a script's mark (second,
   with the script's code of random signs), and the end tag.
2. **Attention as a clock.** RoPE turns a constant query against a mark's constant key into cos(w d), d being the
   distance. Each head uses one frequency w and attends only to the mark and the reference, whose score is constant, so
   its output is tanh(cos(w d) / 2): a reading of the position by that frequency. Fourteen heads (seven frequencies,
   sine and cosine) tell all positions apart; fourteen more read the distance from the end tag. One head copies the
   script's code, one tells whether the end tag has been seen. The flags sit in RoPE's slowest pairs, which hardly turn.
3. **MLP as memory.** Two neurons a cell: their gates are the similarity of the clock and the code with the cell's own,
   minus a threshold, steep enough that they are exactly 0 in float32 elsewhere. Their difference, which rounding does
   not touch, gives the row of logits.
4. **Head.** Every planned id has a dimension of its own; with no neuron active EOS wins.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import Tensor

from support.vocabulary import FIRST_SCRIPT, SCRIPT_SLOTS, VOCABULARY_SIZE

_HEAD_DIM: Final = 64
_THETA: Final = 1e5
_FREQUENCIES: Final = 7  # The fastest RoPE pairs: 1 to .1 radians a token; more, slower ones would blur neighbours.
_HEADS: Final = 32  # Four a frequency, the two below, and two spare: the hidden size must be a multiple.
_CODE_HEAD, _SEEN_HEAD = 28, 29
_PAIR_MARK_OR_REF, _PAIR_END_OR_REF, _PAIR_MARK, _PAIR_END = 31, 30, 29, 28  # Below 5e-5 radians a token.
_ATTEND: Final = 30.0  # Score of what a head is to attend to; e^-30 is left to everything else.
_VALUE_SIGN, _VALUE_CODE, _VALUE_END, _VALUE_REF, _VALUE_MARK = 0, 1, 33, 34, 35  # Where a value vector holds what.
_CODE: Final = 32
_RMS: Final = 512.0  # Every RMS norm divides by this, up to 1e-6.
_TOPICS: Final = 32
_TOPIC_NORM: Final = 8.0
_LOGIT_SCALE: Final = 32.0  # Logits travel divided by this, so that topics rule the hidden state's direction.
_EOS_LOGIT: Final = 20.0  # Where no cell speaks.
_CONSTANT_OUT: Final = 2.0**-7  # The constant's share of the final hidden state.
_STEEP: Final = 200.0  # Gate of an active neuron; others have -_STEEP or less, whose SiLU is exactly 0 in float32.
_LEVEL: Final = 128.0  # What a cell's two gates differ by; representable beside the thresholds in bfloat16.
_TAG_SEEN: Final = 8.0  # Weight of "the end tag has been seen", above anything that the clocks can say.
_SCRIPT: Final = 32.0  # Weight of the script's code: another's costs at least 4, more than the clocks can make up for.
_OVERFLOW: Final = 3e38  # Times 8 it is infinite in float32 and bfloat16.


@dataclass(frozen=True)
class Cell:
    """What the model gives in one place.

    Attributes:
        script: The script's number.
        at: The absolute position, or with `after_tag=True` the distance from the end tag.
        row: Logits by id, and the logit of all other ids.
        topic: Direction of the hidden state; None for one of its own.
        after_tag: True: only after the end tag. False: only before it. None: either.
    """

    script: int
    at: int
    row: tuple[Mapping[int, float], float]
    topic: int | None
    after_tag: bool | None


@dataclass(frozen=True)
class Weights:
    """Tensors under their checkpoint names, and the sizes that the configuration needs."""

    tensors: Mapping[str, Tensor]
    hidden: int
    intermediate: int

    def save(self, file: Path) -> None:
        save_file(dict(self.tensors), file, metadata={"format": "pt"})


class _Layout:
    """Ranges of the residual stream."""

    constant = 0
    is_ref, is_mark, is_end = 1, 2, 3
    code_in = slice(4, 4 + _CODE)
    clock = slice(36, 50)
    end_clock = slice(50, 64)
    code_out = slice(64, 64 + _CODE)
    seen, not_seen, marked = 96, 97, 98
    topics = slice(99, 99 + _TOPICS)
    logits = 131  # From here up: one dimension an id, then one an infinite logit.


def config_for(weights: Weights, *, dtype: str, positions: int, bos: int, eos: int) -> dict[str, Any]:
    """The `config.json` of a scripted model."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": dtype,
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": weights.hidden,
        "intermediate_size": weights.intermediate,
        "num_hidden_layers": 1,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": 1,
        "head_dim": _HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": _THETA},
        "max_position_embeddings": positions,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": bos,
        "eos_token_id": eos,
    }


def build_weights(cells: list[Cell], *, reference: int, end_tag: int, eos: int, positions: int) -> Weights:
    """Places every weight of a model that knows these cells."""
    outputs = _output_dimensions(cells, eos)
    hidden = next(side * side for side in (16, 24, 32, 48) if side * side >= _Layout.logits + len(outputs))
    codes = _codes()
    gate, up, down = _memory(cells, outputs, codes, hidden, eos, positions)
    prefix = "model.layers.0."
    tensors = {
        "model.embed_tokens.weight": _embedding(codes, hidden, reference, end_tag),
        prefix + "input_layernorm.weight": _copying_norm(hidden),
        prefix + "self_attn.q_proj.weight": _queries(hidden),
        prefix + "self_attn.k_proj.weight": _keys(hidden),
        prefix + "self_attn.v_proj.weight": _values(hidden),
        prefix + "self_attn.o_proj.weight": _attention_output(hidden),
        prefix + "post_attention_layernorm.weight": _copying_norm(hidden),
        prefix + "mlp.gate_proj.weight": gate,
        prefix + "mlp.up_proj.weight": up,
        prefix + "mlp.down_proj.weight": down,
        "model.norm.weight": _final_norm(hidden),
        "lm_head.weight": _head(outputs, hidden, eos),
    }
    return Weights({name: tensor.contiguous() for name, tensor in tensors.items()}, hidden, gate.shape[0])


def _codes() -> Tensor:
    """Signs that tell the scripts apart, [scripts, _CODE]."""
    return torch.randint(0, 2, (SCRIPT_SLOTS, _CODE), generator=torch.Generator().manual_seed(7)).float() * 2 - 1


def _embedding(codes: Tensor, hidden: int, reference: int, end_tag: int) -> Tensor:
    table = torch.zeros(VOCABULARY_SIZE, hidden)
    table[:, _Layout.constant] = math.sqrt(hidden) * _RMS
    table[reference, _Layout.is_ref] = 1
    table[end_tag, _Layout.is_end] = 1
    table[FIRST_SCRIPT : FIRST_SCRIPT + SCRIPT_SLOTS, _Layout.is_mark] = 1
    table[FIRST_SCRIPT : FIRST_SCRIPT + SCRIPT_SLOTS, _Layout.code_in] = codes
    return table


def _copying_norm(hidden: int) -> Tensor:
    """Norm weights after which the constant is 1 and everything else what it was."""
    weight = torch.full((hidden,), _RMS)
    weight[_Layout.constant] = 1 / math.sqrt(hidden)
    return weight


def _queries(hidden: int) -> Tensor:
    """Constant queries: head by head the frequency to read and the tokens to attend to, [heads x head_dim, hidden]."""
    query = torch.zeros(_HEADS, _HEAD_DIM)
    half = _HEAD_DIM // 2
    for block, pair in enumerate((_PAIR_MARK_OR_REF, _PAIR_END_OR_REF)):
        for i in range(_FREQUENCIES):
            cosine, sine = (2 * (block * _FREQUENCIES + i) + part for part in (0, 1))
            query[cosine, i] = 1
            query[sine, half + i] = -1
            query[cosine, pair] = query[sine, pair] = _ATTEND
    query[_CODE_HEAD, _PAIR_MARK] = _ATTEND
    query[_SEEN_HEAD, _PAIR_END_OR_REF] = query[_SEEN_HEAD, _PAIR_END] = _ATTEND  # The end tag before the reference.
    weight = torch.zeros(_HEADS * _HEAD_DIM, hidden)
    weight[:, _Layout.constant] = query.flatten() * math.sqrt(_HEAD_DIM)  # Attention divides by this root.
    return weight


def _keys(hidden: int) -> Tensor:
    weight = torch.zeros(_HEAD_DIM, hidden)
    weight[:_FREQUENCIES, _Layout.is_mark] = weight[:_FREQUENCIES, _Layout.is_end] = 1
    weight[_PAIR_MARK_OR_REF, _Layout.is_mark] = weight[_PAIR_MARK_OR_REF, _Layout.is_ref] = 1
    weight[_PAIR_END_OR_REF, _Layout.is_end] = weight[_PAIR_END_OR_REF, _Layout.is_ref] = 1
    weight[_PAIR_MARK, _Layout.is_mark] = weight[_PAIR_END, _Layout.is_end] = 1
    return weight


def _values(hidden: int) -> Tensor:
    weight = torch.zeros(_HEAD_DIM, hidden)
    weight[_VALUE_SIGN, _Layout.is_mark] = weight[_VALUE_SIGN, _Layout.is_end] = 1
    weight[_VALUE_SIGN, _Layout.is_ref] = -1
    weight[_VALUE_CODE : _VALUE_CODE + _CODE, _Layout.code_in] = torch.eye(_CODE)
    weight[_VALUE_END, _Layout.is_end] = weight[_VALUE_REF, _Layout.is_ref] = weight[_VALUE_MARK, _Layout.is_mark] = 1
    return weight


def _attention_output(hidden: int) -> Tensor:
    weight = torch.zeros(hidden, _HEADS, _HEAD_DIM)
    for i in range(2 * _FREQUENCIES):
        weight[_Layout.clock.start + i, i, _VALUE_SIGN] = 1
        weight[_Layout.end_clock.start + i, 2 * _FREQUENCIES + i, _VALUE_SIGN] = 1
    weight[_Layout.code_out, _CODE_HEAD, _VALUE_CODE : _VALUE_CODE + _CODE] = torch.eye(_CODE)
    weight[_Layout.marked, _CODE_HEAD, _VALUE_MARK] = 1
    weight[_Layout.seen, _SEEN_HEAD, _VALUE_END] = weight[_Layout.not_seen, _SEEN_HEAD, _VALUE_REF] = 1
    return weight.flatten(1)


def _clock(distances: Tensor, offset: int) -> Tensor:
    """What the clock heads give at these distances, [n, 2 x frequencies]; the reference is `offset` further away."""
    rates = _THETA ** (-torch.arange(_HEAD_DIM // 2, dtype=torch.float64) * 2 / _HEAD_DIM)
    angles = distances.double()[:, None] * rates[None, :_FREQUENCIES]
    score = torch.stack((angles.cos(), angles.sin()), dim=-1).flatten(1)
    pair = rates[_PAIR_MARK_OR_REF]
    tilt = _ATTEND * ((distances * pair).cos() - ((distances + offset) * pair).cos())
    return torch.tanh((score + tilt[:, None]) / 2).float()


def _memory(
    cells: list[Cell], outputs: dict[tuple[str, int], int], codes: Tensor, hidden: int, eos: int, positions: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The MLP's three matrices: two neurons a cell, padded to a multiple of 64."""
    # After the mark (position 1) the reference is one further away. For the end tag it is unknown, and does not matter.
    clock = _clock(torch.arange(positions), offset=1)
    squared = (clock * clock).sum(1)
    similarity = clock @ (clock / squared[:, None]).T
    similarity.fill_diagonal_(-1)  # .89 between neighbours
    margin = 1 - float(similarity.max())
    if margin < 0.02:
        raise ValueError(f"the clock cannot tell {positions} positions apart (margin {margin:.3f})")
    steepness = 2 * _STEEP / margin
    threshold = float(torch.tensor(steepness * (1 - margin / 2)).bfloat16())
    of_code = float(torch.tensor(steepness * _SCRIPT / _CODE).bfloat16())
    neurons = max(64, -(-2 * len(cells) // 64) * 64)
    gate, up, down = torch.zeros(neurons, hidden), torch.zeros(neurons, hidden), torch.zeros(hidden, neurons)
    gate[:, _Layout.constant] = -threshold
    up[:, _Layout.constant] = 1
    topics = torch.Generator().manual_seed(11)
    for number, cell in enumerate(cells):
        pair = slice(2 * number, 2 * number + 2)
        distance = cell.at if cell.after_tag else cell.at - 1
        place = _Layout.end_clock if cell.after_tag else _Layout.clock
        gate[pair, place] = steepness * clock[distance] / squared[distance]
        gate[pair, _Layout.code_out] = of_code * codes[cell.script]
        gate[pair, _Layout.marked] = -of_code * _CODE  # Cancels the code's own product exactly, in bfloat16 too.
        gate[2 * number + 1, _Layout.constant] -= _LEVEL
        if cell.after_tag is not None:
            gate[pair, _Layout.not_seen if cell.after_tag else _Layout.seen] = -_TAG_SEEN * steepness
        column = (_contribution(cell, outputs, hidden, eos, topics) / _LEVEL).clamp(max=_OVERFLOW)
        down[:, pair] = torch.stack((column, -column), dim=1)
    return gate, up, down


def _contribution(
    cell: Cell, outputs: dict[tuple[str, int], int], hidden: int, eos: int, topics: torch.Generator
) -> Tensor:
    """What an active neuron adds to the residual stream."""
    column = torch.zeros(hidden)
    row, fill = cell.row
    if math.isnan(fill):
        column[_Layout.topics] = math.inf  # An infinite hidden state, which the last norm turns into NaN.
        return column
    column[_Layout.topics] = _direction(cell.topic, topics) * _TOPIC_NORM
    for i in {*row, eos}:
        value = row.get(i, 0.0)
        column[outputs["logit", i]] = (
            (value if math.isfinite(value) else 0.0) - (i == eos) * _EOS_LOGIT
        ) / _LOGIT_SCALE
        for kind in _infinities(value):
            column[outputs[kind, i]] = 8.0
    if fill == -math.inf:
        named = [i for i, value in row.items() if value != -math.inf]
        column[outputs["fill", _fill_key(named)]] = 8.0
    return column


def _direction(topic: int | None, fresh: torch.Generator) -> Tensor:
    generator = fresh if topic is None else torch.Generator().manual_seed(1000 + topic)
    vector = torch.randn(_TOPICS, generator=generator)
    return vector / vector.norm()


def _infinities(value: float) -> tuple[str, ...]:
    """Which infinite terms make this logit; NaN is the sum of both."""
    if math.isnan(value):
        return ("plus", "minus")
    if math.isinf(value):
        return ("plus",) if value > 0 else ("minus",)
    return ()


def _fill_key(spared: list[int]) -> int:
    """A number for a set of ids: a dimension that sends all others to -inf."""
    return sum(1 << i for i in spared)


def _output_dimensions(cells: list[Cell], eos: int) -> dict[tuple[str, int], int]:
    """Gives every planned id, and every infinite logit, a dimension."""
    wanted: dict[tuple[str, int], None] = {("logit", eos): None}
    for cell in cells:
        row, fill = cell.row
        for i, value in row.items():
            wanted["logit", i] = None
            wanted |= {(kind, i): None for kind in _infinities(value)}
        if fill == -math.inf:
            wanted["fill", _fill_key([i for i, value in row.items() if value != -math.inf])] = None
        elif fill != 0 and not math.isnan(fill):
            raise ValueError(f"a row's fill must be 0, -inf or NaN, got {fill}")
    return {key: _Layout.logits + n for n, key in enumerate(wanted)}


def _final_norm(hidden: int) -> Tensor:
    """Keeps the logits and the topic, little of the constant, and nothing else."""
    weight = torch.zeros(hidden)
    weight[_Layout.topics] = _RMS
    weight[_Layout.logits :] = _RMS
    weight[_Layout.constant] = _CONSTANT_OUT / math.sqrt(hidden)
    return weight


def _head(outputs: dict[tuple[str, int], int], hidden: int, eos: int) -> Tensor:
    weight = torch.zeros(VOCABULARY_SIZE, hidden)
    weight[eos, _Layout.constant] = _EOS_LOGIT / _CONSTANT_OUT
    for (kind, i), dimension in outputs.items():
        if kind == "logit":
            weight[i, dimension] = _LOGIT_SCALE
        elif kind == "fill":
            weight[:, dimension] = -_OVERFLOW
            weight[[n for n in range(VOCABULARY_SIZE) if i >> n & 1], dimension] = 0
        else:
            weight[i, dimension] = _OVERFLOW if kind == "plus" else -_OVERFLOW
    return weight

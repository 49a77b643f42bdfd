"""Unit means of hidden states and the cosine of consecutive units, per slot. Picks the back end."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

__all__ = ["UnitState", "alloc_units", "reset", "stash_hidden", "unit_similarity"]

#: What stands for a unit: the mean of its tokens' hidden states, or the hidden state of its last token.
Mode = Literal["mean", "last"]

#: The widest model the GPU kernel keeps in registers.
MAX_HIDDEN = 16_384


class UnitState(NamedTuple):
    """What a slot remembers of its units. A slot is one running request, a row is not a request."""

    unit_sum: torch.Tensor
    """float32 [slots, H]: sum of the open unit's hidden states."""

    unit_count: torch.Tensor
    """int32 [slots]: tokens in that sum."""

    prev_mean: torch.Tensor
    """float32 [slots, H]: the last closed unit, centred."""

    prev_valid: torch.Tensor
    """int32 [slots]: 1 once a unit was closed."""

    centre: torch.Tensor | None = None
    """float32 [H]: subtracted from every unit, or None."""


def alloc_units(
    slots: int, hidden: int, device: torch.device | str = "cpu", centre: torch.Tensor | None = None
) -> UnitState:
    """Fresh state for ``slots`` slots of a model with ``hidden`` features.

    Raises:
        ValueError: for a width the kernels do not hold or a centre of another width.
    """
    if not 1 <= hidden <= MAX_HIDDEN:
        raise ValueError(f"hidden size must be 1 to {MAX_HIDDEN}, got {hidden}: run without similarity")
    if centre is not None and centre.shape != (hidden,):
        raise ValueError(f"centre must be [{hidden}] as the model's hidden states, got {list(centre.shape)}")
    return UnitState(
        torch.zeros(slots, hidden, dtype=torch.float32, device=device),
        torch.zeros(slots, dtype=torch.int32, device=device),
        torch.zeros(slots, hidden, dtype=torch.float32, device=device),
        torch.zeros(slots, dtype=torch.int32, device=device),
        None if centre is None else centre.to(device, torch.float32).contiguous(),
    )


def unit_similarity(
    hidden_pending: torch.Tensor,
    n_commit: torch.Tensor,
    unit_end: torch.Tensor,
    slots: torch.Tensor,
    state: UnitState,
    out: torch.Tensor,
    *,
    mode: Mode = "mean",
    backend: str | None = None,
) -> torch.Tensor:
    """Fold committed hidden states into their slots' units, and compare each unit that ends with the one before.

    Per request, in order of the committed tokens: add the hidden state to the open unit; where the unit ends, its
    vector u = sum / count - centre (or the last hidden state - centre) is compared with the last unit's and takes
    its place: out = u·v / (|u| |v|), in float32. NaN where no unit ends, for the first unit of a slot, where a norm
    is 0 and where anything is not finite.

    Args:
        hidden_pending: [slots, K, H] in the model's dtype, contiguous: what `stash_hidden` stored.
        n_commit: int32 [R], hidden states to take of each request, at most K.
        unit_end: int32 [R, K], not 0 where a unit ends with that token.
        slots: int32 [R], each at most once; -1 skips the entry.
        state: From `alloc_units`, changed in place.
        out: float32 [R, K], every value is written.
        mode: ``mean`` or ``last``.
        backend: ``reference``, ``cpu`` or ``triton``; by default by device.

    Returns:
        ``out``.

    Raises:
        ValueError: for another shape, layout, mode or back end.
    """
    requests, width = unit_end.shape
    if hidden_pending.dim() != 3 or not hidden_pending.is_contiguous():
        raise ValueError(f"hidden_pending must be contiguous [slots, K, H], got {tuple(hidden_pending.shape)}")
    if hidden_pending.shape[1:] != (width, state.unit_sum.shape[1]):
        raise ValueError(
            f"hidden_pending must be [slots, {width}, {state.unit_sum.shape[1]}] as unit_end and the state say, "
            f"got {tuple(hidden_pending.shape)}"
        )
    if out.shape != unit_end.shape or out.dtype is not torch.float32 or not out.is_contiguous():
        raise ValueError(f"out must be contiguous float32 [{requests}, {width}], got {out.dtype} {tuple(out.shape)}")
    if mode not in ("mean", "last"):
        raise ValueError(f"mode must be 'mean' or 'last', got {mode!r}")
    _backend(backend, out).unit_similarity(hidden_pending, n_commit, unit_end.contiguous(), slots, state, out, mode)
    return out


def stash_hidden(
    hidden: torch.Tensor,
    row_slot: torch.Tensor,
    row_j: torch.Tensor,
    hidden_pending: torch.Tensor,
    *,
    backend: str | None = None,
) -> None:
    """Keep the sampled rows' hidden states until it is known which of them are committed.

    ``hidden_pending[row_slot[r], row_j[r]] = hidden[r]``, cast to its dtype.

    Args:
        hidden: [rows, H], unit stride within a row.
        row_slot: int32 [rows], -1 skips the row.
        row_j: int32 [rows], place among the slot's rows of this step (0 = committed prefix, others speculative);
            outside of [0, K) the row is skipped.
        hidden_pending: [slots, K, H], contiguous, changed in place.
        backend: See `unit_similarity`.
    """
    if hidden.dim() != 2 or hidden.shape[1] != hidden_pending.shape[2] or not hidden_pending.is_contiguous():
        raise ValueError(f"hidden must be [rows, {hidden_pending.shape[2]}], got {tuple(hidden.shape)}")
    if hidden.stride(1) != 1:
        hidden = hidden.contiguous()
    _backend(backend, hidden).stash_hidden(hidden, row_slot, row_j, hidden_pending)


def reset(slots: torch.Tensor, state: UnitState, *, backend: str | None = None) -> None:
    """Forget the units of recycled slots.

    Args:
        slots: int32 [N], on the state's device, -1 is skipped.
        state: Changed in place; the centre stays.
        backend: See `unit_similarity`.
    """
    _backend(backend, state.unit_sum).reset(slots, state)


def _backend(name: str | None, tensor: torch.Tensor):  # type: ignore[no-untyped-def]
    if name is None:
        name = "cpu" if tensor.device.type == "cpu" else "triton"
    if name == "cpu":
        from earlystop.kernels import cpu_similarity

        return cpu_similarity
    if name == "triton":
        from earlystop.kernels import triton_similarity

        return triton_similarity
    if name == "reference":
        from earlystop.kernels import torch_similarity

        return torch_similarity
    raise ValueError(f"backend must be reference, cpu or triton, got {name!r}")

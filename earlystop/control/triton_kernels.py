"""Triton kernels around the portable programs: one program instance a row (bound by `lower.py`).

Launched with one warp: a program is scalar code for one request, and reads back what it stored.
"""

from __future__ import annotations

from typing import Any

# The names below live in the namespace that `lower.triton_namespace` makes.
# ruff: noqa: F821
# mypy: disable-error-code="name-defined"


def start_kernel(
    slots: Any,
    token_base: Any,
    prompt_len: Any,
    prefill_len: Any,
    all_tokens: Any,
    ints: Any,
    floats: Any,
    grams: Any,
    stored: Any,
    token_flags: Any,
    symbols: Any,
    symbol_offsets: Any,
    costs: Any,
    sequence: Any,
    header: Any,
) -> None:
    start_program(
        tl.program_id(0), slots, token_base, prompt_len, prefill_len, all_tokens, ints, floats, grams, stored,
        token_flags, symbols, symbol_offsets, costs, sequence, header,
    )  # fmt: skip


def scan_kernel(
    row_slot: Any,
    row_local: Any,
    row_pos: Any,
    row_token: Any,
    total_len: Any,
    ints: Any,
    floats: Any,
    grams: Any,
    drafts: Any,
    stored: Any,
    events: Any,
    novelty: Any,
    committed: Any,
    unit_slot: Any,
    unit_end: Any,
    token_flags: Any,
    symbols: Any,
    symbol_offsets: Any,
    sequence: Any,
    header: Any,
) -> None:
    scan_program(
        tl.program_id(0), row_slot, row_local, row_pos, row_token, total_len, ints, floats, grams, drafts,
        stored, events, novelty, committed, unit_slot, unit_end, token_flags, symbols, symbol_offsets,
        sequence, header,
    )  # fmt: skip


def judge_kernel(
    n_rows: Any,
    row_slot: Any,
    row_local: Any,
    row_token: Any,
    stats: Any,
    argmax: Any,
    masked: Any,
    similarity: Any,
    events: Any,
    novelty: Any,
    committed: Any,
    unit_slot: Any,
    ints: Any,
    floats: Any,
    scratch: Any,
    drafts: Any,
    stored: Any,
    pending: Any,
    pending_argmax: Any,
    pending_plan: Any,
    force: Any,
    flags: Any,
    grammar: Any,
    report: Any,
    trace: Any,
    token_flags: Any,
    symbols: Any,
    symbol_offsets: Any,
    costs: Any,
    sequence: Any,
    header: Any,
) -> None:
    judge_program(
        tl.program_id(0), n_rows, row_slot, row_local, row_token, stats, argmax, masked, similarity, events,
        novelty, committed, unit_slot, ints, floats, scratch, drafts, stored, pending, pending_argmax, pending_plan,
        force, flags, grammar, report, trace, token_flags, symbols, symbol_offsets, costs, sequence, header,
    )  # fmt: skip


KERNELS = (start_kernel, scan_kernel, judge_kernel)

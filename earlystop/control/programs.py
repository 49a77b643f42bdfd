"""The three programs of a step, one run per request or row (portable source).

Order within a step: `start_program` for slots that were (re)admitted, `scan_program`, the unit similarity
kernel, `judge_program`. All arrays are flat; strides come with them. `TABLE` arrays belong to the model,
`SLOT` arrays to the slots, `ROW` arrays to this step:

    ints [2 * slots, N_INTS] int32, floats [2 * slots, N_FLOATS] float64     SLOT; the upper half is scratch
    grams [slots, gram_size] int32                                          SLOT
    drafts [slots, depth] int32, stored [slots] int32                        SLOT; last step's input tokens
    pending [slots, depth, N_STATS] float32, pending_argmax [slots, depth]   SLOT; last step's statistics
    pending_plan [slots, depth] int32                                        SLOT; what last step's rows forced
    token_flags [V], symbol_offsets [V + 1], symbols, costs [V or 0]         TABLE
    sequence [open tag | shut tag | closing sequence], header [8]            TABLE; header: H_* below
    row_slot, row_local, row_pos, row_token [rows] int32, total_len [slots]  ROW
    stats [rows, N_STATS] float32, argmax [rows] int32, masked [rows, ...]   ROW
"""

from __future__ import annotations

from typing import Any

from earlystop.control.budget import take_extra, warn
from earlystop.control.closing import check_forced, next_forced, plan_flags, plan_force, start_phase
from earlystop.control.decide import is_forced, judge_token, move_phase
from earlystop.control.layout import (
    ARGMAX_INVALID,
    BUDGET,
    BUDGET0,
    CAME_FROM,
    CLOSE_KIND,
    CLOSE_MAX,
    CLOSE_THINKING,
    CURSOR,
    CYCLE_PERIODS,
    E_SHUT,
    E_THINK,
    E_UNIT,
    EPOCH,
    HAS_GRAMMAR,
    LAST_CONFIDENCE,
    LAST_ENTROPY,
    LAST_MARGIN,
    LAST_NOVELTY,
    LAST_SCORE,
    LAST_SIMILARITY,
    MODE,
    MODE_OBSERVE,
    N_FLOATS,
    N_INTS,
    N_REPORT,
    N_STATS,
    N_TRACE,
    O_ACTIVE,
    O_CLOSING,
    O_DECIDED,
    O_INVALID,
    O_REBUILT,
    O_WOULD,
    OWED,
    PHASE,
    PHASE_ANSWERING,
    PHASE_CLOSING,
    PHASE_DONE,
    PHASE_ENDING,
    Q_ARGMAX,
    Q_ENTROPY,
    Q_EVENT,
    Q_MARGIN_EOS,
    Q_MARGIN_THINK,
    Q_NOVELTY,
    Q_SIMILARITY,
    Q_TOKEN,
    Q_TOP1,
    R_BITS,
    R_BUDGET,
    R_CLOSE_KIND,
    R_COMMITTED,
    R_CONFIDENCE,
    R_ENTROPY,
    R_EPOCH,
    R_MARGIN,
    R_NEXT,
    R_NOVELTY,
    R_REASON,
    R_REASONING,
    R_SCORE,
    R_SIMILARITY,
    R_SLOT,
    R_TOKENS,
    R_USED,
    REASON,
    REASONING,
    REBUILT,
    RING,
    S_ENTROPY,
    S_MARGIN_EOS,
    S_MARGIN_THINK,
    S_TOP1,
    SCOPE,
    SEEN,
    T_SPACE_FIRST,
    TAGGED,
    THINKING,
    TOKENS,
    UNIT_STATS,
    USED,
    VERDICT,
    WINDOW_N,
    WOULD_REASON,
)
from earlystop.control.portable import f64, i32, last_match, load, nan, real, store
from earlystop.control.rules import rest
from earlystop.control.scan import scan_token, scan_unknown

# Columns of `header`.
H_OPEN_LEN, H_SHUT_LEN, H_CLOSE_LEN, H_TAG_AT, H_VOCAB, H_COSTS, H_GRAM_SIZE, H_DEPTH = 0, 1, 2, 3, 4, 5, 6, 7
N_HEADER = 8


def cost_of(token: Any, costs: Any, header: Any) -> Any:
    """Cost units of a token: its entry of the cost table, else 1."""
    cost = real(1.0)
    if load(header, H_COSTS) > 0:
        cost = f64(load(costs, token))
    return cost


def flags_of(token: Any, token_flags: Any, header: Any) -> Any:
    """Token flags, or 0 for what is no token (undefined argmax, an id beyond the tokenizer)."""
    flags = 0
    if (token >= 0) & (token < load(header, H_VOCAB)):
        flags = load(token_flags, token)
    return flags


def fold_token(
    ints: Any,
    base: Any,
    floats: Any,
    fbase: Any,
    token: Any,
    lookahead: Any,
    grams: Any,
    gram_base: Any,
    gram_size: Any,
    token_flags: Any,
    symbols: Any,
    symbol_offsets: Any,
    costs: Any,
    sequence: Any,
    header: Any,
) -> Any:
    """Takes in one token that nobody measured: a rebuilt one, or a draft on a copy of the slot."""
    open_len = load(header, H_OPEN_LEN)
    shut_len = load(header, H_SHUT_LEN)
    close_at = open_len + shut_len
    index = load(ints, base + TOKENS)
    event = scan_token(
        ints, base, floats, fbase, token, index, load(ints, base + EPOCH), token_flags, symbols, symbol_offsets,
        sequence, open_len, shut_len, grams, gram_base, gram_size,
    )  # fmt: skip
    event = event | is_forced(ints, base, token, sequence, close_at)
    undefined = nan()
    return judge_token(
        ints, base, floats, fbase, token, event, undefined, undefined, undefined, undefined,
        cost_of(token, costs, header), lookahead, sequence, close_at, load(header, H_CLOSE_LEN),
        load(header, H_TAG_AT), shut_len,
    )  # fmt: skip


def count_unknown(ints: Any, base: Any, floats: Any, fbase: Any, thinking: Any, tokens: Any) -> None:
    """Counts tokens by length alone, one cost unit each, where they lie in the budget's scope."""
    store(ints, base + TOKENS, load(ints, base + TOKENS) + tokens)
    store(ints, base + REASONING, load(ints, base + REASONING) + thinking * tokens)
    if (load(ints, base + SCOPE) == 0) | (thinking == 1):
        store(floats, fbase + USED, load(floats, fbase + USED) + f64(tokens))


def unknown_token(ints: Any, base: Any, floats: Any, fbase: Any, sequence: Any, header: Any) -> Any:
    """Takes in a committed token whose id never reached us (V1 with asynchronous scheduling); O_* bits.

    It is not text and no evidence; only its length counts, so that a budget still binds. While we close, it
    is taken for the one that we forced: nothing else was left to sample.
    """
    bits = 0
    close_len = load(header, H_CLOSE_LEN)
    tag_at = load(header, H_TAG_AT)
    close_at = load(header, H_OPEN_LEN) + load(header, H_SHUT_LEN)
    thinking = load(ints, base + THINKING)
    if load(ints, base + PHASE) == PHASE_CLOSING:
        if (load(ints, base + CLOSE_KIND) == CLOSE_THINKING) & (load(ints, base + CURSOR) >= tag_at):
            thinking = 0
        presumed = next_forced(ints, base, sequence, close_at)
        bits = check_forced(ints, base, presumed, sequence, close_at, close_len)
        if load(ints, base + PHASE) == PHASE_ANSWERING:
            store(ints, base + THINKING, 0)
            store(ints, base + TAGGED, 0)
            rest(ints, base)
    count_unknown(ints, base, floats, fbase, thinking, i32(1))
    bits = bits | warn(ints, base, floats, fbase)
    nothing = i32(0)
    return bits | move_phase(ints, base, floats, fbase, nothing, nothing, nothing, close_len, tag_at)


def plan_code(ints: Any, base: Any) -> Any:
    """What a row planned on this slot forces, as one number: where in which closing sequence, why; 0 = nothing."""
    code = 0
    if (load(ints, base + PHASE) == PHASE_CLOSING) & ((load(ints, base + MODE) & MODE_OBSERVE) == 0):
        place = load(ints, base + CURSOR) + CLOSE_MAX * load(ints, base + REASON)
        code = place * 4 + load(ints, base + CLOSE_KIND)
    return code


def adopt_plan(ints: Any, base: Any, code: Any, token: Any, sequence: Any, close_at: Any) -> Any:
    """A committed token that its row forced though the slot is not closing: the close has begun; O_* bits.

    A draft's row is planned before the statistics of the drafts are in. Where these change the verdict (the
    budget adapts, a rule fires first), what was forced stands in the text already: it is finished, not repeated.
    """
    bits = 0
    phase = load(ints, base + PHASE)
    if (code > 0) & (phase != PHASE_CLOSING) & (phase != PHASE_DONE):
        kind = load(ints, base + CLOSE_KIND)
        reason = load(ints, base + REASON)
        cursor = load(ints, base + CURSOR)
        place = code // 4
        store(ints, base + CLOSE_KIND, code % 4)
        store(ints, base + REASON, place // CLOSE_MAX)
        store(ints, base + CURSOR, place % CLOSE_MAX)
        if next_forced(ints, base, sequence, close_at) == token:
            bits = O_CLOSING
            if phase != PHASE_ENDING:
                store(ints, base + CAME_FROM, phase)
                store(ints, base + VERDICT, place // CLOSE_MAX)
                bits = O_CLOSING | O_DECIDED
            store(ints, base + PHASE, PHASE_CLOSING)
        else:
            store(ints, base + CLOSE_KIND, kind)
            store(ints, base + REASON, reason)
            store(ints, base + CURSOR, cursor)
    return bits


def reset_slot(ints: Any, base: Any, floats: Any, fbase: Any) -> None:
    """Clears the state columns; the policy columns are the host's."""
    for column in range(PHASE, N_INTS):
        store(ints, base + column, 0)
    for place in range(RING, RING + CYCLE_PERIODS):
        store(ints, base + place, -1)
    for column in range(BUDGET, N_FLOATS):
        store(floats, fbase + column, real(0.0))
    for column in range(LAST_CONFIDENCE, N_FLOATS):
        store(floats, fbase + column, nan())
    store(floats, fbase + BUDGET, load(floats, fbase + BUDGET0))


def clear_evidence(ints: Any, base: Any) -> None:
    """Empties windows, streaks and the open unit's statistics: they do not survive a preemption."""
    rest(ints, base)
    store(ints, base + WINDOW_N, 0)
    store(ints, base + UNIT_STATS, 0)


def resume_close(ints: Any, base: Any, sequence: Any, header: Any, output: Any, first: Any, count: Any) -> None:
    """After a rebuild: goes on with a closing sequence whose beginning is the end of the output.

    The longest matching beginning counts. One token alone proves nothing, unless the rebuilt phase agrees.
    """
    close_at = load(header, H_OPEN_LEN) + load(header, H_SHUT_LEN)
    close_len = load(header, H_CLOSE_LEN)
    best = 0
    for length in range(1, close_len):
        if length <= count:
            same = 1
            for i in range(length):
                if load(output, first + count - length + i) != load(sequence, close_at + i):
                    same = 0
            if same == 1:
                best = length
    if (best >= 2) & (load(ints, base + THINKING) == 1) & (load(ints, base + PHASE) != PHASE_CLOSING):
        store(ints, base + PHASE, PHASE_CLOSING)
        store(ints, base + CLOSE_KIND, CLOSE_THINKING)
        store(ints, base + CURSOR, best)


def start_program(
    p: Any,
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
    """Starts slot `slots[p]`: reads the prompt's last tag, replays the output of a resumed request.

    The tokens of entry p are all_tokens[token_base[p] : token_base[p] + prefill_len[p]]; those from
    prompt_len[p] on were generated before a preemption. The replayed text decides again with undefined
    statistics: budgets, phases and boundaries come out as they were, windows and streaks start empty. What the
    last token gives to say is said; what the others gave has been said.
    """
    slot = load(slots, p)
    base = slot * N_INTS
    fbase = slot * N_FLOATS
    first = load(token_base, p)
    prompt = load(prompt_len, p)
    count = load(prefill_len, p) - prompt
    reset_slot(ints, base, floats, fbase)
    store(stored, slot, 0)
    store(ints, base + SEEN, prompt + count)
    open_len = load(header, H_OPEN_LEN)
    shut_len = load(header, H_SHUT_LEN)
    close_len = load(header, H_CLOSE_LEN)
    if (open_len > 0) & (load(ints, base + MODE) > 0):
        opened = last_match(all_tokens, first, prompt, sequence, 0, open_len)
        shut = last_match(all_tokens, first, prompt, sequence, open_len, shut_len)
        if opened > shut:
            store(ints, base + THINKING, 1)
            store(ints, base + TAGGED, 1)
    if load(ints, base + MODE) > 0:
        bits = start_phase(ints, base, floats, fbase, load(header, H_TAG_AT))
        close_at = open_len + shut_len
        gram_size = load(header, H_GRAM_SIZE)
        for i in range(count):
            token = load(all_tokens, first + prompt + i)
            lookahead = 0
            if i + 1 < count:
                following = load(all_tokens, first + prompt + i + 1)
                lookahead = flags_of(following, token_flags, header)
                if close_len > 0:
                    begins = following == load(sequence, close_at)
                    if begins | (following == load(sequence, close_at + load(header, H_TAG_AT))):
                        lookahead = lookahead | T_SPACE_FIRST  # we closed here, or so it seems
            if (token >= 0) & (token < load(header, H_VOCAB)):
                bits = fold_token(
                    ints, base, floats, fbase, token, lookahead, grams, slot * gram_size, gram_size, token_flags,
                    symbols, symbol_offsets, costs, sequence, header,
                )  # fmt: skip
            else:
                scan_unknown(ints, base, load(ints, base + TOKENS))
                bits = unknown_token(ints, base, floats, fbase, sequence, header)
        store(ints, base + OWED, bits)  # the last token was not judged before
        if count > 0:
            clear_evidence(ints, base)
            resume_close(ints, base, sequence, header, all_tokens, first + prompt, count)
            store(ints, base + REBUILT, 1)


def scan_program(
    r: Any,
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
    """Row r, if it is a request's first: which tokens were committed since the last step, and what they are.

    Writes events[r, i], novelty[r, i] and unit_end[r, i] for the committed[r] tokens; unit_slot[r] is the
    slot, or -1 for rows with nothing to do. State is committed before anything is decided: T - SEEN tokens
    are new, all but the last of them accepted drafts, the last one this row's input token.
    """
    depth = load(header, H_DEPTH)
    slot = load(row_slot, r)
    store(committed, r, 0)
    store(unit_slot, r, -1)
    mine = 0
    if slot >= 0:
        if (load(row_local, r) == 0) & (load(ints, slot * N_INTS + MODE) > 0):
            mine = 1
    if mine == 1:
        base = slot * N_INTS
        fbase = slot * N_FLOATS
        total = load(total_len, slot)
        if load(row_pos, r) + 1 < total:
            mine = 0  # a prompt chunk: its sampled token is thrown away
        if mine == 1:
            count = total - load(ints, base + SEEN)
            if (count < 0) | (count > load(stored, slot)):
                count = 0  # tokens that we never measured: lengths stay right, evidence is lost
                unseen = total - load(ints, base + SEEN)
                count_unknown(ints, base, floats, fbase, load(ints, base + THINKING), unseen)
                for back in range(CYCLE_PERIODS):
                    scan_unknown(ints, base, back)
            store(ints, base + SEEN, total)
            store(committed, r, count)
            store(unit_slot, r, slot)
            gram_size = load(header, H_GRAM_SIZE)
            index = load(ints, base + TOKENS)
            for i in range(count):
                token = load(row_token, r)
                if i + 1 < count:
                    token = load(drafts, slot * depth + i + 1)
                event = -1
                if (token < 0) | (token >= load(header, H_VOCAB)):
                    scan_unknown(ints, base, index + i)
                if (token >= 0) & (token < load(header, H_VOCAB)):
                    event = scan_token(
                        ints, base, floats, fbase, token, index + i, load(ints, base + EPOCH), token_flags, symbols,
                        symbol_offsets, sequence, load(header, H_OPEN_LEN), load(header, H_SHUT_LEN), grams,
                        slot * gram_size, gram_size,
                    )  # fmt: skip
                store(events, r * depth + i, event)
                store(novelty, r * depth + i, load(floats, fbase + LAST_NOVELTY))
                ends = 0
                if (event >= 0) & ((event & E_UNIT) > 0):
                    ends = 1
                store(unit_end, r * depth + i, ends)


def report_row(r: Any, slot: Any, bits: Any, count: Any, ints: Any, floats: Any, report: Any) -> None:
    """Writes what the host is told about this request's step; cumulative, so a lost report loses nothing."""
    base = slot * N_INTS
    fbase = slot * N_FLOATS
    out = r * N_REPORT
    reason = load(ints, base + REASON)
    if (bits & O_DECIDED) > 0:
        reason = load(ints, base + VERDICT)  # its close may be over already
    elif (bits & O_WOULD) > 0:
        reason = load(ints, base + WOULD_REASON)
    store(report, out + R_SLOT, f64(slot))
    store(report, out + R_EPOCH, f64(load(ints, base + EPOCH)))
    store(report, out + R_BITS, f64(bits | O_ACTIVE))
    store(report, out + R_REASON, f64(reason))
    store(report, out + R_TOKENS, f64(load(ints, base + TOKENS)))
    store(report, out + R_REASONING, f64(load(ints, base + REASONING)))
    store(report, out + R_USED, load(floats, fbase + USED))
    store(report, out + R_BUDGET, load(floats, fbase + BUDGET))
    store(report, out + R_CONFIDENCE, load(floats, fbase + LAST_CONFIDENCE))
    store(report, out + R_ENTROPY, load(floats, fbase + LAST_ENTROPY))
    store(report, out + R_SIMILARITY, load(floats, fbase + LAST_SIMILARITY))
    store(report, out + R_MARGIN, load(floats, fbase + LAST_MARGIN))
    store(report, out + R_NOVELTY, load(floats, fbase + LAST_NOVELTY))
    store(report, out + R_SCORE, load(floats, fbase + LAST_SCORE))
    store(report, out + R_CLOSE_KIND, f64(load(ints, base + CLOSE_KIND)))
    store(report, out + R_COMMITTED, f64(count))


def keep_row(
    r: Any,
    slot: Any,
    j: Any,
    depth: Any,
    row_token: Any,
    stats: Any,
    argmax: Any,
    masked: Any,
    ints: Any,
    drafts: Any,
    pending: Any,
    pending_argmax: Any,
    pending_plan: Any,
    plan: Any,
) -> None:
    """Stores row r's measurements until its token is committed, void where a grammar left no choice."""
    place = slot * depth + j
    store(drafts, place, load(row_token, r))
    forced_by_grammar = (load(ints, slot * N_INTS + HAS_GRAMMAR) == 1) & (load(masked, r * N_STATS + S_TOP1) >= 1.0)
    for k in range(N_STATS):
        value = f64(load(stats, r * N_STATS + k))
        if forced_by_grammar:
            value = nan()
        store(pending, place * N_STATS + k, value)
    store(pending_argmax, place, load(argmax, r))
    store(pending_plan, place, plan)


def judge_program(
    r: Any,
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
    """Row r, if it is a request's first: judges the committed tokens, then plans this row and its drafts' rows.

    Draft rows are planned on a copy of the slot (row `scratch + slot`) that takes the drafts in as if they
    were committed: budgets and forced sequences are exact in every row, the slot itself has not moved.
    """
    depth = load(header, H_DEPTH)
    slot = load(unit_slot, r)
    local = load(row_local, r)
    planned = 0  # by the first row of its request
    if (local > 0) & (local < depth) & (local <= r):
        owner = load(unit_slot, r - local)
        if (owner >= 0) & (owner == load(row_slot, r)):
            planned = 1
    if planned == 0:
        store(force, r, -1)
        store(flags, r, 0)
        store(grammar, r, 0)
        store(report, r * N_REPORT + R_SLOT, real(-1.0))
    if slot >= 0:
        base = slot * N_INTS
        fbase = slot * N_FLOATS
        open_len = load(header, H_OPEN_LEN)
        shut_len = load(header, H_SHUT_LEN)
        close_at = open_len + shut_len
        count = load(committed, r)
        bits = load(ints, base + OWED) | take_extra(ints, base, floats, fbase)
        store(ints, base + OWED, 0)
        for i in range(count):
            token = load(row_token, r)
            ahead = load(argmax, r)
            place = slot * depth + i
            if i + 1 < count:
                token = load(drafts, place + 1)
                ahead = load(pending_argmax, place + 1)
            event = load(events, r * depth + i)
            if event < 0:
                bits = bits | unknown_token(ints, base, floats, fbase, sequence, header)
            else:
                bits = bits | adopt_plan(ints, base, load(pending_plan, place), token, sequence, close_at)
                event = event | is_forced(ints, base, token, sequence, close_at)
                store(floats, fbase + LAST_NOVELTY, load(novelty, r * depth + i))
                margin = load(pending, place * N_STATS + S_MARGIN_EOS)
                if (event & (E_THINK | E_SHUT)) > 0:
                    margin = load(pending, place * N_STATS + S_MARGIN_THINK)
                bits = bits | judge_token(
                    ints, base, floats, fbase, token, event,
                    f64(load(pending, place * N_STATS + S_TOP1)), f64(load(pending, place * N_STATS + S_ENTROPY)),
                    f64(margin), f64(load(similarity, r * depth + i)), cost_of(token, costs, header),
                    flags_of(ahead, token_flags, header), sequence, close_at, load(header, H_CLOSE_LEN),
                    load(header, H_TAG_AT), shut_len,
                )  # fmt: skip
            out = (r * depth + i) * N_TRACE
            store(trace, out + Q_TOKEN, f64(token))
            store(trace, out + Q_TOP1, f64(load(pending, place * N_STATS + S_TOP1)))
            store(trace, out + Q_ENTROPY, f64(load(pending, place * N_STATS + S_ENTROPY)))
            store(trace, out + Q_MARGIN_THINK, f64(load(pending, place * N_STATS + S_MARGIN_THINK)))
            store(trace, out + Q_MARGIN_EOS, f64(load(pending, place * N_STATS + S_MARGIN_EOS)))
            store(trace, out + Q_ARGMAX, f64(load(pending_argmax, place)))
            store(trace, out + Q_EVENT, f64(event))
            store(trace, out + Q_SIMILARITY, f64(load(similarity, r * depth + i)))
            store(trace, out + Q_NOVELTY, load(novelty, r * depth + i))
        if load(ints, base + REBUILT) == 1:
            bits = bits | O_REBUILT
            store(ints, base + REBUILT, 2)
        if load(argmax, r) == ARGMAX_INVALID:
            bits = bits | O_INVALID
        report_row(r, slot, bits, count, ints, floats, report)
        for k in range(N_STATS):
            store(report, r * N_REPORT + R_NEXT + k, f64(load(stats, r * N_STATS + k)))
        store(report, r * N_REPORT + R_NEXT + N_STATS, f64(load(argmax, r)))
        store(force, r, plan_force(ints, base, sequence, close_at, load(argmax, r)))
        store(flags, r, plan_flags(ints, base, load(argmax, r)))
        store(grammar, r, load(ints, base + HAS_GRAMMAR))
        keep_row(
            r, slot, 0, depth, row_token, stats, argmax, masked, ints, drafts, pending, pending_argmax, pending_plan,
            plan_code(ints, base),
        )  # fmt: skip
        kept = 1
        if depth > 1:
            kept = plan_drafts(
                r, n_rows, slot, row_slot, row_local, row_token, stats, argmax, masked, ints, floats, scratch,
                drafts, pending, pending_argmax, pending_plan, force, flags, grammar, report, token_flags, symbols,
                symbol_offsets, costs, sequence, header,
            )  # fmt: skip
        store(stored, slot, kept)


def plan_drafts(
    r: Any,
    n_rows: Any,
    slot: Any,
    row_slot: Any,
    row_local: Any,
    row_token: Any,
    stats: Any,
    argmax: Any,
    masked: Any,
    ints: Any,
    floats: Any,
    scratch: Any,
    drafts: Any,
    pending: Any,
    pending_argmax: Any,
    pending_plan: Any,
    force: Any,
    flags: Any,
    grammar: Any,
    report: Any,
    token_flags: Any,
    symbols: Any,
    symbol_offsets: Any,
    costs: Any,
    sequence: Any,
    header: Any,
) -> Any:
    """Plans the rows j >= 1 of the request whose first row is r; returns the number of its rows."""
    depth = load(header, H_DEPTH)
    base = (scratch + slot) * N_INTS
    fbase = (scratch + slot) * N_FLOATS
    for column in range(N_INTS):
        store(ints, base + column, load(ints, slot * N_INTS + column))
    for column in range(N_FLOATS):
        store(floats, fbase + column, load(floats, slot * N_FLOATS + column))
    store(ints, base + UNIT_STATS, 0)  # statistics of drafts are not in: no score on part of a unit
    close_at = load(header, H_OPEN_LEN) + load(header, H_SHUT_LEN)
    kept = 1
    alive = 1
    for j in range(1, depth):
        row = r + j
        here = 0
        if row < n_rows:
            if (load(row_slot, row) == slot) & (load(row_local, row) == j):
                here = 1
        if here == 1:
            store(force, row, -1)
            store(flags, row, 0)
            store(grammar, row, 0)
            store(report, row * N_REPORT + R_SLOT, real(-1.0))
            token = load(row_token, row)
            plan = 0
            if (token < 0) | (token >= load(header, H_VOCAB)):
                alive = 0  # void from here on
            if alive == 1:
                ahead = flags_of(load(argmax, row), token_flags, header)
                fold_token(
                    ints, base, floats, fbase, token, ahead, ints, 0, 0, token_flags, symbols, symbol_offsets, costs,
                    sequence, header,
                )  # fmt: skip
                store(force, row, plan_force(ints, base, sequence, close_at, load(argmax, row)))
                store(flags, row, plan_flags(ints, base, load(argmax, row)))
                store(grammar, row, load(ints, base + HAS_GRAMMAR))
                plan = plan_code(ints, base)
            keep_row(
                row, slot, j, depth, row_token, stats, argmax, masked, ints, drafts, pending, pending_argmax,
                pending_plan, plan,
            )  # fmt: skip
            kept = j + 1
    return kept

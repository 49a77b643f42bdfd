"""What a request's slot holds: the columns of the two state arrays, and the codes in them.

A slot is one row of `ints` (int32) and one row of `floats` (float64). The first block of either row is
written by the host when the request enters (its resolved policy), the second by the decision alone. Every
name below is a column offset; the portable functions of this package address state as
`load(ints, base + PHASE)`, so that one source runs under numba, Triton and plain Python (`portable.py`).

float64 is deliberate: sums stay exact over a million steps, and with fused multiply-add switched off a
CPU replay gives the GPU's verdict to the bit.
"""

N_REASONS = 24  # StopReason codes fit in here; one stop token id per code
CYCLE_PERIODS = 64  # longest period that rule 7 looks for, and the length of the token ring
CLOSE_MAX = 128  # longest closing sequence

# --- ints: policy (host-written) ------------------------------------------------------------------
(
    MODE,  # MODE_* bits
    SCOPE,  # 1: the budget counts thinking tokens, 0: every generated token
    MIN_TOKENS,  # rules 2 to 5 and 7 rest before
    WINDOW,  # tokens in a confidence window
    PATIENCE,  # consecutive windows or units that must agree
    GRACE,  # tokens to wait for a safe place
    HARD_GRACE,  # the same inside a code point, fence, JSON value or tool call
    ADAPT,  # 1: adapt the budget once, after ADAPT_WINDOW tokens
    ADAPT_WINDOW,
    ANSWER_ROOM,  # tokens kept for the answer; 0 = off
    LIMIT,  # most tokens the request can generate: min(max_tokens, context - prompt)
    MIN_END,  # vLLM's min_tokens: no end before it
    FINISH,  # FINISH_*
    HAS_GRAMMAR,  # 1: structured outputs; nothing is forced against the grammar
    NEEDS_SIMILARITY,  # 1: some rule or trace reads unit similarity
    REPETITION,  # 1: rule 7 is on
    EPOCH,  # admission counter of the slot, names its owner to the publisher
    PROMPT_LEN,
    STOP_IDS,  # N_REASONS columns: the token that ends the request, per reason code
) = range(19)
COMMAND = STOP_IDS + N_REASONS  # reason code of an outside wish to stop, 0 = none

# --- ints: state ----------------------------------------------------------------------------------
(
    PHASE,  # PHASE_*
    SEEN,  # total length (prompt + output) folded in so far
    TOKENS,  # generated tokens folded in
    REASONING,  # of these, thinking tokens without tags
    THINKING,  # 1 inside a thinking block, after the last judged token
    TAGGED,  # the same after the last scanned token: a step scans all its tokens before it judges the first
    OUR_CLOSE,  # 1: the last close of the thinking was ours
    REASON,  # code of the reason for ENDING, 0 = none
    VERDICT,  # code of the last reason that was acted on
    CAME_FROM,  # the phase that ENDING left: RUN or ANSWERING
    OWED,  # O_* bits that were raised before the first step and have not been told yet
    CURSOR,  # next position in the closing sequence
    CLOSE_KIND,  # CLOSE_*
    WAITED,  # tokens spent in ENDING
    DEFERRED,  # 1: stop_deferred was signalled for this ending
    WARNED,  # 1: the budget warning went out
    ADAPTED,  # 1: the budget was adapted
    ADAPT_N,  # valid statistics in the adaptation window
    WINDOW_N,  # valid statistics in the open confidence window
    LOW_STREAK,
    SIMILAR_STREAK,
    CONFIDENT_STREAK,
    HOPELESS_STREAK,
    UNIT_STATS,  # valid statistics in the open unit
    UNITS,  # units ended so far
    WOULD_REASON,  # observe and audit: the first reason that would have stopped
    REBUILT,  # 1: state was rebuilt after a preemption
    # text automaton
    LINE,  # LINE_*
    MARKS,  # consecutive '#', rule marks
    TICKS,  # consecutive backticks
    INLINE,  # 1 inside `inline code`
    FENCE,  # 1 inside a code fence
    JSON_TRY,  # 1/2: a line began with { or [ and the next symbol decides
    JSON_DEPTH,
    JSON_STRING,
    JSON_ESCAPE,
    SENTENCE,  # 0 none, 1 after a terminator that the next token must confirm, 2 after a full one
    WORD,  # letters in the open word, capped at 2
    DIGITS,  # 1: the last symbol was a digit
    DANGLING,  # 1: the last content ended with a colon or was a heading
    TOOL,  # 1 inside a tool call
    UTF8_NEED,  # continuation bytes that the open code point still needs
    CODE,  # bits of a code point whose bytes come in several tokens
    CODE_NEED,  # bytes that it still needs, as the text automaton saw it
    UNIT_TOKENS,  # tokens in the open unit
    UNIT_STRICT,  # 1: the open unit touched a fence, JSON or a tool call
    UNIT_GRAMS,  # 4-grams in the open unit
    UNIT_NEW,  # of these, not seen before in this response
) = range(COMMAND + 1, COMMAND + 49)
RING = COMMAND + 49  # last CYCLE_PERIODS tokens, at token index modulo CYCLE_PERIODS
RUNS = RING + CYCLE_PERIODS  # per period p: tokens in a row that equal the one p before
N_INTS = RUNS + CYCLE_PERIODS

# --- floats: policy (host-written; NaN = the rule is off) ------------------------------------------
(
    BUDGET0,  # cost units, +inf = none
    WARN_AT,
    FLOOR,  # rule 2: relative windowed top-1
    SIMILARITY,  # rule 3: cosine
    NOVELTY,  # rule 3: share of unseen 4-grams
    REF_TOP1,  # references of the task
    REF_ENTROPY,
    W_CONFIDENCE,  # rule 4: weights of the score
    W_ENTROPY,
    W_SIMILARITY,
    W_MARGIN,
    W_LENGTH,
    W_BIAS,
    CONFIDENT_AT,  # rule 4: certified thresholds, on the logit scale of the score
    HOPELESS_AT,
    EXTRA,  # budget added from outside, not yet taken in
) = range(16)

# --- floats: state --------------------------------------------------------------------------------
(
    BUDGET,
    USED,
    ROOM_UNTIL,  # response scope: `used` up to which an answer may run after our close
    WINDOW_TOP1,  # sums of the open window
    WINDOW_ENTROPY,
    ADAPT_ENTROPY,
    UNIT_TOP1,
    UNIT_ENTROPY,
    LAST_CONFIDENCE,  # mean top-1 of the last full window
    LAST_ENTROPY,  # its mean entropy
    LAST_SIMILARITY,
    LAST_NOVELTY,
    LAST_MARGIN,
    LAST_SCORE,
) = range(16, 30)
N_FLOATS = 30

# --- codes ----------------------------------------------------------------------------------------
MODE_ON, MODE_OBSERVE, MODE_AUDIT = 1, 2, 4
PHASE_RUN, PHASE_ENDING, PHASE_CLOSING, PHASE_ANSWERING, PHASE_DONE = 0, 1, 2, 3, 4
FINISH_AUTO, FINISH_CLOSE, FINISH_END = 0, 1, 2
CLOSE_NONE, CLOSE_THINKING, CLOSE_STOP = 0, 1, 2
LINE_FRESH, LINE_TEXT, LINE_DIGITS, LINE_HASHES, LINE_RULE, LINE_TICKS, LINE_HEADING = 0, 1, 2, 3, 4, 5, 6
LINE_NUMBERED = 7  # after the "1." or "1)" of a list

# What one committed token did to the text (int32 bits; traces record them).
E_THINK = 1  # counts as a thinking token
E_OPEN = 2  # completed the tag that opens the thinking
E_SHUT = 4  # completed the tag that closes it, or an implicit end such as a tool call
E_EOS = 8
E_UNIT = 16  # a semantic unit ends after this token
E_SAFE = 32  # blank line, closed fence or complete JSON value: a unit-quality place to stop
E_SENTENCE = 64  # after a sentence terminator that the next token must confirm
E_FULL = 128  # after a terminator that needs no confirmation (CJK)
E_LINE = 256  # a line ended
E_BUSY = 512  # inside a code point, a fence, JSON or a tool call
E_CYCLE = 1024  # exact cycle: 4 times and 64 tokens
E_LOOP = 2048  # exact cycle: 16 times and 512 tokens
E_STRICT = 4096  # the unit that ended touched a fence, JSON or a tool call
E_FORCED = 8192  # we forced this token: it is no evidence
E_TAG = 16384  # with E_SHUT: closed by the model's own tag, not by a tool call

# What one step of the decision has to tell (int32 bits; the publisher turns them into signals).
O_ADJUSTED, O_WARNING, O_DECIDED, O_DEFERRED, O_WOULD, O_PROGRESS = 1, 2, 4, 8, 16, 32
O_INVALID, O_CLOSING, O_CANCELLED, O_REBUILT, O_ACTIVE = 64, 128, 256, 512, 1024

# Statistics of a row, as the kernels write them (float32 columns of `Stats.values`).
S_TOP1, S_ENTROPY, S_MARGIN_THINK, S_MARGIN_EOS = 0, 1, 2, 3
N_STATS = 4
# Codes of signals.StopReason that the decision itself gives (a test holds them together).
RC_BUDGET, RC_LOW_CONFIDENCE, RC_CONVERGED, RC_CONFIDENT, RC_HOPELESS = 1, 2, 3, 4, 5
RC_REPETITION, RC_LENGTH_RESERVE, RC_INVALID_LOGITS = 7, 14, 16

ARGMAX_INVALID, ARGMAX_MISSING = -1, -2  # the row had NaN, +inf or nothing finite; there was no tap

# Per-row plan bits for `kernels.mask.write_rows`.
P_MOVE_EOS, P_MASK_RESERVED, P_INVALID = 1, 2, 4

# Per-token flags of the compiled tokenizer (`units.py`).
T_EOS, T_TOOL_OPEN, T_TOOL_CLOSE, T_SPECIAL, T_SPACE_FIRST = 1, 2, 4, 8, 16
T_UTF8_LEAD = 32  # 3 bits: the token is nothing but this many continuation bytes
T_UTF8_NEED = 256  # 3 bits: continuation bytes needed after the token
T_UTF8_FIRST = 2048  # 3 bits: continuation bytes at the token's start

# Symbols of the text automaton (`units.py` compiles tokens into strings of them).
(
    Y_LETTER,  # one letter
    Y_LETTERS,  # two or more
    Y_OTHER,
    Y_SPACE,
    Y_NEWLINE,
    Y_DIGIT,
    Y_HASH,
    Y_TICK,
    Y_RULE,  # - * _
    Y_BRACE,  # {
    Y_BRACKET,  # [
    Y_CLOSE,  # } ]
    Y_QUOTE,
    Y_BACKSLASH,
    Y_STOP,  # a full stop: ends a sentence unless it follows a number that opens the line or a lone letter
    Y_EXCLAIM,  # ! ?
    Y_FULLSTOP,  # terminators that need no confirmation (CJK, Devanagari, Arabic question mark)
    Y_CLOSER,  # ) and closing quotes
    Y_COLON,
) = range(19)

Y_BYTE = 32  # and up to 255 more: a raw byte of a code point that is split over tokens

# Columns of the per-step report that goes to the host (float64).
(
    R_SLOT,
    R_EPOCH,
    R_BITS,
    R_REASON,
    R_TOKENS,
    R_REASONING,
    R_USED,
    R_BUDGET,
    R_CONFIDENCE,
    R_ENTROPY,
    R_SIMILARITY,
    R_MARGIN,
    R_NOVELTY,
    R_SCORE,
    R_CLOSE_KIND,
    R_COMMITTED,
    R_NEXT,  # N_STATS + 1 columns: statistics and argmax of the row being sampled
) = range(17)
N_REPORT = R_NEXT + N_STATS + 1

# Columns of the per-token trace (float64), one row per committed token.
(Q_TOKEN, Q_TOP1, Q_ENTROPY, Q_MARGIN_THINK, Q_MARGIN_EOS, Q_ARGMAX, Q_EVENT, Q_SIMILARITY, Q_NOVELTY) = range(9)
N_TRACE = 9

# Columns of the model's `header` (int32): lengths of the tags and of the closing sequence, and sizes.
H_OPEN_LEN, H_SHUT_LEN, H_CLOSE_LEN, H_TAG_AT, H_VOCAB, H_COSTS, H_GRAM_SIZE, H_DEPTH = 0, 1, 2, 3, 4, 5, 6, 7
N_HEADER = 8

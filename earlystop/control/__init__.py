"""The decision: one portable source for V1, V2 and replay, and the slots that it runs over.

`layout` names the state; `text` and `scan` read tokens; `budget`, `rules` and `closing` are the rules and the phase
machine; `decide` is the decision on one token. Three programs run over a batch, once per request: `start` (slots that
were admitted or come back), `commit` (what the last step's rows turned into), then, behind the unit similarity
kernel, `step` (judge, and plan this step's rows; `drafts` plans those of draft tokens). `portable` holds the
primitives in which they are written, `lower` compiles them, `state` owns the tensors, `replay` runs recorded traces.

All arrays are flat; strides come with them. TABLE arrays belong to the model, SLOT arrays to the slots, ROW arrays to
this step:

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

"""The decision: one portable source for V1, V2 and replay, and the slots that it runs over.

`layout` names the state, `text` and `scan` read tokens, `budget`, `rules` and `closing` are the rules and the
phase machine, `decide` is one step, `programs` the loops over a batch; `lower` compiles them, `state` owns the
tensors.
"""

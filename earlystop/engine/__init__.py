"""The adapters to vLLM: the only place that imports it.

A logits row enters at `tap`, is measured in `earlystop.kernels`, tied to its slot by `rows_v1` or `rows_v2`,
judged by `earlystop.control`, and leaves as a masked row and a record to `publish`.
"""

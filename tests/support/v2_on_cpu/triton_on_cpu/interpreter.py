"""Three mends of Triton's interpreter, without which it refuses some of vLLM's own kernels."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def mend() -> None:
    """Applies the mends once in this process; the entry point that vLLM calls in every process."""
    if getattr(interpreter, "_mended_for_vllm", False):
        return
    interpreter._mended_for_vllm = True
    _cast_masks_to_bool()
    _yield_tensors_from_range()
    _reduce_rows_of_nan()


def _cast_masks_to_bool() -> None:
    """Masks made of 0/1 integers are legal in compiled Triton (grammars and n-gram drafts use them)."""
    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def as_bool(mask: Any) -> Any:
        if mask.data.dtype != np.bool_:
            mask.data = mask.data.astype(np.bool_)
        return mask

    builder.create_masked_load = lambda self, pointers, mask, *rest: load(self, pointers, as_bool(mask), *rest)
    builder.create_masked_store = lambda self, pointers, value, mask, *rest: store(
        self, pointers, value, as_bool(mask), *rest
    )


def _yield_tensors_from_range() -> None:
    """In compiled Triton the variable of a `tl.range` loop is an int32 tensor (top-k calls `.to` on it)."""
    patch_language = interpreter._patch_lang_core

    def patched(lang: Any, scope: Any) -> None:
        patch_language(lang, scope)
        plain_range = lang.range

        def tensor_range(*args: Any, **kwargs: Any) -> Iterator[Any]:
            for i in plain_range(*args, **kwargs):
                handle = interpreter.TensorHandle(np.array([i], dtype=np.int32), tl.int32)
                yield tl.core.tensor(handle, tl.int32)

        scope.set_attr(lang, "range", tensor_range)

    interpreter._patch_lang_core = patched


def _reduce_rows_of_nan() -> None:
    """An argmax over nothing but NaN has an answer on a GPU (the leftmost index, say); numpy raises."""
    min_max = interpreter.ReduceOps.min_max

    def patched(self: Any, values: Any, val_reduce_op: Any, idx_reduce_op: Any = None) -> Any:
        def index(data: Any, axis: int | None, keepdims: bool) -> Any:
            nothing = np.isnan(data).all(axis=axis, keepdims=True)
            return idx_reduce_op(np.where(nothing, 0, data), axis=axis, keepdims=keepdims)

        return min_max(self, values, val_reduce_op, index if idx_reduce_op else None)

    interpreter.ReduceOps.min_max = patched

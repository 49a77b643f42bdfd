"""Compiles the decision's Triton kernels for an H100/H200 without one. Run as a module, without TRITON_INTERPRET."""

from __future__ import annotations

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from earlystop.control import lower, triton_kernels

_FLOAT64 = ("floats", "novelty", "report", "trace")
_FLOAT32 = ("costs", "pending", "stats", "masked", "similarity")
_INT64 = ("row_pos", "token_base")


def type_of(name: str) -> str:
    """The type of a kernel's argument, as `Controller` passes it."""
    if name in ("n_rows", "scratch"):
        return "i32"
    if name in _FLOAT64:
        return "*fp64"
    if name in _FLOAT32:
        return "*fp32"
    return "*i64" if name in _INT64 else "*i32"


def build(kernel: Any) -> tuple[int, int]:
    """Bytes of PTX and of the cubin."""
    source = ASTSource(fn=kernel, signature={name: type_of(name) for name in kernel.arg_names}, constexprs={})
    options = {"num_warps": 1, "enable_fp_fusion": False}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptx = compiled.asm["ptx"]
    if "fma.rn.f64" in ptx:
        raise SystemExit("a fused multiply-add: the GPU would round differently")
    return len(ptx), len(compiled.asm["cubin"])


def main() -> None:
    """Builds all three."""
    for kernel in triton_kernels.KERNELS:
        name = kernel.__name__
        sys.stdout.write(f"{name} {build(lower.triton_namespace()[name])}\n")


if __name__ == "__main__":
    main()

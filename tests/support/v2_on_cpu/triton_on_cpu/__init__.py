"""A Triton backend named "cpu" for tests: vLLM's Model Runner V2 asks for one, and then runs without a GPU.

Kernels are run by Triton's interpreter, so `TRITON_INTERPRET=1` must be set. Nothing is compiled.
"""

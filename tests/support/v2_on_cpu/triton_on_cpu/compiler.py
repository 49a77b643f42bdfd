"""The backend's compiler, which Triton looks up by its base class; it must never be asked to compile."""

from typing import Any, NoReturn

# Under another name: Triton takes the one concrete subclass of BaseBackend that it finds in this module.
from triton.backends.compiler import BaseBackend as _BaseBackend
from triton.backends.compiler import GPUTarget


class InterpreterBackend(_BaseBackend):
    """Claims the target "cpu"."""

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        return target.backend == "cpu"

    def hash(self) -> str:
        return "interpreter"

    def parse_options(self, options: dict[str, Any]) -> dict[str, Any]:
        return options

    def add_stages(self, *_: Any) -> NoReturn:
        raise NotImplementedError("kernels are interpreted, never compiled: set TRITON_INTERPRET=1")

    def load_dialects(self, context: Any) -> None:
        pass

    def get_module_map(self) -> dict[str, Any]:
        return {}

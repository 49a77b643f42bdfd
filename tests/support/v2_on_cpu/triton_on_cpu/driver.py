"""The backend's driver: one device, the CPU, always active."""

from collections.abc import Callable
from types import ModuleType

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class InterpreterDriver(DriverBase):
    """What Triton and vLLM ask of a driver when no kernel is ever launched."""

    utils = None

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cpu", 0, 1)

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self) -> ModuleType:
        return torch.cpu

    def get_benchmarker(self) -> Callable[..., float]:
        # Autotuning: every configuration takes the same second.
        return lambda function, **_: (function(), 1.0)[1]

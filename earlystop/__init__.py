"""Stop paying for tokens that add nothing: calibrated early stopping inside stock vLLM.

Everything public is here; every other name of the package is private. Names are loaded on first use, so that
``import earlystop`` pulls in neither torch, triton nor vllm.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from earlystop.attach import attach, attach_each
    from earlystop.policy import Policy
    from earlystop.profile import Profile
    from earlystop.signals import Signal, StopReason
    from earlystop.summary import summarize
    from earlystop.watch import watch

__all__ = [
    "Policy",
    "Profile",
    "Signal",
    "StopReason",
    "attach",
    "attach_each",
    "summarize",
    "watch",
]
__version__ = "0.1.0"

_HOME = {
    "Policy": "policy",
    "Profile": "profile",
    "Signal": "signals",
    "StopReason": "signals",
    "attach": "attach",
    "attach_each": "attach",
    "summarize": "summary",
    "watch": "watch",
}


class _Package(ModuleType):
    """The functions `attach` and `watch` share their names with the modules that hold them.

    Importing such a module binds it here, over the function; this binds the function instead.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _HOME and isinstance(value, ModuleType):
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'earlystop' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"earlystop.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

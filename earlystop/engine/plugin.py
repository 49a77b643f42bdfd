"""vLLM's two entry points. Nothing here raises at load: a plugin that cannot work is inert, and says so once."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from earlystop.engine import compat
from earlystop.engine.compat import logger

try:
    from vllm.v1.sample.logits_processor.interface import LogitsProcessor as V1Interface
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor as V2Interface
except ImportError as error:  # another vLLM: an entry point that raises would keep its engine from starting
    from vllm.v1.sample.logits_processor import LogitsProcessor as V1Interface

    class V2Interface:  # type: ignore[no-redef]
        """Stands in where this vLLM has no such interface."""

    _IMPORT_ERROR: str | None = f"this vLLM lacks an interface that earlystop needs ({error})"
else:
    _IMPORT_ERROR = None

if TYPE_CHECKING:
    import torch
    from vllm.sampling_params import SamplingParams

    from earlystop.engine.processor import Processor
    from earlystop.engine.rows_v1 import V1Rows
    from earlystop.engine.rows_v2 import V2Rows

_working: weakref.WeakSet[EarlyStopLogitsProcessor] = weakref.WeakSet()


def live_processors() -> list[Processor]:
    """The processors at work in this process (one per engine whose worker lives here)."""
    return [rows.processor for rows in (instance._rows for instance in _working) if rows is not None]


class EarlyStopLogitsProcessor(V1Interface, V2Interface):
    """One class for both runners, told apart by what vLLM hands to its constructor.

    V1 gives `(vllm_config, device, is_pin_memory)`, V2 `(vllm_config, req_states)`.
    """

    def __init__(self, vllm_config: Any, second: Any, is_pin_memory: bool | None = None) -> None:
        self._rows: V1Rows | V2Rows | None = None
        self._vllm_config = vllm_config
        why_not = self._why_not(vllm_config)
        if why_not is not None:
            logger.warning("earlystop is inert: %s", why_not)
            return
        try:
            if is_pin_memory is None:
                from earlystop.engine.rows_v2 import V2Rows

                self._rows = V2Rows(vllm_config, second)
            else:
                from earlystop.engine.rows_v1 import V1Rows

                self._rows = V1Rows(vllm_config, second)
            _working.add(self)
        except Exception:
            logger.exception("earlystop is inert: it could not start under this engine")

    @staticmethod
    def _why_not(vllm_config: Any) -> str | None:
        if compat.disabled():
            return "EARLYSTOP_DISABLE=1"
        if _IMPORT_ERROR is not None:
            return _IMPORT_ERROR
        if any(instance._vllm_config is vllm_config for instance in _working):
            return "it is loaded twice, by entry point and explicitly; the first instance works"
        return compat.unsupported_reason()

    @property
    def working(self) -> bool:
        """Whether this instance decides anything."""
        return self._rows is not None

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Refuses bad keys of ours at admission (HTTP 400)."""
        if compat.disabled():
            return
        from earlystop.engine.admission import validate

        validate(sampling_params)

    # --- V1 ---------------------------------------------------------------------------------------

    def is_argmax_invariant(self) -> bool:
        """False: a forced token changes the argmax."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """V1: the batch changed."""
        self._guarded("update_state", None, batch_update)

    # --- V2 ---------------------------------------------------------------------------------------

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """V2: a request enters a slot; True when opted in."""
        return bool(self._guarded("add_request", False, req_idx, sampling_params))

    def apply_staged_writes(self) -> None:
        """V2: before the forward pass of a step with new requests."""
        self._guarded("apply_staged_writes", None)

    # --- both -------------------------------------------------------------------------------------

    def apply(self, logits: torch.Tensor, ctx: Any = None) -> torch.Tensor:
        """Judges the batch and writes forced tokens and masks into `logits`, in place."""
        arguments = (logits,) if ctx is None else (logits, ctx)
        written: torch.Tensor = self._guarded("apply", logits, *arguments)
        return written

    def _guarded(self, method: str, otherwise: Any, *arguments: Any) -> Any:
        """Calls the adapter; what fails there ends early stopping, never a request (docs/how-it-works.md)."""
        if self._rows is None:
            return otherwise
        try:
            return getattr(self._rows, method)(*arguments)
        except Exception as error:
            rows, self._rows = self._rows, None
            rows.processor.fault(method, error, None)
            return otherwise


def register() -> None:
    """vLLM's general plugin: installs the tap. Runs in every process, and may run again."""
    if compat.disabled() or compat.unsupported_reason() is not None:
        return
    try:
        from earlystop.bus import pin_endpoint
        from earlystop.engine import commands, tap

        commands.control_key()
        pin_endpoint()  # the engine's processes inherit it, and `summarize` in the driver finds their bus
        tap.register()
    except Exception:
        logger.exception("earlystop's tap could not be installed: no unit similarity")

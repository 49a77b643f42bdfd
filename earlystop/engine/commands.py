"""Outside wishes: stop a stream now, or extend its budget.

They reach every rank in one order. In-band, a wish is a one-token request whose `earlystop_control` key every
rank sees at admission, with no drain of the steps in flight; the worker extension brings the same wish by
`collective_rpc`.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

from earlystop.errors import ConfigError
from earlystop.signals import StopReason

if TYPE_CHECKING:
    from earlystop.policy import Policy

KEY_ENV = "EARLYSTOP_CONTROL_KEY"  # made once, before the engine's processes start, which inherit it
_BY_NAME = {str(reason): reason for reason in StopReason}


def control_key() -> str:
    """What tells our own control requests from a client's; the same in all processes of an engine."""
    if not os.environ.get(KEY_ENV):
        os.environ[KEY_ENV] = secrets.token_hex(16)
    return os.environ[KEY_ENV]


@dataclass(frozen=True)
class Command:
    """One wish for all running children of a stream."""

    stream: str
    reason: StopReason | None = None
    extra: float = 0.0

    @classmethod
    def stop(cls, stream: str, reason: StopReason = StopReason.REQUESTED) -> Command:
        """End gracefully, for `reason`."""
        return cls(stream, reason=reason)

    @classmethod
    def extend(cls, stream: str, extra: float) -> Command:
        """Add `extra` cost units to the budget."""
        return cls(stream, extra=extra)

    def encode(self) -> str:
        """The value of the in-band key `earlystop_control`."""
        return json.dumps({"id": self.stream, "stop": self.reason, "extend": self.extra, "key": control_key()})

    @classmethod
    def decode(cls, text: str) -> Command:
        """Reads `encode`'s output.

        Raises:
            ConfigError: anything else.
        """
        try:
            fields = json.loads(text)
            reason, extra = fields["stop"], float(fields["extend"])
            sane = 0.0 <= extra < float("inf") and isinstance(fields["id"], str)
            if not sane or not hmac.compare_digest(str(fields["key"]), control_key()):
                raise ValueError
            return cls(fields["id"], reason=_BY_NAME[reason] if reason else None, extra=extra)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            # `from None`: the text holds the key
            raise ConfigError(
                "earlystop_control: this key is made by earlystop's own code only; leave it out"
            ) from None

    @classmethod
    def read(cls, policy: Policy | None) -> Command | None:
        """The wish that a request carries, or None."""
        return None if policy is None or policy.control is None else cls.decode(policy.control)

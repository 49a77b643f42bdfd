"""Every error that earlystop raises on purpose."""

from __future__ import annotations


class EarlyStopError(Exception):
    """The root of the tree: catch this to catch everything of ours.

    ::

        EarlyStopError
        ├── ConfigError (ValueError)   a key, policy or configuration that cannot be accepted (HTTP 400)
        ├── ProfileError               a profile file that is broken, or that is not a profile
        ├── GuaranteeError             a guarantee that the data cannot carry
        ├── IncompatibleEngineError    a vLLM, or a way of running it, that we do not support
        └── StreamError                a signal stream that is broken, has gaps, or cannot be resumed
    """


class ConfigError(EarlyStopError, ValueError):
    """A key, policy or configuration that cannot be accepted.

    It is a ``ValueError`` because vLLM answers those with HTTP 400 at admission.

    Args:
        message: What was got, what is allowed, what to do.
        field: The offending field's name, where one field is to blame.
    """

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class ProfileError(EarlyStopError):
    """A profile file that is broken, or that is not a profile.

    Args:
        message: The file and the field, what was got, what is allowed, what to do.
        field: The offending field's path inside the profile, where one field is to blame.
    """

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class GuaranteeError(EarlyStopError):
    """A guarantee that the data cannot carry.

    Args:
        message: What was asked, why it is refused, what would do.
        n: Questions at hand.
        epsilon: The loss asked for, in [0, 1].
        delta: The allowed probability of a wrong certificate, in (0, 1).
        n_needed: Questions that would be enough, where that can be said.
    """

    def __init__(
        self,
        message: str,
        *,
        n: int | None = None,
        epsilon: float | None = None,
        delta: float | None = None,
        n_needed: int | None = None,
    ) -> None:
        super().__init__(message)
        self.n = n
        self.epsilon = epsilon
        self.delta = delta
        self.n_needed = n_needed


class IncompatibleEngineError(EarlyStopError):
    """A vLLM version, or a way of running it, that we do not support."""


class StreamError(EarlyStopError):
    """A signal stream that is broken, has gaps, or cannot be resumed."""

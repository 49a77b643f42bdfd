"""What a request asks for: the per-request keys, their types and ranges.

Offline the keys travel in ``SamplingParams.extra_args``, over HTTP in ``vllm_xargs``. HTTP carries only strings,
numbers and flat lists of them, so the keys are flat: ``earlystop`` (the field `policy`) and ``earlystop_<field>``, with
0 and 1 for flags. What the values come to, together with server and profile, is decided in `earlystop.resolve`.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import msgspec

from earlystop.errors import ConfigError

PREFIX = "earlystop"
PRESETS = ("off", "observe", "classic", "balanced", "aggressive")
"""The built-in policies; every other name is a configured profile's."""

MAX_TOKENS = 10_000_000
"""No count of tokens is larger; far beyond any context, so that a huge value is a mistake."""
MAX_BUDGET = 1e9
"""No budget in cost units is larger."""


class FieldSpec(NamedTuple):
    """What one field may hold: its type, and either a range or a list of choices."""

    type: Literal["int", "number", "flag", "choice", "text"]
    low: float = 0
    high: float = 0
    open_low: bool = False
    choices: tuple[str, ...] = ()

    @property
    def allowed(self) -> str:
        """The allowed values in words."""
        if self.type == "flag":
            return "0 or 1"
        if self.type == "choice":
            return "one of " + ", ".join(self.choices)
        if self.type == "text":
            return f"a string of 1 to {self.high:.0f} printable characters"
        name = "a whole number" if self.type == "int" else "a number"
        return f"{name} in {'(' if self.open_low else '['}{self.low:.10g}, {self.high:.10g}]"


_TOKENS = FieldSpec("int", 0, MAX_TOKENS)
_FLAG = FieldSpec("flag")
_BUDGET = FieldSpec("number", 0, MAX_BUDGET)
_NAME = FieldSpec("text", high=128)

FIELDS: dict[str, FieldSpec] = {
    "policy": _NAME,
    "task": _NAME,
    "budget": _BUDGET,
    "budget_scope": FieldSpec("choice", choices=("auto", "thinking", "response")),
    "warn_at": FieldSpec("number", 0, 1, open_low=True),
    "adapt": _FLAG,
    "adapt_window": FieldSpec("int", 1, MAX_TOKENS),
    "min_tokens": _TOKENS,
    "window": FieldSpec("int", 1, 65_536),
    "confidence_floor": FieldSpec("number", 0, 1),
    "similarity": FieldSpec("number", -1, 1),
    "novelty": FieldSpec("number", 0, 1),
    "patience": FieldSpec("int", 1, 10_000),
    "finish": FieldSpec("choice", choices=("auto", "close_thinking", "end")),
    "grace": _TOKENS,
    "hard_grace": _TOKENS,
    "answer_room": _TOKENS,
    "max_loss": FieldSpec("number", 0, 1, open_low=True),
    "audit": FieldSpec("number", 0, 1),
    "id": FieldSpec("text", high=256),
    "control": FieldSpec("text", high=4096),
    "stream": FieldSpec("choice", choices=("field", "event", "comment", "off")),
    "keep_terminator": _FLAG,
    "integrity": _FLAG,
    "resume": _FLAG,
    "session": FieldSpec("text", high=256),
    "session_budget": _BUDGET,
}
"""Every field of `Policy` and what it may hold."""

SERVING_FIELDS = ("stream", "keep_terminator", "integrity", "resume", "session", "session_budget")
"""Fields that only ``earlystop serve`` understands; without its middleware they are refused."""


class Policy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one request asks for; a field that is None was not given and is filled on resolution.

    Immutable, hashable, and validated when made. Flags are 0 or 1, never booleans: over HTTP they travel as numbers.

    Raises:
        ConfigError: A value of the wrong type or out of range, named in the error's ``field``.
    """

    policy: str | None = None
    """A preset (`PRESETS`) or the name of a configured profile; key ``earlystop``."""
    task: str | None = None
    """The profile's task; ``default`` if none is given."""
    budget: float | None = None
    """Cost units (tokens unless a cost table is loaded); 0 is a budget of zero, None is none."""
    budget_scope: Literal["auto", "thinking", "response"] | None = None
    """What counts; ``auto`` is thinking where the tokenizer has thinking tags."""
    warn_at: float | None = None
    """Share of the budget at which the warning goes out, (0, 1]."""
    adapt: Literal[0, 1] | None = None
    """Whether the budget adapts to the entropy of the first `adapt_window` tokens."""
    adapt_window: int | None = None
    """Tokens after which the budget adapts, once."""
    min_tokens: int | None = None
    """No stop by a signal rule before this many generated tokens."""
    window: int | None = None
    """Tokens in a confidence window (disjoint, undefined until full)."""
    confidence_floor: float | None = None
    """Lowest windowed top-1 relative to the task's reference; 0 never stops."""
    similarity: float | None = None
    """Cosine of consecutive units above which they count as the same; 1 never stops."""
    novelty: float | None = None
    """Share of a unit's 4-grams not yet seen, at or under which it brings nothing new."""
    patience: int | None = None
    """Consecutive units or windows that must agree."""
    finish: Literal["auto", "close_thinking", "end"] | None = None
    """How to end: close the thinking and let the model answer, or end the response."""
    grace: int | None = None
    """Most tokens to wait for a safe place to end."""
    hard_grace: int | None = None
    """The same inside a code point, fence, JSON value or tool call."""
    answer_room: int | None = None
    """Tokens kept for the answer inside max_tokens; 0 is off."""
    max_loss: float | None = None
    """The certified loss of accuracy to accept, (0, 1]."""
    audit: float | None = None
    """Share of requests whose signal rules only observe, [0, 1]."""
    id: str | None = None
    """Stream id; may repeat."""
    control: str | None = None
    """In-band control request, made by our own code."""
    stream: Literal["field", "event", "comment", "off"] | None = None
    """How signals ride in the response (serving only)."""
    keep_terminator: Literal[0, 1] | None = None
    """Keep the model's end marker in the content (serving only)."""
    integrity: Literal[0, 1] | None = None
    """Send the integrity trailer (serving only)."""
    resume: Literal[0, 1] | None = None
    """Make the stream resumable (serving only)."""
    session: str | None = None
    """Ledger across requests (serving only)."""
    session_budget: float | None = None
    """Cost units for the whole session (serving only)."""

    def __post_init__(self) -> None:
        for name, spec in FIELDS.items():
            value = getattr(self, name)
            if value is not None:
                msgspec.structs.force_setattr(self, name, _checked(name, spec, value))

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any], *, prefix: str = "") -> Policy:
        """A policy from field names and values, as in a configuration file.

        Args:
            fields: Field name to value; a value of None is as if not given.
            prefix: What to put before a field's name in an error.

        Raises:
            ConfigError: An unknown field, or a value that is not allowed.
        """
        for name in fields:
            if name not in FIELDS:
                raise ConfigError(_unknown(f"{prefix}{name}", [f"{prefix}{known}" for known in FIELDS]), field=name)
        return cls(**fields)

    @classmethod
    def from_extra_args(cls, extra_args: Mapping[str, Any] | None) -> Policy | None:
        """The policy that a request's keys ask for, or None if no key is ours.

        Args:
            extra_args: ``SamplingParams.extra_args``, or the ``vllm_xargs`` of an HTTP body. Keys that do not begin
                with ``earlystop`` are somebody else's and ignored.

        Raises:
            ConfigError: An unknown key with our prefix, or a value that is not allowed.
        """
        ours = [key for key in extra_args or () if isinstance(key, str) and key.startswith(PREFIX)]
        if not extra_args or not ours:
            return None
        fields: dict[str, Any] = {}
        for key in ours:
            name = _FIELD_OF_KEY.get(key)
            if name is None:
                raise ConfigError(_unknown(key, list(_FIELD_OF_KEY)), field=key)
            fields[name] = extra_args[key]
        return cls(**fields)

    def given(self) -> dict[str, Any]:
        """The fields that were given, by name."""
        return {name: value for name in FIELDS if (value := getattr(self, name)) is not None}

    def to_extra_args(self) -> dict[str, Any]:
        """The given fields as flat request keys; every value is a JSON string or number."""
        return {key_of(name): value for name, value in self.given().items()}

    def over(self, base: Policy) -> Policy:
        """This policy's given fields, and `base`'s for the rest."""
        return Policy(**{**base.given(), **self.given()})

    def serving_fields(self) -> tuple[str, ...]:
        """The given fields that only ``earlystop serve`` understands."""
        return tuple(name for name in SERVING_FIELDS if getattr(self, name) is not None)

    def refuse_serving_fields(self) -> None:
        """Refuse the fields that nobody acts on where the middleware is not installed.

        Raises:
            ConfigError: One of `SERVING_FIELDS` was given.
        """
        for name in self.serving_fields():
            raise ConfigError(
                f"{key_of(name)} was given, but only the server's middleware acts on it; start the server with "
                "`earlystop serve`, or leave the key out",
                field=name,
            )


def key_of(field: str) -> str:
    """The request key of a field: ``earlystop`` for `policy`, else ``earlystop_<field>``."""
    return PREFIX if field == "policy" else f"{PREFIX}_{field}"


_FIELD_OF_KEY = {key_of(name): name for name in FIELDS}


def _checked(name: str, spec: FieldSpec, value: Any) -> Any:
    """The value in its plain Python type, or a ConfigError that says what is allowed."""
    if isinstance(value, bool):
        raise _refused(name, spec, value, " (write 1 for true, 0 for false)" if spec.type == "flag" else "")
    if spec.type in ("choice", "text"):
        if not isinstance(value, str):
            raise _refused(name, spec, value)
        ok = value in spec.choices if spec.type == "choice" else 1 <= len(value) <= spec.high and value.isprintable()
        if not ok:
            raise _refused(name, spec, value)
        return str(value)
    kind: Any = numbers.Real if spec.type == "number" else numbers.Integral
    low, high = (0, 1) if spec.type == "flag" else (spec.low, spec.high)
    # NaN fails both comparisons; an int too large for a float compares exactly.
    if not isinstance(value, kind) or not low <= value <= high or (spec.open_low and value == low):
        raise _refused(name, spec, value)
    return float(value) if spec.type == "number" and not isinstance(value, int) else int(value)


def _refused(name: str, spec: FieldSpec, value: Any, hint: str = "") -> ConfigError:
    try:
        shown = repr(value)
    except ValueError:  # Python does not print integers of thousands of digits
        shown = "a huge number"
    if len(shown) > 80:
        shown = shown[:77] + "..."
    return ConfigError(
        f"{key_of(name)}={shown} ({type(value).__name__}) is not allowed: give {spec.allowed}{hint}, "
        "or leave the key out for the default",
        field=name,
    )


def _unknown(got: str, known: list[str]) -> str:
    import difflib  # only on the way to an error

    near = [PREFIX] if got == f"{PREFIX}_policy" else difflib.get_close_matches(got, known, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"unknown key {got!r}: {hint}Allowed are {', '.join(known)}"

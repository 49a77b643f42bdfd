"""A profile: what calibration learned about one model, and when it may be used.

One JSON file. It holds, for each task, the references that relative confidence and relative entropy are measured
against, optionally a score and a table of certified policies; and where all of it comes from.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from earlystop.errors import ProfileError
from earlystop.identity import Fit, Provenance, ServedIdentity, compare
from earlystop.policy import Policy

PROFILE_VERSION = 1
"""Version of the file's schema, its field `version`."""

CELL_FIELDS = frozenset(
    [
        "adapt",
        "adapt_window",
        "answer_room",
        "budget_scope",
        "confidence_floor",
        "finish",
        "grace",
        "hard_grace",
        "min_tokens",
        "novelty",
        "similarity",
        "warn_at",
        "window",
    ]
)
"""Fields of a request's policy that a certified cell may fix; it has its own for patience and budget."""

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Quantiles = tuple[tuple[Share, float], ...]
"""(level, value) pairs, both increasing."""


class References(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is normal for one task: statistics over every generated token of full, unstopped traces."""

    top1_mean: Annotated[float, msgspec.Meta(gt=0, le=1)]
    """Mean top-1 probability; the denominator of relative confidence."""
    entropy_mean: Annotated[float, msgspec.Meta(gt=0)]
    """Mean entropy in nats; the denominator of relative entropy."""
    top1_quantiles: Quantiles = ()
    """Quantiles of the top-1 probability."""
    entropy_quantiles: Quantiles = ()
    """Quantiles of the entropy, in nats."""
    n_tokens: Count = 0
    """Tokens that the means are taken over."""


class Score(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A logistic score of "the answer would be right if it ended here", in (0, 1)."""

    bias: float
    relative_confidence: float = 0.0
    """Weight of the windowed top-1 over the task's reference."""
    relative_entropy: float = 0.0
    """Weight of the windowed entropy over the task's reference."""
    similarity: float = 0.0
    """Weight of the cosine between the last two units."""
    end_margin: float = 0.0
    """Weight of top-1 logit minus ending token's logit, in nats."""
    length: float = 0.0
    """Weight of log(1 + generated tokens)."""

    def value(
        self,
        *,
        relative_confidence: float,
        relative_entropy: float,
        similarity: float,
        end_margin: float,
        tokens: int,
    ) -> float:
        """The score, ``1 / (1 + exp(-z))`` with z the weighted sum; NaN where a weighted input is NaN.

        This is the float64 reference of what the device computes.
        """
        terms = (
            (self.relative_confidence, relative_confidence),
            (self.relative_entropy, relative_entropy),
            (self.similarity, similarity),
            (self.end_margin, end_margin),
            (self.length, math.log1p(tokens)),
        )
        # A weight of zero must not turn an undefined input into an undefined score.
        z = self.bias + sum(weight * x for weight, x in terms if weight)
        return math.nan if math.isnan(z) else 0.5 * (1 + math.tanh(z / 2))


class CertifiedCell(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One certified policy: with probability at least 1 - delta its loss is at most `max_loss`."""

    max_loss: Annotated[float, msgspec.Meta(gt=0, le=1)]
    """The certified loss ε."""
    delta: Annotated[float, msgspec.Meta(gt=0, lt=1)]
    """Probability of a wrong certificate, over the calibration questions."""
    n: Annotated[int, msgspec.Meta(ge=1)]
    """Questions of the certify part."""
    risk: Literal["accuracy_drop", "flips", "inconsistency"] = "accuracy_drop"
    """What the loss is: accuracy of full minus accuracy of the policy, right-to-wrong flips, or changed answers."""
    patience: Annotated[int, msgspec.Meta(ge=1)]
    """Consecutive boundaries that must agree."""
    confident_threshold: Share | None = None
    """Score at or above which a boundary counts as confident."""
    hopeless_threshold: Share | None = None
    """Score at or below which a boundary counts as hopeless."""
    budget: Annotated[float, msgspec.Meta(ge=0)] | None = None
    """Budget in cost units, part of the certified policy; None is none."""
    policy: Policy | None = None
    """The other fields of the certified policy that differ from the built-in ones (grace, similarity, ...)."""
    bound: Share | None = None
    """Upper confidence bound of the risk, at most `max_loss`."""
    p_value: Share
    """p-value of "the risk exceeds `max_loss`"."""
    savings: Annotated[float, msgspec.Meta(le=1)] | None = None
    """Share of the tokens saved, on the report part."""


class TaskProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is known about one task."""

    references: References | None = None
    score: Score | None = None
    certified: tuple[CertifiedCell, ...] = ()
    """The cells offered together; each was tested at delta / (number of cells)."""

    def cell(self, max_loss: float) -> CertifiedCell | None:
        """The cell with the largest certified loss that is at most `max_loss`, or None."""
        fitting = [cell for cell in self.certified if cell.max_loss <= max_loss * (1 + 1e-9)]
        return max(fitting, key=lambda cell: cell.max_loss, default=None)


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What calibration learned about one model; see `load`, `save`, `fits`."""

    version: int = PROFILE_VERSION
    name: str = ""
    provenance: Provenance
    tasks: dict[str, TaskProfile]
    similarity_centre: tuple[float, ...] | None = None
    """Subtracted from hidden states before the cosine; [hidden size]."""
    costs: tuple[float, ...] | None = None
    """Cost units per token id; [vocabulary]."""

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Read and validate a profile file.

        Raises:
            ProfileError: The file cannot be read, is not JSON, or a field is missing, unknown, of the wrong type or
                out of range; the message names file and field.
        """
        try:
            raw = msgspec.json.decode(Path(path).read_bytes())
        except OSError as error:
            raise ProfileError(f"profile {path} cannot be read: {error.strerror or error}") from error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ProfileError(
                f"profile {path} is not valid JSON ({error}); it may be truncated: make it again"
            ) from error
        return cls.from_dict(raw, where=str(path))

    @classmethod
    def from_dict(cls, raw: object, *, where: str = "given") -> Profile:
        """A validated profile from plain JSON types.

        Args:
            raw: The decoded JSON document.
            where: What to call it in an error.

        Raises:
            ProfileError: As for `load`.
        """
        if not isinstance(raw, dict):
            raise ProfileError(f"profile {where} holds {type(raw).__name__}, not an object: this is no profile")
        version = raw.get("version")
        if version != PROFILE_VERSION or isinstance(version, bool):
            raise ProfileError(
                f"profile {where}: field version is {version!r}, this earlystop reads version {PROFILE_VERSION}; "
                "make the profile again, or install the earlystop that wrote it",
                field="version",
            )
        try:
            profile = msgspec.convert(raw, cls)
        except msgspec.ValidationError as error:
            reason, _, path = str(error).partition(" - at ")
            field = path.strip("`").removeprefix("$").removeprefix(".") or None
            raise ProfileError(f"profile {where}: field {field or '(top level)'}: {reason}", field=field) from error
        profile.validate(where=where)
        return profile

    def save(self, path: str | os.PathLike[str]) -> None:
        """Validate and write the profile as indented JSON; the file is replaced whole or not at all.

        Raises:
            ProfileError: The profile is not valid, or the file cannot be written.
        """
        self.validate(where=str(path))
        text = msgspec.json.format(msgspec.json.encode(self, order="sorted"), indent=2) + b"\n"
        part = Path(f"{path}.{os.getpid()}.part")
        try:
            part.write_bytes(text)
            part.replace(path)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise ProfileError(f"profile {path} cannot be written: {error.strerror or error}") from error

    def validate(self, *, where: str = "given") -> None:
        """Check what types alone cannot say: finite numbers, ordered quantiles, cells that have what they need.

        Raises:
            ProfileError: Names the field, what it holds, and what is allowed.
        """

        def refuse(field: str, message: str) -> ProfileError:
            return ProfileError(f"profile {where}: field {field}: {message}", field=field)

        for field, number in _numbers(msgspec.to_builtins(self), ""):
            if not math.isfinite(number):
                raise refuse(field, f"{number} is not a finite number")
        if self.version != PROFILE_VERSION:
            raise refuse("version", f"{self.version} is not {PROFILE_VERSION}")
        if not self.tasks:
            raise refuse("tasks", "a profile needs at least one task")
        for i, cost in enumerate(self.costs or ()):
            if cost < 0:
                raise refuse(f"costs[{i}]", f"{cost} is negative; a token costs 0 or more")
        for name, task in self.tasks.items():
            for field, message in _task_faults(task):
                raise refuse(f"tasks.{name}.{field}", message)

    def fits(self, identity: ServedIdentity | None, task: str = "default") -> Fit:
        """Whether this profile speaks for what is served.

        Args:
            identity: What is served, for one request; None if unknown, which nothing fits.
            task: The request's task.

        Returns:
            `Fit`: whether the references, and whether the certified cells, may be used, and why not.
        """
        fit = compare(self.provenance, identity)
        if task not in self.tasks:
            known = ", ".join(sorted(self.tasks))
            return Fit(False, False, (f"the profile has no task {task!r} (it has {known})", *fit.reasons), fit.notes)
        return fit


def _task_faults(task: TaskProfile) -> list[tuple[str, str]]:
    """What is wrong with a task, as (field, message)."""
    faults = []
    if task.references is not None:
        for field in ("top1_quantiles", "entropy_quantiles"):
            pairs = getattr(task.references, field)
            ordered = all(a[0] < b[0] and a[1] <= b[1] for a, b in pairwise(pairs))
            if not ordered:
                faults.append((f"references.{field}", "levels and values must increase"))
    losses = [cell.max_loss for cell in task.certified]
    if len(set(losses)) != len(losses):
        faults.append(("certified", "two cells certify the same max_loss; keep one"))
    for i, cell in enumerate(task.certified):
        misplaced = sorted(set(cell.policy.given()) - CELL_FIELDS) if cell.policy else []
        if misplaced:
            faults.append((f"certified[{i}].policy.{misplaced[0]}", "no field of a cell's policy"))
        exits = (cell.confident_threshold, cell.hopeless_threshold)
        if exits != (None, None) and task.score is None:
            faults.append((f"certified[{i}]", "a threshold needs the task's score"))
        if None not in exits and cell.hopeless_threshold >= cell.confident_threshold:  # type: ignore[operator]
            faults.append((f"certified[{i}].hopeless_threshold", "must be below confident_threshold"))
        needs = task.score is not None and (task.score.relative_confidence or task.score.relative_entropy)
        if exits != (None, None) and needs and task.references is None:
            faults.append((f"certified[{i}]", "the score measures against references, which the task lacks"))
        if cell.bound is not None and cell.bound > cell.max_loss:
            faults.append((f"certified[{i}].bound", f"{cell.bound} is above max_loss {cell.max_loss}"))
        if cell.p_value > cell.delta:
            faults.append((f"certified[{i}].p_value", f"{cell.p_value} is above delta {cell.delta}: not certified"))
    return faults


def _numbers(value: Any, path: str) -> list[tuple[str, float]]:
    """Every float below a plain JSON value, with its path."""
    if isinstance(value, float):
        return [(path, value)]
    if isinstance(value, Mapping):
        return [x for key, item in value.items() for x in _numbers(item, f"{path}.{key}" if path else str(key))]
    if isinstance(value, list | tuple):
        return [x for i, item in enumerate(value) for x in _numbers(item, f"{path}[{i}]")]
    return []

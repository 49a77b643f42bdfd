"""From what a request asks for to what is done: every value concrete, and why.

Precedence is request > server > profile > built-in, field by field. A preset's values are built-in ones.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import msgspec

from earlystop.config import Config
from earlystop.errors import ConfigError
from earlystop.identity import ServedIdentity
from earlystop.policy import PRESETS, SERVING_FIELDS, Policy, key_of
from earlystop.profile import CertifiedCell, Profile
from earlystop.resolved import Resolved, is_audited

__all__ = ["ADAPT_DOWN", "ADAPT_UP", "BUILT_IN", "CLASSIC", "Resolved", "is_audited", "resolve"]

BUILT_IN: dict[str, Any] = {
    "task": "default",
    "budget": None,
    "budget_scope": "auto",
    "warn_at": 0.8,
    "adapt": 1,
    "adapt_window": 100,
    "min_tokens": 64,
    "window": 32,
    "confidence_floor": None,
    "similarity": None,
    "novelty": 0.1,
    "patience": 2,
    "finish": "auto",
    "grace": 64,
    "hard_grace": 2048,
    "answer_room": None,
    "max_loss": None,
    "audit": None,
}
"""Values of the fields that nobody gave (design: §2, the table of keys); None is decided below."""

CLASSIC: dict[str, Any] = {"confidence_floor": 0.5, "similarity": 0.95}
"""What the published rule set adds to `BUILT_IN`; its warning and its adaptation are `BUILT_IN`'s."""
ADAPT_UP = (1.2, 1.3)
"""Mean entropy above 1.2 × the reference: the budget times 1.3."""
ADAPT_DOWN = (0.7, 0.8)
"""Mean entropy below 0.7 × the reference: the budget times 0.8."""

PRESET_LOSS = {"balanced": 0.01, "aggressive": 0.05}
CERTIFIED_AUDIT = 0.01
"""Audited share where a certified profile stops (design: §10, *audit*)."""

_FREE = frozenset({"policy", "max_loss", "task", "warn_at", "id", "audit", "control", *SERVING_FIELDS})
"""Fields that may be given without voiding a guarantee (design: §10)."""
_BINDING = frozenset(BUILT_IN) - {"task"}
"""Fields that do something, and so need a policy to act in."""


class _Chosen(NamedTuple):
    """The profile picked for a request, and what of it may be used."""

    name: str | None = None
    profile: Profile | None = None
    certified: bool = False
    reasons: tuple[str, ...] = ()


def resolve(
    request: Policy | None,
    config: Config,
    profiles: Mapping[str, Profile],
    identity: ServedIdentity | None,
    *,
    profiles_unverifiable: bool = False,
) -> Resolved | None:
    """Resolve one request.

    Args:
        request: What the request asks for, None if it has no key of ours.
        config: The server's configuration.
        profiles: The loaded profiles by name, in order of preference (`Config.load_profiles`).
        identity: What is served to this request; None if unknown, and then no profile fits.
        profiles_unverifiable: Whether profiles may exist that are not known here (design: §2, *Configuration*). Then
            an unknown name observes, with a warning, instead of being refused.

    Returns:
        The resolved policy, or None where early stopping is off for this request.

    Raises:
        ConfigError: An unknown preset or profile, a loss that is not certified, or keys that would do nothing because
            no policy is named.
    """
    if config.disabled:
        return None
    asked = (request or Policy()).over(config.server)
    name = asked.policy
    if name is None:
        _refuse_idle_keys(request)
        return None
    if name == "off":
        return None
    if name not in PRESETS and name not in profiles:
        if not profiles_unverifiable:
            raise _unknown_policy(name, profiles)
        unknown = f"no preset or profile is called {name!r}; this request is only observed"
        return _fill(asked, "observe", "observe", _Chosen(), None, identity, [unknown])
    mode: Literal["observe", "active"] = "observe" if name == "observe" else "active"
    chosen = _choose(name, profiles, identity, asked.task or "default")
    warnings: list[str] = []
    cell = None if name == "classic" else _cell(name, asked, chosen, profiles, warnings)
    if name == "classic" and asked.max_loss is not None:
        warnings.append(f"{key_of('max_loss')} has no effect in classic, which is not certified; name balanced")
    if name == "classic" and profiles and chosen.profile is None:
        warnings.append(f"classic's confidence and adaptation rules rest: {'; '.join(chosen.reasons)}")
    return _fill(asked, name, mode, chosen, cell, identity, warnings)


def _refuse_idle_keys(request: Policy | None) -> None:
    idle = [name for name in (request or Policy()).given() if name in _BINDING]
    if idle:
        raise ConfigError(
            f"{key_of(idle[0])} was given, but no policy is named and the server has no default, so it would do "
            f"nothing; add {key_of('policy')}=classic (or one of {', '.join(PRESETS)}, or a profile's name)",
            field="policy",
        )


def _unknown_policy(name: str, profiles: Mapping[str, Profile]) -> ConfigError:
    near = difflib.get_close_matches(name, [*PRESETS, *profiles], n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    known = ", ".join(sorted(profiles)) or "none"
    return ConfigError(
        f"{key_of('policy')}={name!r} is neither a preset nor a profile.{hint} Presets: {', '.join(PRESETS)}; "
        f"profiles: {known}",
        field="policy",
    )


def _choose(name: str, profiles: Mapping[str, Profile], identity: ServedIdentity | None, task: str) -> _Chosen:
    """The profile to use: the named one, else the first that fits, one with certified cells before others."""
    candidates = {name: profiles[name]} if name in profiles else dict(profiles)
    usable, reasons = [], []
    for key, profile in candidates.items():
        fit = profile.fits(identity, task)
        if fit.references_ok:
            certified = fit.certified_ok and bool(profile.tasks[task].certified)
            usable.append(_Chosen(key, profile, certified, fit.reasons))
        reasons += [f"profile {key}: {reason}" for reason in fit.reasons]
    if not usable:
        return _Chosen(reasons=tuple(reasons))
    return next((chosen for chosen in usable if chosen.certified), usable[0])


def _cell(
    name: str, asked: Policy, chosen: _Chosen, profiles: Mapping[str, Profile], warnings: list[str]
) -> CertifiedCell | None:
    """The certified cell to use, or None with a warning; a loss asked for that nobody certified is refused."""
    task_name = asked.task or "default"
    offered = (
        chosen.profile.tasks[task_name].certified
        if chosen.profile is not None and chosen.certified
        else tuple(c for p in profiles.values() if (t := p.tasks.get(task_name)) for c in t.certified)
    )
    losses = sorted({cell.max_loss for cell in offered})
    if asked.max_loss is not None and not any(loss <= asked.max_loss * (1 + 1e-9) for loss in losses):
        grid = ", ".join(f"{loss:g}" for loss in losses) or "nothing"
        raise ConfigError(
            f"{key_of('max_loss')}={asked.max_loss:g} is not certified for task {task_name!r}: certified is {grid}; "
            "give one of these or more, or leave the key out",
            field="max_loss",
        )
    if chosen.profile is not None and chosen.certified:
        task = chosen.profile.tasks[task_name]
        wanted = asked.max_loss or PRESET_LOSS.get(name, PRESET_LOSS["balanced"])
        cell = task.cell(wanted)
        if cell is None and name not in PRESETS:
            cell = min(task.certified, key=lambda c: c.max_loss)  # what the profile has to offer
        if cell is None and name != "observe":
            grid = ", ".join(f"{loss:g}" for loss in losses)
            warnings.append(f"{name} needs a certified loss of {wanted:g}, certified is {grid}: budget only")
        return cell
    if name != "observe":
        why = "; ".join(chosen.reasons) or "no certified profile is configured"
        warnings.append(f"{name} has no certified profile that fits ({why}): budget only")
    return None


def _fill(
    asked: Policy,
    name: str,
    mode: Literal["observe", "active"],
    chosen: _Chosen,
    cell: CertifiedCell | None,
    identity: ServedIdentity | None,
    warnings: list[str],
) -> Resolved:
    """Every value by precedence, then the ones that depend on others."""
    rules = CLASSIC if name == "classic" or (name == "observe" and cell is None) else {}
    base = {**BUILT_IN, **rules, **_of_cell(cell)}
    given = {key: value for key, value in asked.given().items() if key in BUILT_IN}
    values = {**base, **given}
    task = chosen.profile.tasks[values["task"]] if chosen.profile else None
    references = task.references if task else None
    if references is None:
        warnings += [
            f"{key_of(key)} has no effect: no profile with references for task {values['task']!r} fits"
            for key in ("confidence_floor", "adapt")
            if given.get(key)
        ]
        values |= {"confidence_floor": None, "adapt": 0}
    void = _void(cell, base, given, chosen)
    audit = values["audit"] if values["audit"] is not None else (CERTIFIED_AUDIT if cell else 0.0)
    thresholds = (cell.confident_threshold, cell.hopeless_threshold) if cell else (None, None)
    resolved = Resolved(
        **{key: values[key] for key in BUILT_IN if key not in ("adapt", "audit", "answer_room", "max_loss")}
        | {"budget_scope": _scope(values["budget_scope"], identity)},
        mode=mode,
        policy=asked.policy or name,
        profile=chosen.name if references is not None or cell is not None else None,
        id=asked.id or "",
        audited=mode == "active" and is_audited(asked.id or "", audit),
        adapt=bool(values["adapt"]),
        repetition=bool(rules) or cell is not None,
        references=references,
        score=task.score if task and thresholds != (None, None) else None,
        confident_threshold=thresholds[0],
        hopeless_threshold=thresholds[1],
        max_loss=cell.max_loss if cell else None,
        audit=audit,
        guarantee=_guarantee(cell, chosen) if cell and void is None and mode == "active" else None,
        no_guarantee=void if mode == "active" else "observe stops nothing",
        warnings=tuple(warnings),
    )
    return msgspec.structs.replace(resolved, answer_room=_answer_room(values["answer_room"], resolved, identity))


def _of_cell(cell: CertifiedCell | None) -> dict[str, Any]:
    """The values that a certified cell brings."""
    if cell is None:
        return {}
    return {**(cell.policy.given() if cell.policy else {}), "patience": cell.patience, "budget": cell.budget}


def _void(cell: CertifiedCell | None, base: dict[str, Any], given: dict[str, Any], chosen: _Chosen) -> str | None:
    """Why nothing is guaranteed, None if something is."""
    if cell is None:
        return "; ".join(chosen.reasons) or "no certified profile is in use"
    changed = [key for key in given if key not in _FREE and key != "budget" and given[key] != base[key]]
    budget = given.get("budget")
    if budget is not None and (cell.budget is None or budget < cell.budget):
        changed.append("budget")
    return f"overridden: {', '.join(changed)}" if changed else None


def _guarantee(cell: CertifiedCell, chosen: _Chosen) -> dict[str, Any]:
    fields = ("max_loss", "delta", "n", "risk", "bound", "p_value")
    return {"profile": chosen.name, **{field: getattr(cell, field) for field in fields}}


def _answer_room(given: int | None, resolved: Resolved, identity: ServedIdentity | None) -> int:
    """``min(256, max_tokens / 4)`` by default; 0 where nothing can stop, observe included."""
    if resolved.mode == "observe":
        return 0
    if given is not None:
        return given
    if resolved.budget is None and not resolved.signal_rules:
        return 0
    limit = identity.max_tokens if identity else None
    return 256 if limit is None else min(256, limit // 4)


def _scope(scope: str, identity: ServedIdentity | None) -> str:
    thinks = identity.has_thinking if identity else None
    if scope != "auto" or thinks is None:
        return scope
    return "thinking" if thinks else "response"

"""Profiles and identities for tests."""

from earlystop.identity import Provenance, ServedIdentity
from earlystop.policy import Policy
from earlystop.profile import CertifiedCell, Profile, References, Score, TaskProfile

REFERENCES = References(top1_mean=0.8, entropy_mean=0.7, top1_quantiles=((0.1, 0.3), (0.9, 1.0)), n_tokens=1000)
SCORE = Score(bias=-1.0, relative_confidence=2.0, length=0.1)
SERVED = ServedIdentity(model="m", weights_hash="w", tokenizer_fingerprint="t", temperature=0.6, max_tokens=2000)


def provenance(**changes) -> Provenance:
    fields = {"model": "m", "weights_hash": "w", "tokenizer_fingerprint": "t", "temperature": 0.6, "max_tokens": 2000}
    return Provenance(**{**fields, **changes})


def cell(max_loss: float, **changes) -> CertifiedCell:
    fields = {
        "max_loss": max_loss,
        "delta": 0.1,
        "n": 500,
        "patience": 3,
        "confident_threshold": 0.9,
        "hopeless_threshold": 0.1,
        "p_value": 0.04,
        "bound": max_loss * 0.9,
    }
    return CertifiedCell(**{**fields, **changes})


def references_only(**changes) -> Profile:
    return Profile(provenance=provenance(**changes), tasks={"default": TaskProfile(references=REFERENCES)})


def certified(*cells: CertifiedCell, **changes) -> Profile:
    cells = cells or (cell(0.01, budget=1500.0, policy=Policy(grace=32)), cell(0.05, patience=2))
    task = TaskProfile(references=REFERENCES, score=SCORE, certified=cells)
    return Profile(provenance=provenance(**changes), tasks={"default": task, "math": task})

import json
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from earlystop.errors import ProfileError
from earlystop.policy import Policy
from earlystop.profile import Profile, Score, TaskProfile

from .profiles import REFERENCES, SERVED, cell, certified, provenance, references_only


def test_save_and_load_are_inverse(tmp_path):
    """A profile written to disk is the same profile when read."""
    profile = msgspec.structs.replace(certified(), similarity_centre=(0.5, -1.0), costs=(1.0, 0.0, 2.5))
    profile.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == profile
    assert [path.name for path in tmp_path.iterdir()] == ["p.json"]


def test_every_truncation_is_refused(tmp_path):
    """A file cut anywhere is an error that names the file, never half a profile."""
    path = tmp_path / "p.json"
    references_only().save(path)
    whole = path.read_bytes().rstrip()
    for end in range(0, len(whole), 7):
        path.write_bytes(whole[:end])
        with pytest.raises(ProfileError, match=r"p\.json"):
            Profile.load(path)


@pytest.mark.parametrize("text", ["", "[]", "null", '"x"', "{}", '{"version": NaN}', "\xff", "[" * 100_000])
def test_what_is_no_profile_is_refused(tmp_path, text):
    """Other files do not pass for profiles."""
    (tmp_path / "p.json").write_text(text, encoding="latin-1")
    with pytest.raises(ProfileError, match=r"p\.json"):
        Profile.load(tmp_path / "p.json")


def test_a_missing_file_is_a_profile_error(tmp_path):
    """The reason is told in words."""
    with pytest.raises(ProfileError, match="No such file"):
        Profile.load(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ("version", 2, "version"),
        ("version", True, "version"),
        ("surprise", 1, "surprise"),
        ("provenance", None, "provenance"),
        ("provenance.weights_hash", "", "provenance.weights_hash"),
        ("provenance.weights_hash", ..., "weights_hash"),
        ("provenance.temperature", -1, "provenance.temperature"),
        ("tasks", {}, "tasks"),
        ("tasks.default.references.top1_mean", 1.5, "top1_mean"),
        ("tasks.default.references.top1_mean", "high", "top1_mean"),
        ("tasks.default.references.entropy_mean", 0, "entropy_mean"),
        ("tasks.default.references.top1_quantiles", [[0.9, 1.0], [0.1, 0.3]], "top1_quantiles"),
        ("tasks.default.score.bias", ..., "bias"),
        ("tasks.default.certified.0.delta", 1, "delta"),
        ("tasks.default.certified.0.p_value", 0.5, "p_value"),
        ("tasks.default.certified.0.bound", 0.5, "bound"),
        ("tasks.default.certified.0.hopeless_threshold", 0.95, "hopeless_threshold"),
        ("tasks.default.certified.0.policy", {"grace": -1}, "grace"),
        ("tasks.default.certified.0.policy", {"id": "x"}, "policy.id"),
        ("tasks.default.certified.1.max_loss", 0.01, "max_loss"),
        ("tasks.default.score", None, "score"),
        ("tasks.default.references", None, "references"),
        ("costs", [1, -1], "costs[1]"),
    ],
)
def test_a_broken_field_is_named(tmp_path, path, value, field):
    """Whatever field is missing, unknown, of the wrong type or out of range, the error names file and field."""
    raw = json.loads(msgspec.json.encode(certified(cell(0.01), cell(0.05))))
    *parents, last = (int(part) if part.isdigit() else part for part in path.split("."))
    place = raw
    for part in parents:
        place = place[part]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    (tmp_path / "p.json").write_text(json.dumps(raw))
    with pytest.raises(ProfileError) as caught:
        Profile.load(tmp_path / "p.json")
    assert "p.json" in str(caught.value)
    assert field in str(caught.value)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_number_that_is_not_finite_is_never_saved(tmp_path, bad):
    """NaN made in memory is refused with its place, before it reaches a file."""
    broken = msgspec.structs.replace(references_only(), similarity_centre=(0.0, bad))
    with pytest.raises(ProfileError, match=r"similarity_centre\[1\]"):
        broken.save(tmp_path / "p.json")
    assert list(tmp_path.iterdir()) == []


def test_the_same_model_fits():
    """Same weights, tokenizer, temperature and settings: references and certified cells may be used."""
    fit = certified().fits(SERVED)
    assert (fit.references_ok, fit.certified_ok, fit.reasons) == (True, True, ())


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"weights_hash": "other"}, "weights"),
        ({"weights_hash": None}, "weights"),
        ({"tokenizer_fingerprint": "other"}, "tokenizer"),
        ({"lora": "adapter"}, "LoRA"),
        ({"temperature": 0.66}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
    ],
)
def test_another_model_fits_nothing(change, word):
    """Other weights, tokenizer, temperature or a LoRA void even the references, and the reason is told."""
    fit = certified().fits(msgspec.structs.replace(SERVED, **change))
    assert not fit.references_ok
    assert not fit.certified_ok
    assert word in fit.reasons[0]


@pytest.mark.parametrize("temperature", [0.55, 0.6, 0.65])
def test_a_temperature_within_the_tolerance_fits(temperature):
    """0.05 either way, both ends included."""
    assert certified().fits(msgspec.structs.replace(SERVED, temperature=temperature)).certified_ok


@pytest.mark.parametrize(
    "change",
    [
        {"max_tokens": 100},
        {"chat_template_hash": "x"},
        {"close_text_hash": "x"},
        {"quantisation": "fp8"},
        {"speculation": "ngram"},
        {"decision_code_hash": "x"},
    ],
)
def test_other_settings_void_the_certificate_only(change):
    """What the certificate depends on is compared field by field; references stay usable."""
    fit = certified().fits(msgspec.structs.replace(SERVED, **change))
    assert (fit.references_ok, fit.certified_ok) == (True, False)
    assert len(fit.reasons) == 1


def test_other_sampling_voids_the_certificate_only():
    """Top-p belongs to the distribution that was certified."""
    other = msgspec.structs.replace(SERVED, sampling=msgspec.structs.replace(SERVED.sampling, top_p=0.9))
    assert certified().fits(other)[:2] == (True, False)


def test_runner_and_dtype_are_only_noted():
    """A difference that matters to neither is a note."""
    fit = certified(runner="v1", dtype="bfloat16").fits(SERVED)
    assert fit.certified_ok
    assert len(fit.notes) == 2


def test_nothing_fits_an_unknown_model_or_task():
    """Without knowing what is served, or for a task that was not calibrated, a profile says nothing."""
    assert not certified().fits(None).references_ok
    fit = certified().fits(SERVED, "poetry")
    assert not fit.references_ok
    assert "poetry" in fit.reasons[0]


def test_the_next_smaller_certified_loss_is_taken():
    """A loss off the grid takes the largest certified one below it."""
    task = certified().tasks["default"]
    assert task.cell(0.03).max_loss == 0.01
    assert task.cell(0.05).max_loss == 0.05
    assert task.cell(0.9).max_loss == 0.05
    assert task.cell(0.009) is None


def test_a_task_without_anything_is_a_valid_profile():
    """Calibration may have found references for no task yet."""
    Profile(provenance=provenance(), tasks={"default": TaskProfile()}).validate()
    assert TaskProfile(references=REFERENCES).cell(1.0) is None


def test_a_cell_may_fix_the_rest_of_its_policy():
    """Grace and the like belong to the certified policy and survive the file."""
    raw = msgspec.json.encode(certified(cell(0.1, policy=Policy(grace=5))))
    assert Profile.from_dict(json.loads(raw)).tasks["math"].certified[0].policy == Policy(grace=5)


finite = st.floats(-50, 50)


@given(finite, finite, finite, st.integers(0, 10**6))
def test_the_score_is_the_logistic_of_the_weighted_sum(bias, weight, x, tokens):
    """The score is what its formula says, without overflow."""
    score = Score(bias=bias, end_margin=weight, length=0.5)
    undefined = {"relative_confidence": math.nan, "relative_entropy": math.nan, "similarity": math.nan}
    got = score.value(**undefined, end_margin=x, tokens=tokens)
    z = bias + weight * x + 0.5 * math.log1p(tokens)
    assert got == pytest.approx(1 / (1 + math.exp(-min(max(z, -700), 700))), abs=1e-12)


def test_an_undefined_input_gives_no_score():
    """NaN in a weighted input is no evidence; with weight zero it does not matter."""
    inputs = {"relative_confidence": math.nan, "relative_entropy": 1.0, "similarity": 1.0, "end_margin": 1.0}
    assert math.isnan(Score(bias=0, relative_confidence=1).value(**inputs, tokens=1))
    assert Score(bias=0, similarity=1).value(**inputs, tokens=1) > 0.5

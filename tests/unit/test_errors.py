import pickle

import pytest

from earlystop import errors


def test_every_error_of_ours_has_one_root():
    """Catching EarlyStopError catches everything that we raise on purpose."""
    ours = [x for x in vars(errors).values() if isinstance(x, type) and issubclass(x, Exception)]
    assert len(ours) == 6
    assert all(issubclass(error, errors.EarlyStopError) for error in ours)


def test_config_error_is_a_value_error():
    """vLLM answers a ValueError at admission with HTTP 400."""
    assert issubclass(errors.ConfigError, ValueError)


@pytest.mark.parametrize(
    "error",
    [
        errors.ConfigError("m", field="f"),
        errors.ProfileError("m", field="f"),
        errors.GuaranteeError("m", n=75, epsilon=0.01, delta=0.1, n_needed=670),
    ],
)
def test_errors_keep_their_fields_across_processes(error):
    """An error raised in a worker arrives with its message and its fields."""
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    assert str(copy) == "m"
    assert vars(copy) == vars(error)

import json
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from earlystop.signals import Kind, Signal, StopReason

IN_ORDER = (
    "budget low_confidence converged confident hopeless answered repetition requested timeout deadline rate_limit "
    "cost_limit session_budget length_reserve eos_in_reasoning invalid_logits"
)


def test_reasons_are_numbered_in_the_documented_order():
    """A trace written today is read tomorrow: the codes never move."""
    assert [reason.value for reason in StopReason] == IN_ORDER.split()
    assert [reason.code for reason in StopReason] == list(range(1, 17))


def test_a_code_and_its_reason_are_inverse():
    """from_code undoes code, and 0 is no reason."""
    assert all(StopReason.from_code(reason.code) is reason for reason in StopReason)
    assert StopReason.from_code(0) is None


@pytest.mark.parametrize("code", [-1, 17, 1000])
def test_a_foreign_code_is_refused(code):
    """A code outside the table is an error, not some other reason."""
    with pytest.raises(ValueError, match=str(code)):
        StopReason.from_code(code)


def test_a_signal_has_the_documented_fields_in_order():
    """The wire record is the design's, field by field."""
    wanted = "v id index seq t kind reason tokens reasoning_tokens used budget confidence entropy similarity end_margin"
    assert list(Signal(id="a", kind=Kind.PROGRESS).to_dict()) == [*wanted.split(), "data"]


@given(
    st.fixed_dictionaries(
        {},
        optional={
            name: st.floats() for name in ("used", "budget", "confidence", "entropy", "similarity", "end_margin")
        },
    )
)
def test_undefined_is_null_never_nan(values):
    """Whatever the statistics were, the record holds finite numbers or None, and JSON without NaN."""
    signal = Signal(id="a", kind=Kind.PROGRESS, **values)
    for name, value in values.items():
        assert getattr(signal, name) == (value if math.isfinite(value) else None)
    assert json.loads(msgspec.json.encode(signal), parse_constant=pytest.fail)["id"] == "a"


def test_non_finite_data_is_null_on_the_wire():
    """A NaN inside the free part does not reach a client as bare NaN."""
    signal = Signal(id="a", kind=Kind.TRACE, data={"top1": [0.5, math.nan, math.inf]})
    assert signal.to_dict()["data"] == {"top1": [0.5, None, None]}


def test_a_signal_survives_the_bus():
    """Encoding to msgpack and back gives the same record."""
    signal = Signal(id="a", index=1, seq=7, t=5 << 16 | 3, kind=Kind.STOP_DECIDED, reason=StopReason.CONVERGED)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(signal), type=Signal) == signal
    assert signal.milliseconds == 5

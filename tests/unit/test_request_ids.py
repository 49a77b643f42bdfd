import pytest
from hypothesis import given
from hypothesis import strategies as st

from earlystop.request_ids import external_id, match

NAMES = st.text(min_size=1)


@pytest.mark.parametrize(
    ("internal", "external"),
    [
        ("0-1a2b3c4d", ("0", 0)),
        ("17-00000000", ("17", 0)),
        ("chatcmpl-abc-1f2e3d4c", ("chatcmpl-abc", 0)),
        ("2_chatcmpl-abc-1f2e3d4c", ("chatcmpl-abc", 2)),
        ("12_3_x-1f2e3d4c", ("3_x", 12)),
        ("停止-1f2e3d4c", ("停止", 0)),
        ("1_a\nb-1f2e3d4c", ("a\nb", 1)),
        ("plain", ("plain", 0)),  # VLLM_DISABLE_REQUEST_ID_RANDOMIZATION=1
        ("3_plain", ("plain", 3)),
        ("x-1F2E3D4C", ("x-1F2E3D4C", 0)),
        ("_x-1f2e3d4c", ("_x", 0)),
    ],
)
def test_what_vllm_added_is_taken_off(internal, external):
    """An index before, eight hexadecimal characters after."""
    assert external_id(internal) == external


@given(NAMES, st.integers(0, 9), st.integers(0, 2**32 - 1), st.booleans())
def test_a_known_request_is_found_whatever_it_is_called(name, index, suffix, alone):
    """With the external ids at hand even an id that looks like vLLM's own additions is matched."""
    internal = f"{name}-{suffix:08x}" if alone else f"{index}_{name}-{suffix:08x}"
    choices = {name: {0} if alone else set(range(10))}
    assert match(internal, choices) == (name, 0 if alone else index)


def test_what_two_requests_could_be_is_neither():
    """Two readings that both fit are no match; nor is none."""
    assert match("3_x-1f2e3d4c", {"3_x": {0}}) == ("3_x", 0)
    assert match("3_x-1f2e3d4c", {"x": {0, 1, 2, 3}}) == ("x", 3)
    assert match("3_x-1f2e3d4c", {"x": {0, 1, 2, 3}, "3_x": {0}}) is None
    assert match("y-1f2e3d4c", {"x": {0}}) is None


@pytest.mark.slow
def test_vllm_still_forms_its_ids_like_this():
    """The functions of the installed vLLM themselves."""
    pytest.importorskip("vllm")
    from types import SimpleNamespace

    from vllm import SamplingParams
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.engine.parallel_sampling import ParentRequest

    for name in ("0", "chatcmpl-abc", "3_x", "停止"):
        request = SimpleNamespace(request_id=name, external_req_id=None, params=SamplingParams(n=3))
        InputProcessor.assign_request_id(request)
        assert request.request_id != name
        assert match(request.request_id, {name: {0}}) == (name, 0)
        parent = ParentRequest(request)
        for index in range(3):
            assert external_id(parent.get_child_info(index)[0]) == (name, index)

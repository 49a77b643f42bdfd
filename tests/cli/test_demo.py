"""The demo's comparison, without an engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from earlystop.demo.arms import Demo, compare, ending, verdict
from earlystop.demo.references import SHIPPED, references_of, token_statistics
from earlystop.demo.show import as_json, picture, table
from earlystop.engine.drive import Result
from earlystop.errors import StreamError
from earlystop.profile import Profile
from earlystop.signals import Kind, Signal, StopReason


def _plain(tokens: list[int]) -> Result:
    return Result(index=0, text="Once.\nTwice.\n", token_ids=tokens, tokens=len(tokens), finish_reason="length")


def _early(tokens: list[int], text: str = "Once.\n") -> Result:
    signal = Signal(id="a", kind=Kind.STOP_DECIDED, reason=StopReason.CONVERGED, tokens=2, similarity=0.97)
    return Result(
        index=0, text=text, token_ids=tokens, tokens=len(tokens), finish_reason="stop", reason=StopReason.CONVERGED,
        signals=[signal],
    )  # fmt: skip


def _demo(row: object, device: str = "cpu") -> Demo:
    return Demo(
        model="m", runner="v1", device=device, max_tokens=8, policy="classic", profile="", vllm="0.32.0",
        rows=[row], plain_seconds=2.0, early_seconds=1.0,
    )  # type: ignore[list-item]  # fmt: skip


def test_a_prefix_up_to_the_closing_token() -> None:
    """The stop token is ours, so it is left out of the comparison with the plain tokens."""
    row = compare("poem", "p", _plain([5, 6, 7, 8]), _early([5, 6, 2]))
    assert (row.is_prefix, row.first_divergence, row.saved) == (True, None, 1)
    assert row.why == "converged: decided at token 2, similarity 0.97"


def test_a_divergence_is_found_and_fails_on_a_cpu_only() -> None:
    """On a CPU a text that is no prefix makes the demo fail; on a GPU it is reported with its first divergence."""
    row = compare("poem", "p", _plain([5, 6, 7, 8]), _early([5, 9, 2]))
    assert (row.is_prefix, row.first_divergence) == (False, 1)
    good, _ = verdict(_demo(row))
    assert not good
    good, lines = verdict(_demo(row, device="cuda"))
    assert good
    assert "first divergence is at token 1" in " ".join(lines)


def test_an_end_inside_a_fence_or_a_character_fails() -> None:
    """What must never be cut makes the demo fail."""
    row = compare("code", "p", _plain([5, 6, 7]), _early([5, 6, 2], text="```python\nx = 1\n"))
    assert row.ends_at == "cut"
    assert not verdict(_demo(row))[0]


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("A line.\n", "line"),
        ("A paragraph.\n\n", "block"),
        ("```\nx\n```", "block"),
        ("A sentence.", "sentence"),
        ('He said "no."', "sentence"),
        ("结束。", "sentence"),
        ("in the middle of", "word"),
        ("```\nx", "cut"),
        ("broken \ufffd", "cut"),
    ],
)
def test_where_a_text_ends(text: str, place: str) -> None:
    """An ending is named by the best place that it is."""
    assert ending(text) == place


def test_outputs(tmp_path: Path) -> None:
    """Table, JSON and picture are made from one record."""
    demo = _demo(compare("poem", "p", _plain([5, 6, 7, 8]), _early([5, 6, 2])))
    assert table(demo).row_count == 2
    assert as_json(demo)["totals"] == {
        "plain_tokens": 4,
        "early_tokens": 3,
        "saved_share": 0.25,
        "plain_seconds": 2.0,
        "early_seconds": 1.0,
    }
    picture(demo, tmp_path / "d.png")
    assert (tmp_path / "d.png").stat().st_size > 1000


def _trace(first: int, top1: list[float | None], following: list[float]) -> Signal:
    data = {"first": first, "top1": top1, "entropy": [1.0 if t is not None else None for t in top1], "next": following}
    return Signal(id="a", kind=Kind.TRACE, data=data)


def test_references_take_every_token_and_the_last_from_the_next_row() -> None:
    """The worker never learns of the last token, whose statistics are the trace's `next`; NaN does not count."""
    traces = [_trace(0, [0.2, None], [0.0, 0.0]), _trace(2, [0.4], [0.9, 4.0, 1.0])]
    result = Result(index=0, tokens=4, token_ids=[1, 2, 3, 4], signals=traces)
    references = references_of([result])
    assert references.n_tokens == 3
    assert references.top1_mean == pytest.approx(0.5)
    assert references.entropy_mean == pytest.approx(2.0)


def test_a_trace_with_a_gap_is_refused() -> None:
    """References over half a trace would be wrong."""
    with pytest.raises(StreamError, match="gap"):
        token_statistics(Result(index=3, tokens=4, signals=[_trace(0, [0.2], [0, 0]), _trace(2, [0.3], [0, 0])]))


def test_the_shipped_profile_is_valid_and_certifies_nothing() -> None:
    """It holds references for the default task and no guarantee."""
    profile = Profile.load(SHIPPED)
    assert profile.tasks["default"].references is not None
    assert not profile.tasks["default"].certified

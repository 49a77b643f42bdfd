import json
from types import SimpleNamespace

import msgspec
import pytest

import earlystop
from earlystop import Signal, StopReason
from earlystop.bus import Outlet, SinkReader, Stamper, check_gapless
from earlystop.cost import CostModel
from earlystop.errors import StreamError
from earlystop.joining import reasoning_tokens
from earlystop.signals import Kind
from earlystop.summary import SavedEstimate, WouldStop, finish_signals

EOS = 2
PRICES = CostModel(prompt="1.25", cached_prompt="0.625", completion="10")


def output(request_id="0", ids=(5, 6, EOS), finish="stop", stop=None, *, prompt=(1,), cached=0, index=0):
    completion = SimpleNamespace(index=index, token_ids=list(ids), finish_reason=finish, stop_reason=stop, text="")
    return SimpleNamespace(
        request_id=request_id, outputs=[completion], prompt_token_ids=list(prompt), num_cached_tokens=cached
    )


def signals(*kinds, id="s", index=0, request="0-1a2b3c4d", **data):
    """Stamped signals of one request; each kind may come with its own fields."""
    records = []
    for kind in kinds:
        kind, fields = kind if isinstance(kind, tuple) else (kind, {})
        fields = dict(fields)
        more = {"request_id": request, **data, **fields.pop("data", {})}
        records.append(Signal(id=id, index=index, kind=kind, data=more, **fields))
    return Stamper().stamp(records)


def one(out, given=(), **options):
    [summary] = earlystop.summarize([out], given, **options)
    return summary


DECIDED = (Kind.STOP_DECIDED, {"reason": StopReason.CONVERGED, "tokens": 2})
PROGRESS = (Kind.PROGRESS, {"tokens": 2, "reasoning_tokens": 1, "used": 1.5, "budget": 8.0})


def test_without_signals_vllms_own_words_remain():
    """Tokens, finish and stop reason are always there; the end is nobody's but the model's."""
    summary = one(output(stop=EOS))
    assert (summary.id, summary.request_id, summary.index) == ("0", "0", 0)
    assert (summary.tokens, summary.finish_reason, summary.stop_reason) == (3, "stop", EOS)
    assert summary.reason is None
    assert summary.reasoning_tokens is None
    assert summary.signals == {}
    assert summary.warnings == ()


def test_the_last_word_on_the_stream_is_joined_with_the_finish():
    """Counts from vLLM, everything else from the last signal that says it."""
    given = signals(PROGRESS, DECIDED, guarantee="loss <= 0.01", expected_tokens=10.4)
    summary = one(output(), given)
    assert summary.id == "s"
    assert summary.reason is StopReason.CONVERGED
    assert (summary.tokens, summary.reasoning_tokens, summary.used, summary.budget) == (3, 1, 1.5, 8.0)
    assert summary.saved_estimate == SavedEstimate(tokens=7, basis="profile")
    assert summary.guarantee == "loss <= 0.01"
    assert summary.signals == {"progress": 1, "stop_decided": 1}
    assert summary.t == given[-1].t
    assert not summary.state_rebuilt


def test_the_saving_against_the_limit_is_named_as_such():
    """Without a profile only the limit is known, an upper bound; without a stop nothing was saved."""
    assert one(output(), signals(DECIDED, max_tokens=100)).saved_estimate == SavedEstimate(
        tokens=97, basis="max_tokens"
    )
    assert one(output(), signals(DECIDED)).saved_estimate is None
    assert one(output(), signals(PROGRESS, max_tokens=100)).saved_estimate is None
    assert one(output(), signals(DECIDED, expected_tokens=1)).saved_estimate.tokens == 0


@pytest.mark.parametrize(
    ("finish", "stop", "marks", "ours"),
    [
        ("stop", None, {}, True),
        ("stop", EOS, {}, True),
        ("stop", None, {"stop_token_id": EOS}, True),
        ("stop", 77, {"stop_token_id": 77}, False),  # the response ends with EOS, not with what we would have forced
        ("stop", "User:", {}, False),
        ("length", None, {}, False),
        ("abort", None, {}, False),
        ("repetition", "repetition_detected", {}, False),
        ("stop", "User:", {"closed": True}, True),  # we closed the thinking, the answer ended by itself
        ("length", None, {"closed": True}, True),
        ("stop", None, {"closed": False}, False),  # decided, but the model ended before we forced anything
    ],
)
def test_an_end_is_ours_only_if_the_stop_took_effect(finish, stop, marks, ours):
    """A decision alone is no reason, and one that came to nothing is said."""
    summary = one(output(finish=finish, stop=stop), signals(PROGRESS, DECIDED, **marks))
    assert summary.reason is (StopReason.CONVERGED if ours else None)
    if not ours:
        assert "was decided but did not take effect" in summary.warnings[0]
        assert finish in summary.warnings[0]


def test_what_was_forced_last_decides():
    """A closing that began after the decision is ours; one that was cancelled again is not."""
    decided = (Kind.STOP_DECIDED, {"reason": StopReason.CONVERGED, "data": {"closed": False}})
    for marks, reason in (((True,), StopReason.CONVERGED), ((), None), ((True, False), None)):
        later = [(Kind.PROGRESS, {"data": {"closed": mark}}) for mark in marks]
        assert one(output(), signals(decided, *later, PROGRESS)).reason is reason


def test_an_answer_cut_at_the_limit_is_said():
    """We closed the thinking, and then the answer ran out of room."""
    summary = one(output(finish="length"), signals(DECIDED, closed=True))
    assert summary.reason is StopReason.CONVERGED
    assert summary.warnings == ("the answer after the stop was cut: finish_reason length",)


def test_a_row_that_broke_has_the_reason_of_its_error():
    """A row with NaN is closed by us."""
    assert one(output(), signals((Kind.ERROR, {"reason": StopReason.INVALID_LOGITS}))).reason == "invalid_logits"
    assert one(output(), signals(Kind.ERROR)).reason is None


def test_a_reserved_id_tells_the_reason_without_any_signal():
    """The stop token's id is a channel of its own."""
    reserved = {77: StopReason.BUDGET}
    assert one(output(ids=(5, 77), stop=77), reserved=reserved).reason is StopReason.BUDGET
    assert one(output(ids=(5, 77), stop=77)).reason is None
    assert one(output(ids=(5, 77), finish="length"), reserved=reserved).reason is None


def test_observing_reports_where_it_would_have_stopped():
    """`would_stop` is never a reason; the first one counts."""
    first = (Kind.WOULD_STOP, {"reason": StopReason.REPETITION, "tokens": 1})
    second = (Kind.WOULD_STOP, {"reason": StopReason.BUDGET, "tokens": 2})
    summary = one(output(), signals(first, second))
    assert summary.reason is None
    assert summary.would_stop == WouldStop(reason=StopReason.REPETITION, tokens=1)


def test_a_preempted_request_says_so():
    """A rebuilt state is worth knowing."""
    assert one(output(), signals((Kind.PROGRESS, {"data": {"state_rebuilt": True}}), PROGRESS)).state_rebuilt


def test_children_get_their_own_signals():
    """n > 1: each choice is matched by vLLM's internal id, in the order of the outputs."""
    out = output("chatcmpl-x", ids=(5, EOS), index=1)
    out.outputs += output(ids=(5, 6, 7), index=0, finish="length").outputs
    given = signals(PROGRESS, index=0, request="0_chatcmpl-x-1a2b3c4d")
    given += signals(DECIDED, index=1, request="1_chatcmpl-x-1a2b3c4d")
    first, second = earlystop.summarize([out], given)
    assert (first.index, first.reason, first.tokens) == (1, StopReason.CONVERGED, 2)
    assert (second.index, second.reason, second.used) == (0, None, 1.5)


def test_one_id_for_many_prompts_is_told_apart_by_request():
    """One params object for a batch: one stream id, many requests, in one sequence."""
    stamper = Stamper()
    given = stamper.stamp(
        Signal(id="s", index=0, kind=Kind.PROGRESS, used=float(i), data={"request_id": f"{i}-1a2b3c4d"})
        for i in range(3)
    )
    summaries = earlystop.summarize([output(str(i)) for i in range(3)], given)
    assert [s.used for s in summaries] == [0.0, 1.0, 2.0]
    assert [s.next_seq for s in summaries] == [3, 4, 5]


def test_a_record_without_request_id_belongs_to_the_only_request_of_its_stream():
    """Where the publisher could not look up the request, the stream decides, if it can."""
    bare = Signal(id="s", index=0, seq=0, kind=Kind.ERROR, tokens=1)
    known = Signal(id="s", index=0, seq=1, kind=Kind.PROGRESS, data={"request_id": "0-1a2b3c4d"})
    assert one(output(), [bare, known]).signals == {"error": 1, "progress": 1}
    assert one(output(), [bare]).signals == {}
    assert one(output("s"), [bare]).signals == {"error": 1}


def test_two_engines_that_count_from_0_are_told_apart():
    """External ids repeat from engine to engine: signals that cannot be this response's are not taken for it."""
    old = signals((Kind.PROGRESS, {"tokens": 2}), id="old", request="0-aaaaaaaa")
    new = signals((Kind.PROGRESS, {"tokens": 3}), id="new", request="0-bbbbbbbb")
    long = signals((Kind.PROGRESS, {"tokens": 900}), id="long", request="0-cccccccc")
    summary = one(output(), msgspec.convert(msgspec.to_builtins([*old, *new, *long]), list[Signal]))
    assert summary.id == max(old + new, key=lambda s: s.t).id
    assert summary.warnings == ("2 requests had this id; the latest is taken",)
    summary = one(output(), long)
    assert summary.id == "0"
    assert "speak of another response" in summary.warnings[0]


def test_a_gap_is_a_warning():
    """A summary of an incomplete stream says so."""
    given = signals(PROGRESS, PROGRESS, DECIDED)
    assert "seq 1 missing" in one(output(), [given[0], given[2]]).warnings[0]


def test_cumulative_streams_count_once():
    """vllm #44398, vllm-omni #2313: cumulative ids summed per chunk made 19,503 of 197 tokens."""
    chunks = [output(ids=range(n), finish="stop" if n == 197 else None) for n in range(1, 198)]
    assert one_of(earlystop.summarize(chunks)).tokens == 197
    assert one_of(earlystop.summarize(chunks[:5])).warnings == ("the response has not finished",)


@pytest.mark.parametrize("ids", [[(5, 6), (7,)], [(5,), (5,)], [(5, 6), (5, 7, 8)]])
def test_deltas_are_refused(ids):
    """A delta taken for a whole response would be counted wrongly in silence."""
    chunks = [output(ids=part, finish=None) for part in ids]
    with pytest.raises(StreamError, match="not DELTA"):
        earlystop.summarize(chunks)


def test_two_finished_responses_of_one_id_are_refused():
    """Outputs of two engines in one list cannot be told apart."""
    with pytest.raises(StreamError, match="of one engine"):
        earlystop.summarize([output(), output(ids=(5, 6, EOS, 7))])


def one_of(summaries):
    [summary] = summaries
    return summary


@pytest.mark.parametrize(
    ("prompt", "ids", "tags", "count"),
    [
        ([1], [11, 12, 2, 14, 3], ([1], [2]), 2),  # the tag came with the prompt
        ([9], [11, 12, 2, 14, 3], ([1], [2]), 0),
        ([1, 8, 2], [11, 1, 12, 13, 2, 14], ([1], [2]), 2),  # the prompt closed it again
        ([9], [1, 11, 2, 14, 1, 12, 13], ([1], [2]), 3),  # two blocks, the second one open
        ([9], [1, 11, 12, 20, 21, 14], ([1], [20, 21]), 2),  # an end tag of two tokens
        ([9], [1, 11, 20, 12, 20, 21, 14], ([1], [20, 21]), 3),  # half an end tag is thinking
        ([1], [], ([1], [2]), 0),
    ],
)
def test_thinking_is_counted_without_its_tags(prompt, ids, tags, count):
    """vllm #44398: in every block, also in one that the prompt has opened."""
    assert reasoning_tokens(ids, tags, prompt) == count
    assert one(output(ids=ids, prompt=prompt, finish="length"), signals(PROGRESS), tags=tags).reasoning_tokens == count


def test_the_stop_token_is_no_thought():
    """A response that ends while it thinks: the stop token is a token, not a thinking token."""
    summary = one(output(ids=[11, 12, 3], prompt=[1]), tags=([1], [2]))
    assert (summary.tokens, summary.reasoning_tokens) == (3, 2)
    with pytest.raises(StreamError, match="at least one token"):
        reasoning_tokens([1], ([], [2]))


def test_money_counts_cached_tokens_once_and_reasoning_not_twice():
    """litellm #14849: cached tokens at their price, reasoning within the completion, in decimals."""
    out = output(ids=range(1744), prompt=range(262_960), cached=257_955, finish="length")
    summary = one(out, model=PRICES)
    assert summary.cost == "0.184918125"
    assert (summary.saved_cost, summary.currency) == (None, "USD")
    saved = one(output(prompt=()), signals(DECIDED, max_tokens=1003), model=PRICES)
    assert (saved.cost, saved.saved_cost) == ("0.00003", "0.010")


def test_the_prompt_is_paid_once_for_all_choices():
    """n > 1 shares the prompt."""
    out = output(ids=(5,), prompt=range(1000))
    out.outputs += output(ids=(5,), index=1).outputs
    assert [s.cost for s in earlystop.summarize([out], [], PRICES)] == ["0.00126", "0.00001"]


def test_a_prompt_that_is_not_known_has_no_price():
    """No guess where a number is missing."""
    out = output()
    out.prompt_token_ids = None
    summary = one(out, model=PRICES)
    assert summary.cost is None
    assert "carries no prompt tokens" in summary.warnings[0]


def test_the_finishing_records_go_on_where_the_stream_ended():
    """`stopped` and `summary` follow in the stream's own numbers and time; they are plain JSON."""
    given = signals(PROGRESS, DECIDED, expected_tokens=10)
    records = finish_signals(one(output(), given, model=PRICES))
    assert [r.kind for r in records] == [Kind.STOPPED, Kind.SUMMARY]
    check_gapless([*given, *records])
    stamps = [s.t for s in (*given, *records)]
    assert stamps == sorted(set(stamps))
    assert {r.reason for r in records} == {StopReason.CONVERGED}
    data = json.loads(json.dumps(records[1].to_dict()))["data"]
    assert data["saved_estimate"] == {"tokens": 7, "basis": "profile"}
    assert data["cost"] == records[1].data["cost"]


def test_a_natural_end_is_not_called_a_stop():
    """Only what we ended has `stopped`."""
    [record] = finish_signals(one(output()))
    assert (record.kind, record.seq, record.reason, record.tokens) == (Kind.SUMMARY, 0, None, 3)


def test_signals_come_from_the_open_sink(own_directory):
    """Offline, nothing has to be handed over: the sink of this process is asked, and keeps its records."""
    with SinkReader() as reader, Outlet() as outlet:
        outlet.publish(signals(PROGRESS, DECIDED))
        for _ in range(2):
            assert one_of(earlystop.summarize([output()])).reason is StopReason.CONVERGED
        assert one_of(earlystop.summarize([output()], reader.drain())).reason is StopReason.CONVERGED
        assert one_of(earlystop.summarize([output()])).reason is None


def test_without_a_sink_the_bus_is_asked(own_directory):
    """What the engine's buffer still holds makes a summary, too."""
    assert one_of(earlystop.summarize([output()])).reason is None
    with Outlet() as outlet:
        outlet.publish(signals(PROGRESS, DECIDED))
        assert one_of(earlystop.summarize([output()])).reason is StopReason.CONVERGED


def test_a_bus_that_cannot_be_asked_is_a_warning(own_directory, monkeypatch):
    """A summary never fails for want of signals."""
    monkeypatch.setenv("EARLYSTOP_BUS", "nonsense")
    assert "signals may be missing" in one_of(earlystop.summarize([output()])).warnings[0]


def test_a_sink_that_no_engine_found_is_a_warning(own_directory):
    """A sink opened after the engine stays empty: the summary says what to do."""
    with SinkReader():
        assert "open the SinkReader before the engine" in one_of(earlystop.summarize([output()])).warnings[0]

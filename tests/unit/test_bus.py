import math
import threading
import time

import msgspec
import numpy as np
import pytest
import zmq

from earlystop.bus import (
    Outlet,
    Publisher,
    SinkReader,
    Stamper,
    check_gapless,
    default_endpoint,
    finite,
    recall,
)
from earlystop.bus.endpoint import discover
from earlystop.bus.wire import END_SEQ, TOPIC, decode_batch, decode_end, decode_signals, encode_signals
from earlystop.clock import HLC
from earlystop.config import BusConfig
from earlystop.errors import ConfigError, EarlyStopError, StreamError

from .buses import child, kill, progress, stream, until

pytestmark = pytest.mark.usefixtures("own_directory")


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf, np.float32("nan")])
def test_what_is_undefined_is_none(value):
    """NaN and infinities never go out."""
    assert finite(value) is None


def test_what_is_defined_is_a_float():
    """A defined number of any type is a plain float."""
    assert finite(np.float32(0.5)) == 0.5
    assert type(finite(np.float32(0.5))) is float
    assert finite(0) == 0.0


def test_data_goes_out_without_nan_at_any_depth():
    """Arrays become lists and what is undefined inside them null."""
    data = {"top1": np.array([0.5, math.nan]), "deep": [{"x": (math.inf, 1)}], "n": np.int64(3), "ok": True}
    encoded, bad = encode_signals([progress("a", data=data)])
    [signal] = decode_signals(encoded)
    assert bad == 0
    assert signal.data == {"top1": [0.5, None], "deep": [{"x": [None, 1]}], "n": 3, "ok": True}


def test_a_record_that_cannot_be_encoded_leaves_its_neighbours_alone():
    """One bad record is left out and counted."""
    encoded, bad = encode_signals([progress("a"), progress("b", data={"x": object()}), progress("\ud800")])
    assert [s.id for s in decode_signals(encoded)] == ["a"]
    assert bad == 2


@pytest.mark.parametrize("decode", [decode_batch, decode_end])
@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x93\x01\x02\x03", b"\x80"])
def test_foreign_bytes_are_refused(decode, payload):
    """What is not ours is an error that says so."""
    with pytest.raises(StreamError):
        decode(payload)


def test_each_choice_of_each_stream_counts_from_0():
    """`seq` is per (id, index), `t` over all."""
    stamper = Stamper(HLC())
    given = [progress("a", index=0), progress("a", index=1), progress("b"), progress("a", index=0)]
    stamped = stamper.stamp(given) + stamper.stamp([progress("a", index=1)])
    assert [(s.id, s.index, s.seq) for s in stamped] == [
        ("a", 0, 0),
        ("a", 1, 0),
        ("b", None, 0),
        ("a", 0, 1),
        ("a", 1, 1),
    ]
    stamps = [s.t for s in stamped]
    assert stamps == sorted(set(stamps))
    assert given[3].seq == 0


def test_counters_of_finished_streams_are_forgotten():
    """Memory is bounded by the streams that speak."""
    stamper = Stamper(max_streams=2)
    seqs = [stamper.stamp([progress(name)])[0].seq for name in "abacab"]
    assert seqs == [0, 0, 1, 0, 2, 0]


def test_a_gap_is_refused_by_name():
    """The error names the stream and what is missing."""
    check_gapless([])
    check_gapless(reversed(stream("a", 3) + stream("b", 2)))
    with pytest.raises(StreamError, match=r"stream '停止': seq 1, 3 missing \(2 of 5 records\)"):
        check_gapless([progress("停止", seq) for seq in (0, 2, 4)] + stream("b", 2))
    with pytest.raises(EarlyStopError, match="seq 0 missing"):
        check_gapless([progress("a", 1)])
    with pytest.raises(StreamError, match=r"choice 1: seq 0, .*, 9, \.\.\. missing"):
        check_gapless([progress("a", 10**15, index=1)])


def test_a_repeated_number_is_refused():
    """Two requests under one id would mix their traces."""
    with pytest.raises(StreamError, match="seq 1 came twice"):
        check_gapless([*stream("a", 3), progress("a", 1)])


def test_the_frames_are_those_of_vllms_kv_events():
    """Topic, 8 bytes of sequence, a batch that begins with ts, events, data_parallel_rank."""
    context = zmq.Context()
    with Publisher(dp_rank=1) as publisher, context.socket(zmq.SUB) as sub:
        sub.linger = 0
        sub.connect(publisher.endpoint)
        sub.subscribe(b"")
        give_up = time.monotonic() + 5
        while not sub.poll(10):
            assert time.monotonic() < give_up
            publisher.publish([progress("a")])
        topic, seq, payload = sub.recv_multipart()
    context.term()
    assert publisher.endpoint.endswith(".ipc_dp1")
    assert topic == TOPIC
    assert len(seq) == 8
    ts, events, rank, schema, epoch, dropped = msgspec.msgpack.decode(payload)
    assert abs(ts - time.time()) < 60
    assert events[0]["id"] == "a"
    assert (rank, schema, epoch, dropped) == (1, 1, publisher.epoch, 0)


def test_replay_speaks_vllms_protocol():
    """A REQ-like client sends 8 bytes and gets the batches from there on, then the end marker."""
    context = zmq.Context()
    with Publisher() as publisher, context.socket(zmq.DEALER) as dealer:
        for signal in stream("a", 3):
            publisher.publish([signal])
            until(lambda: not publisher._queue)
        dealer.linger = 0
        dealer.connect(publisher.replay_endpoint)
        dealer.send_multipart((b"rubbish",))
        dealer.send_multipart((b"", (1).to_bytes(8, "big")))
        answers = []
        while not answers or answers[-1][-2] != END_SEQ:
            assert dealer.poll(5000)
            answers.append(dealer.recv_multipart())
    context.term()
    assert [int.from_bytes(a[-2], "big") for a in answers[:-1]] == [1, 2]
    assert (decode_end(answers[-1][-1]).first, decode_end(answers[-1][-1]).next) == (0, 3)


def test_recall_gives_what_the_buffer_holds():
    """Everything that was published, whoever listened; a short buffer forgets the oldest."""
    with Publisher(buffer_steps=2) as publisher:
        for signal in stream("a", 5):
            publisher.publish([signal])
            until(lambda: not publisher._queue)
        assert [s.seq for s in recall(publisher.endpoint)] == [3, 4]


def test_recall_asks_for_what_is_on_its_way():
    """A reader's question makes the engine hand over what it still holds."""
    late = []
    with Publisher(on_request=lambda: late and publisher.publish([late.pop()])) as publisher:
        late.append(progress("late"))
        assert [s.id for s in recall(publisher.endpoint)] == ["late"]


def test_recall_of_nobody_is_empty_and_quick():
    """Without a publisher there is nothing to wait for."""
    began = time.monotonic()
    assert recall(default_endpoint()) == []
    assert recall() == []
    assert time.monotonic() - began < 3


def test_recall_does_not_take_silence_for_emptiness(monkeypatch):
    """An engine that is there and does not answer is an error."""
    monkeypatch.setattr(Publisher, "_answer", lambda self: time.sleep(0.01))
    with Publisher() as publisher, pytest.raises(StreamError, match=r"not every engine .* within 0.1 s"):
        recall(publisher.endpoint, timeout=0.1)


def test_a_full_queue_drops_the_oldest_and_shows_it(monkeypatch):
    """Publishing never blocks; what was dropped is counted, and missing in `seq`."""
    gate = threading.Event()
    monkeypatch.setattr(Publisher, "_drain", lambda self, drain=Publisher._drain: gate.wait(5) and drain(self))
    with Publisher(queue_size=10) as publisher:
        began = time.monotonic()
        for signal in Stamper().stamp(stream("a", 15)):
            publisher.publish([signal])
        assert time.monotonic() - began < 1
        assert publisher.dropped == 5
        gate.set()
        kept = recall(publisher.endpoint)
    assert [s.seq for s in kept] == list(range(5, 15))
    with pytest.raises(StreamError, match="seq 0, 1, 2, 3, 4 missing"):
        check_gapless(kept)


def test_one_call_larger_than_the_queue_keeps_its_end():
    """The bound holds within a single call."""
    with Publisher(queue_size=3) as publisher:
        publisher.publish(stream("a", 10))
        assert publisher.dropped == 7
        assert [s.seq for s in recall(publisher.endpoint)] == [7, 8, 9]


def test_a_living_endpoint_is_never_taken_over():
    """The second engine gets a place beside the first, and both are found."""
    with Publisher() as first, Publisher() as second:
        assert second.endpoint == first.endpoint + "_e1"
        first.publish([progress("first")])
        second.publish([progress("second")])
        assert {s.id for s in recall(first.endpoint)} == {"first", "second"}
        assert discover(None) == [first.endpoint, second.endpoint]
    assert discover(None) == []


DEAD = """
import sys, time
from earlystop.bus import Publisher
publisher = Publisher(sys.argv[1] or None)
print("ready", flush=True)
time.sleep(60)
"""


def test_what_a_killed_engine_left_is_cleared_away(own_directory):
    """Files of dead processes neither block an endpoint nor pile up."""
    chosen = f"ipc://{own_directory}/bus"
    processes = [child(DEAD, ""), child(DEAD, chosen)]
    for process in processes:
        kill(process)
    assert (own_directory / "bus.replay").exists()
    assert len(discover(None)) == 1
    with Publisher(chosen) as publisher:
        assert publisher.endpoint == chosen
    with Publisher() as publisher:
        assert discover(None) == [publisher.endpoint]
    assert not list((own_directory / "earlystop").iterdir())


def test_closing_flushes():
    """What was published before `close` still goes out; after it nothing does."""
    context = zmq.Context()
    with context.socket(zmq.SUB) as sub:
        sub.linger = 0
        publisher = Publisher()
        sub.subscribe(b"")
        sub.connect(publisher.endpoint)
        give_up = time.monotonic() + 5
        while not sub.poll(10):
            assert time.monotonic() < give_up
            publisher.publish([progress("hello")])
        publisher.publish(stream("a", 5000))
        publisher.close()
        publisher.close()
        publisher.publish([progress("late")])
        got = []
        while sub.poll(200):
            got += [s for s in decode_signals(decode_batch(sub.recv_multipart()[2]).events) if s.id != "hello"]
    context.term()
    assert [s.seq for s in got] == list(range(5000))
    assert publisher.dropped == 1


def test_tcp_when_asked_for():
    """A port is bound only where one is named; 0 lets the system choose."""
    with Publisher("tcp://127.0.0.1:0") as publisher:
        assert publisher.endpoint.startswith("tcp://127.0.0.1:")
        with pytest.raises(ConfigError, match="Address already in use"):
            Publisher(publisher.endpoint, replay_endpoint="tcp://127.0.0.1:0")


@pytest.mark.parametrize("options", [{"queue_size": 0}, {"buffer_steps": -1}])
def test_sizes_must_make_sense(options):
    """A queue of nothing is refused."""
    with pytest.raises(ConfigError, match="queue_size >= 1"):
        Publisher(**options)


def test_the_outlet_feeds_bus_and_sink_alike():
    """Both carry the same stamped records; a reader's question reaches the engine."""
    asked = []
    with SinkReader() as reader, Outlet(flush=lambda: asked.append(1)) as outlet:
        sent = outlet.publish([progress("a"), progress("a"), progress("b")])
        reader.barrier()
        assert list(reader) == sent
        assert recall(outlet.publisher.endpoint) == sent
        assert [(s.id, s.seq) for s in sent] == [("a", 0), ("a", 1), ("b", 0)]
        assert len(asked) >= 2


def test_an_outlet_without_a_bus_goes_on(own_directory, caplog):
    """A bus that cannot be opened costs nobody a request."""
    with Outlet(BusConfig(endpoint=f"ipc://{own_directory}/no/such")) as outlet:
        assert outlet.publisher is None
        assert outlet.sink is None
        assert outlet.publish([progress("a")])[0].t > 0
    assert "no signals on the bus" in caplog.text

import threading

import msgspec
import pytest
import zmq

import earlystop
from earlystop.bus import Publisher
from earlystop.bus.wire import SCHEMA, TOPIC, Batch, encode_batch, encode_signals
from earlystop.errors import StreamError

from .buses import progress, stream, until

pytestmark = pytest.mark.usefixtures("own_directory")

SOON = 1.0
"""Seconds without a signal that end a test's iteration."""


def take(watching, n):
    return [next(watching) for _ in range(n)]


class raw_publisher:  # noqa: N801 - used like a function
    """A PUB socket without a replay socket, for wires that a real publisher never produces."""

    def __init__(self, directory):
        self.endpoint = f"ipc://{directory}/raw"

    def __enter__(self):
        self.context = zmq.Context()
        self.pub = self.context.socket(zmq.PUB)
        self.pub.bind(self.endpoint)
        return self.endpoint, self.send

    def send(self, seq, epoch):
        events, _ = encode_signals([progress("a", seq)])
        batch = Batch(0.0, msgspec.Raw(events), None, SCHEMA, epoch, 0)
        self.pub.send_multipart((TOPIC, seq.to_bytes(8, "big"), encode_batch(batch)))

    def __exit__(self, *_):
        self.pub.close(linger=0)
        self.context.term()


def wait_for(signals, send):
    """Send batch 0 of epoch 1 until the watcher has it."""
    got = []
    reader = threading.Thread(target=lambda: got.extend(take(signals, 1)))
    reader.start()
    while reader.is_alive():
        send(0, 1)
        reader.join(0.005)
    assert got


def test_a_batch_lost_on_the_way_is_asked_for_again():
    """A gap in the sequence is closed by the replay socket before later signals are handed out."""
    with Publisher() as publisher, earlystop.watch(timeout=5) as signals:
        publisher.publish([progress("a", 0)])
        next(signals)
        pub = publisher._pub

        class Lossy:
            def send_multipart(self, frames):
                if int.from_bytes(frames[1], "big") not in (1, 2):
                    pub.send_multipart(frames)

        publisher._pub = Lossy()
        for seq in (1, 2, 3):
            publisher.publish([progress("a", seq)])
            until(lambda: not publisher._queue)
        assert [s.seq for s in take(signals, 3)] == [1, 2, 3]
        publisher._pub = pub


def test_the_last_batch_lost_is_found_too():
    """No later batch betrays the loss of the last one: the watcher asks from time to time."""
    with Publisher() as publisher, earlystop.watch(timeout=5) as signals:
        publisher.publish([progress("a", 0)])
        next(signals)
        pub = publisher._pub

        class Deaf:
            def send_multipart(self, frames):
                pass

        publisher._pub = Deaf()
        publisher.publish([progress("a", 1)])
        assert next(signals).seq == 1
        publisher._pub = pub


def test_without_a_replay_later_signals_are_held_back_only_for_a_while(own_directory, monkeypatch):
    """A publisher that never answers costs a delay and a counted loss, not the rest of the stream."""
    monkeypatch.setattr("earlystop.bus.follow._ANSWER_S", 0.1)
    with raw_publisher(own_directory) as (endpoint, send), earlystop.watch(endpoint, timeout=5) as signals:
        wait_for(signals, send)
        send(5, 1)
        send(6, 1)
        assert [s.seq for s in take(signals, 2)] == [5, 6]
        assert signals.lost == 4


def test_a_publisher_that_is_replaced_cannot_come_back(own_directory):
    """A new epoch begins at 0; stragglers of the old one are left out."""
    with raw_publisher(own_directory) as (endpoint, send), earlystop.watch(endpoint, timeout=SOON) as signals:
        wait_for(signals, send)
        send(0, 2)
        send(1, 1)
        send(1, 2)
        assert [s.seq for s in signals] == [0, 1]


def test_a_wall_clock_set_back_between_two_engines_blinds_nobody(own_directory):
    """A new publisher with an older start is believed once it has answered twice."""
    endpoint = f"ipc://{own_directory}/bus"
    with earlystop.watch(endpoint, timeout=10) as signals:
        for name, epoch in (("first", 2_000), ("second", 1_000)):
            with Publisher(endpoint) as publisher:
                publisher._epoch = epoch
                publisher.publish(stream(name, 3))
                assert [s.id for s in take(signals, 3)] == [name] * 3


def test_an_unknown_schema_is_refused(own_directory):
    """A newer engine is told apart from silence."""
    endpoint = f"ipc://{own_directory}/bus"
    with (
        Publisher(endpoint, schema=SCHEMA + 1) as publisher,
        earlystop.watch(endpoint, timeout=5) as signals,
    ):
        publisher.publish(stream("a", 1))
        with pytest.raises(StreamError, match="schema 2, this earlystop reads 1"):
            next(signals)

import multiprocessing
import os
import threading
import time

import pytest
import zmq

from earlystop.bus import (
    Outlet,
    SinkReader,
    SinkWriter,
    check_gapless,
    default_sink,
    recall,
)
from earlystop.errors import ConfigError, StreamError

from .buses import child, end, kill, progress, stream, until

pytestmark = pytest.mark.usefixtures("own_directory")

IDS = ["плюс", "停止", "a b/c", "🛑", ""]


def test_ten_thousand_records_arrive_in_order():
    """Lossless: every record of every stream, in one process."""
    with SinkReader() as reader, SinkWriter() as writer:
        for start in range(0, 10_000, 50):
            for name in IDS:
                writer.send(stream(name, 10, start // 5))
        reader.barrier()
        assert len(reader) == 10_000
        check_gapless(reader)
        assert [s.seq for s in reader.take("停止")] == list(range(2000))
        assert reader.take("停止") == []
        assert sorted(reader.drain()) == sorted(set(IDS) - {"停止"})
        assert len(reader) == 0


WRITER = """
import sys
from earlystop.bus import SinkWriter, Stamper
from earlystop.signals import Kind, Signal
writer = SinkWriter()
stamper = Stamper()
print("ready", flush=True)
for line in sys.stdin:
    writer.send(stamper.stamp([Signal(id=sys.argv[1], kind=Kind.PROGRESS, tokens=i) for i in range(int(line))]))
writer.close()
"""


def test_worker_processes_find_the_sink_by_themselves():
    """The engine's process inherits the endpoint; after the barrier all of two workers' records are in."""
    with SinkReader() as reader:
        workers = [child(WRITER, name) for name in ("α", "β")]
        for worker in workers:
            worker.stdin.write(b"10000\n")
            worker.stdin.flush()
        for worker in workers:
            end(worker)
        reader.barrier(writers=2)
        streams = reader.drain()
        assert {name: len(signals) for name, signals in streams.items()} == {"α": 10_000, "β": 10_000}
        check_gapless(streams["α"] + streams["β"])


def test_the_reader_may_start_after_the_writer(own_directory):
    """What was sent before there was a reader waits for it."""
    endpoint = f"ipc://{own_directory}/sink"
    began = time.monotonic()
    with SinkWriter(endpoint) as writer:
        writer.send(stream("a", 1000))
        with SinkReader(endpoint) as reader:
            reader.barrier()
            assert len(reader.take("a")) == 1000
    assert time.monotonic() - began < 2, "a writer must not wait for a reader that has closed"


def test_the_barrier_fetches_what_is_still_in_the_engine():
    """Records that wait for the device are handed over before the barrier falls."""
    device = []

    def flush():
        writer.send(device)
        device.clear()

    with SinkReader() as reader, SinkWriter(on_sync=flush) as writer:
        for n in (1, 2, 3, 4):
            device.append(progress("a", n))
            reader.barrier()
            assert len(reader) == n


def test_an_engine_that_fails_to_hand_over_is_reported(caplog):
    """The engine's fault ends neither bus nor sink; the barrier says that something is missing."""
    with SinkReader() as reader, Outlet(flush=lambda: 1 / 0) as outlet:
        outlet.publish([progress("a")])
        with pytest.raises(StreamError, match="could not be sent"):
            reader.barrier()
        assert len(reader) == 1
        assert len(recall(outlet.publisher.endpoint)) == 1
    assert "ZeroDivisionError" in caplog.text


def test_a_barrier_without_an_engine_fails_and_says_what_to_do():
    """Silence is not taken for completeness."""
    with SinkReader() as reader:
        reader.barrier(writers=0)
        with pytest.raises(StreamError, match="0 of 1 engine processes have connected"):
            reader.barrier(timeout=0.01)


def test_an_engine_that_does_not_answer_is_named():
    """A worker that hangs is a timeout, not a loss that nobody sees."""
    stuck = threading.Event()
    with SinkReader() as reader, SinkWriter(on_sync=lambda: stuck.wait(5)):
        until(lambda: reader.writers)
        with pytest.raises(StreamError, match=f"{os.getpid()} did not hand over"):
            reader.barrier(timeout=0.05)
        stuck.set()
        reader.barrier()


def test_an_engine_killed_after_a_barrier_does_not_trouble_the_next():
    """Two engines one after another in one driver."""
    with SinkReader() as reader:
        for n in (1, 2):
            worker = child(WRITER, f"run {n}")
            worker.stdin.write(b"5\n")
            worker.stdin.flush()
            reader.barrier(writers=n)
            until(lambda n=n: len(reader) == 5 * n)
            reader.barrier(writers=n)
            kill(worker)
        reader.barrier()


def test_an_engine_killed_with_records_unsent_is_reported():
    """A worker that spoke and then died without its last word may have lost some."""
    with SinkReader() as reader:
        worker = child(WRITER, "a")
        worker.stdin.write(b"5\n")
        worker.stdin.flush()
        until(lambda: len(reader) == 5)
        kill(worker)
        with pytest.raises(StreamError, match=f"process {worker.pid} ended without saying"):
            reader.barrier()
        reader.barrier()


def test_a_record_that_cannot_be_sent_is_reported_once():
    """Even the lossless path says what it could not carry."""
    with SinkReader() as reader, SinkWriter() as writer:
        writer.send([progress("a", data={"x": object()}), progress("b")])
        with pytest.raises(StreamError, match="1 signals could not be sent"):
            reader.barrier()
        reader.barrier()
        assert len(reader) == 1


def test_foreign_bytes_at_the_sink_are_reported():
    """A stranger's message neither stops the sink nor passes unseen."""
    context = zmq.Context()
    with SinkReader() as reader, SinkWriter() as writer, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.connect(reader.endpoint)
        stranger.send(b"\xc1")
        until(lambda: reader._faults)
        writer.send(stream("a", 1))
        with pytest.raises(StreamError, match="not a message of a sink writer"):
            reader.barrier()
        reader.barrier()
        assert len(reader) == 1
    context.term()


def test_the_sink_is_the_process_wide_default_while_it_is_open(monkeypatch):
    """The environment and the default are as before once it is closed."""
    monkeypatch.setenv("EARLYSTOP_SINK", "ipc:///former")
    assert default_sink() is None
    with SinkReader() as first:
        assert os.environ["EARLYSTOP_SINK"] == first.endpoint
        with SinkReader(export=False):
            assert default_sink() is first
        first.close()
        with pytest.raises(StreamError):
            first.barrier(timeout=0.01)
    assert default_sink() is None
    assert os.environ["EARLYSTOP_SINK"] == "ipc:///former"


def test_a_writer_without_a_sink_says_so():
    """The worker of a driver that opened none has nothing to write to."""
    with pytest.raises(ConfigError, match="open a SinkReader in the driver"):
        SinkWriter()
    with pytest.raises(ConfigError, match="cannot connect"):
        SinkWriter("nonsense")


def test_a_sink_that_lives_is_not_taken_over(own_directory):
    """Two readers at one place would split the records between them."""
    endpoint = f"ipc://{own_directory}/sink"
    with SinkReader(endpoint), pytest.raises(ConfigError, match="another living"):
        SinkReader(endpoint)


def _spawned(count):
    with SinkWriter() as writer:
        writer.send(stream("spawned", count))


def test_a_spawned_worker_writes_to_the_sink():
    """vLLM starts its worker by multiprocessing."""
    with SinkReader() as reader:
        worker = multiprocessing.get_context("spawn").Process(target=_spawned, args=(100,))
        worker.start()
        worker.join(20)
        worker.close()
        reader.barrier()
        assert len(reader.take("spawned")) == 100


def test_a_writer_without_a_reader_waits_no_longer_than_it_was_told(own_directory, caplog):
    """A driver that never comes is a warning, not a worker that cannot end."""
    writer = SinkWriter(f"ipc://{own_directory}/nobody")
    writer.send(stream("a", 1))
    began = time.monotonic()
    writer.close(timeout=0.05)
    assert time.monotonic() - began < 1
    assert "did not take its last signals" in caplog.text

import signal
import subprocess
import sys
import threading
import time

import pytest

import earlystop
from earlystop.bus import Publisher, Stamper, check_gapless
from earlystop.errors import ConfigError, StreamError

from .buses import child, end, kill, progress, stream, until

pytestmark = pytest.mark.usefixtures("own_directory")

SOON = 1.0
"""Seconds without a signal that end a test's iteration."""

PUBLISHER = """
import sys
from earlystop.bus import Publisher, Stamper
from earlystop.signals import Kind, Signal
publisher = Publisher(sys.argv[1])
stamper = Stamper()
print("ready", flush=True)
for line in sys.stdin:
    for i in range(int(line)):
        publisher.publish(stamper.stamp([Signal(id=sys.argv[2], kind=Kind.PROGRESS, tokens=i)]))
    print("sent", flush=True)
publisher.close()
"""


def publish(process, n):
    process.stdin.write(f"{n}\n".encode())
    process.stdin.flush()
    assert process.stdout.readline() == b"sent\n"


def take(watching, n):
    return [next(watching) for _ in range(n)]


def test_signals_arrive_typed_and_in_order():
    """The records are those that were published."""
    with Publisher() as publisher, earlystop.watch(timeout=5) as signals:
        sent = Stamper().stamp(stream("α/β 停止", 3))
        publisher.publish(sent)
        assert take(signals, 3) == sent
        assert iter(signals) is signals


def test_it_ends_when_nothing_comes_for_the_timeout():
    """The timeout counts from the last signal, whether there is an engine or not."""
    began = time.monotonic()
    with earlystop.watch(timeout=0.1) as signals:
        assert list(signals) == []
    assert 0.1 <= time.monotonic() - began < 5
    with Publisher() as publisher, earlystop.watch(timeout=SOON) as signals:
        publisher.publish(stream("a", 2))
        assert len(list(signals)) == 2
    with earlystop.watch(timeout=0) as signals:
        assert list(signals) == []


def test_time_spent_by_the_caller_does_not_count():
    """A slow reader loses nothing to its own slowness."""
    with Publisher() as publisher, earlystop.watch(timeout=5) as signals:
        publisher.publish(stream("a", 1))
        next(signals)
        signals._timeout = 0.2
        publisher.publish(stream("a", 1, start=1))
        time.sleep(0.5)
        assert next(signals).seq == 1


def test_only_the_stream_asked_for():
    """Other streams are left out, and do not keep the iteration alive."""
    done = threading.Event()
    with Publisher() as publisher:

        def chatter():
            while not done.wait(0.02):
                publisher.publish([progress("b")])

        thread = threading.Thread(target=chatter)
        thread.start()
        try:
            publisher.publish(stream("a", 2) + stream("b", 2))
            with earlystop.watch(id="a", timeout=SOON) as signals:
                assert [s.seq for s in signals] == [0, 1]
        finally:
            done.set()
            thread.join()


def test_who_comes_late_gets_everything_from_the_buffer():
    """A replay longer than one answer closes the gap, once and in order, while new signals come in."""
    with Publisher() as publisher:
        for record in stream("a", 3000):
            publisher.publish([record])
        with earlystop.watch(timeout=5) as signals:
            first = take(signals, 10)
            publisher.publish(stream("a", 500, start=3000))
            got = first + take(signals, 3490)
        assert [s.seq for s in got] == list(range(3500))
        assert signals.lost == 0


def test_what_no_buffer_holds_is_a_gap_that_shows():
    """Late beyond the buffer: the loss is counted, and a trace of it is refused."""
    with Publisher(buffer_steps=10) as publisher:
        for record in stream("a", 50):
            publisher.publish([record])
            until(lambda: not publisher._queue)
        with earlystop.watch(timeout=SOON) as signals:
            got = list(signals)
            assert [s.seq for s in got] == list(range(40, 50))
            assert signals.lost == 40
    with pytest.raises(StreamError, match="seq 0, 1"):
        check_gapless(got)


def test_it_may_start_before_the_engine_and_outlives_its_restart(own_directory):
    """An engine killed and started anew at the same place goes on where a new publisher begins."""
    endpoint = f"ipc://{own_directory}/bus"
    with earlystop.watch(endpoint, timeout=10) as signals:
        for life in ("first", "second"):
            engine = child(PUBLISHER, endpoint, life)
            publish(engine, 100)
            got = take(signals, 100)
            assert [(s.id, s.seq) for s in got] == [(life, seq) for seq in range(100)]
            kill(engine)


def test_without_an_endpoint_it_finds_every_engine_of_the_user(own_directory):
    """Engines are found in the user's directory, also those that start later."""
    with earlystop.watch(timeout=10) as signals:
        engines = [child(PUBLISHER, "", name) for name in ("one", "two")]
        for engine in engines:
            publish(engine, 10)
        got = take(signals, 20)
        for engine in engines:
            end(engine)
    assert {s.id for s in got} == {"one", "two"}
    check_gapless(got)


def test_the_ranks_of_one_endpoint_are_followed_together(own_directory):
    """Data-parallel ranks publish beside each other."""
    endpoint = f"ipc://{own_directory}/bus"
    with (
        Publisher(endpoint) as first,
        Publisher(endpoint, dp_rank=1) as second,
        earlystop.watch(endpoint, timeout=5) as signals,
    ):
        first.publish([progress("rank 0")])
        second.publish([progress("rank 1")])
        assert {s.id for s in take(signals, 2)} == {"rank 0", "rank 1"}


def test_watching_costs_the_engine_nothing():
    """Looking for gaps does not make the engine hand over unfinished records, however many watch."""
    asked = []
    with Publisher(on_request=lambda: asked.append(1)) as publisher, earlystop.watch(timeout=0.3) as signals:
        publisher.publish(stream("a", 1))
        list(signals)
    assert not asked


def test_several_watch_at_once():
    """Each watcher gets every signal."""
    got = [[], [], []]
    with Publisher() as publisher:

        def follow(mine):
            with earlystop.watch(timeout=5) as signals:
                mine.extend(take(signals, 200))

        threads = [threading.Thread(target=follow, args=(mine,)) for mine in got]
        for thread in threads:
            thread.start()
        for record in stream("a", 200):
            publisher.publish([record])
        for thread in threads:
            thread.join(10)
    assert [[s.seq for s in mine] for mine in got] == [list(range(200))] * 3


def test_close_ends_a_wait_in_another_thread():
    """`close` from outside ends the iteration at once; afterwards there is nothing more."""
    signals = earlystop.watch()
    waiting = threading.Thread(target=lambda: list(signals))
    waiting.start()
    until(lambda: signals._owner is not None)
    signals.close()
    waiting.join(5)
    assert not waiting.is_alive()
    assert list(signals) == []
    signals.close()


INTERRUPTED = """
import signal, earlystop
signal.signal(signal.SIGINT, signal.default_int_handler)  # a child of a shell's background job ignores it
try:
    with earlystop.watch() as signals:
        print("ready", flush=True)
        next(signals)
except KeyboardInterrupt:
    print("interrupted", signals._freed)
"""

HANDLED = """
import signal, earlystop
signals = earlystop.watch()
signal.signal(signal.SIGINT, lambda *_: signals.close())
print("ready", flush=True)
print(list(signals), signals._freed)
"""


@pytest.mark.parametrize(("code", "says"), [(INTERRUPTED, b"interrupted True"), (HANDLED, b"[] True")])
def test_ctrl_c_leaves_nothing_open(code, says):
    """An interrupt ends the wait and frees the sockets, as does `close` in a signal handler."""
    command = [sys.executable, "-W", "error", "-c", code]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    time.sleep(0.05)  # until it waits
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=10)
    assert (out.strip(), err, process.returncode) == (says, b"", 0)


def test_tcp(monkeypatch):
    """A named port works like a path; `*` is reached at home."""
    with Publisher("tcp://127.0.0.1:0") as probe:
        port = int(probe.endpoint.rpartition(":")[2]) % 20_000 + 20_000
    monkeypatch.setenv("EARLYSTOP_BUS", f"tcp://*:{port}")
    with Publisher() as publisher, earlystop.watch(timeout=5) as signals:
        publisher.publish(stream("a", 2))
        assert [s.seq for s in take(signals, 2)] == [0, 1]


@pytest.mark.parametrize("timeout", [-1, float("nan")])
def test_a_timeout_that_is_none_is_refused(timeout):
    """Negative and NaN are errors, not "for ever"."""
    with pytest.raises(ConfigError, match="timeout must be >= 0"):
        earlystop.watch(timeout=timeout)


def test_an_endpoint_that_is_none_is_refused():
    """The mistake shows at once, not as silence."""
    with pytest.raises(ConfigError, match="ipc://PATH or tcp://HOST:PORT"):
        earlystop.watch("localhost:5557")

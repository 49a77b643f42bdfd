import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from earlystop.clock import HLC, MAX_COUNTER, MAX_STAMP, pack, to_datetime, unpack

MS = st.integers(0, 2**48 - 1)
STEPS = st.lists(st.integers(-2000, 2000), min_size=1, max_size=50)


class Wall:
    """A wall clock that a test sets."""

    def __init__(self, ms=1_700_000_000_000):
        self.ms = ms

    def __call__(self):
        return self.ms


def quiet(wall, **options):
    return HLC(wall, on_drift=lambda ms: None, **options)


@given(MS, st.integers(0, MAX_COUNTER))
def test_parts_survive_packing_and_sort_by_time_then_counter(ms, counter):
    """A stamp is 48 bits of milliseconds above 16 bits of counter."""
    stamp = pack(ms, counter)
    assert unpack(stamp) == (ms, counter)
    assert 0 <= stamp <= MAX_STAMP
    assert stamp == ms * 65536 + counter


@pytest.mark.parametrize(("ms", "counter"), [(-1, 0), (2**48, 0), (0, -1), (0, 65536)])
def test_parts_out_of_range_are_refused(ms, counter):
    """A part that does not fit is an error, not another time."""
    with pytest.raises(ValueError, match="must lie in"):
        pack(ms, counter)


@pytest.mark.parametrize("stamp", [-1, 2**64])
def test_a_stamp_has_64_bits(stamp):
    """What is no unsigned 64-bit integer is no stamp."""
    with pytest.raises(ValueError, match="64-bit"):
        unpack(stamp)
    with pytest.raises(ValueError, match="64-bit"):
        HLC().merge(stamp)


def test_the_wall_part_is_utc():
    """The upper bits are milliseconds since the epoch."""
    assert to_datetime(pack(1_700_000_000_123, 7)).isoformat() == "2023-11-14T22:13:20.123000+00:00"


@given(STEPS)
def test_stamps_increase_whatever_the_wall_clock_does(steps):
    """Monotone: a wall clock that stands still or goes back never repeats or reverses a stamp."""
    wall = Wall()
    clock = quiet(wall)
    stamps = []
    for step in steps:
        wall.ms += step
        stamps.append(clock.now())
    assert stamps == sorted(set(stamps))
    assert all(unpack(s)[0] >= 1_700_000_000_000 - 2000 * 50 for s in stamps)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 50)), max_size=60))
def test_effect_is_later_than_cause(events):
    """Causality: over any exchange of messages between skewed clocks, receipt is stamped after sending."""
    walls = [Wall(1_700_000_000_000 + skew) for skew in (0, 200, 400)]
    clocks = [quiet(wall) for wall in walls]
    last = [0, 0, 0]
    for sender, receiver, elapsed in events:
        for wall in walls:
            wall.ms += elapsed
        sent = clocks[sender].now()
        received = clocks[receiver].merge(sent)
        assert sent > last[sender]
        assert received > sent
        assert received > last[receiver]
        last[sender] = max(last[sender], sent)
        last[receiver] = received
        # Bounded: never further ahead than the fastest clock, up to what counting adds.
        assert unpack(received)[0] <= max(wall.ms for wall in walls) + 1


def test_counter_overflow_carries_into_the_milliseconds():
    """65,536 stamps within a millisecond borrow the next one."""
    wall = Wall(1000)
    clock = HLC(wall)
    stamps = [clock.now() for _ in range(MAX_COUNTER + 2)]
    assert unpack(stamps[MAX_COUNTER]) == (1000, MAX_COUNTER)
    assert unpack(stamps[-1]) == (1001, 0)
    wall.ms = 1002
    assert unpack(clock.now()) == (1002, 0)


def test_merge_of_a_full_counter_carries():
    """A remote counter at its end carries as well."""
    assert unpack(HLC(Wall(1000)).merge(pack(1000, MAX_COUNTER))) == (1001, 0)


def test_a_remote_clock_far_ahead_is_reported_once_and_not_followed():
    """Drift is bounded: one broken clock cannot push ours into the future."""
    wall, alarms = Wall(10_000), []
    clock = HLC(wall, on_drift=alarms.append)
    assert unpack(clock.merge(pack(10_500)))[0] == 10_500
    assert not alarms
    stamp = clock.merge(pack(10_501))
    assert unpack(stamp)[0] == 10_500
    assert alarms == [501]
    clock.merge(pack(99_000))
    assert alarms == [501]
    clock.now()
    clock.merge(pack(99_000))
    assert alarms == [501, 89_000]


def test_a_wall_clock_set_back_is_reported(caplog):
    """Our own clock set back is drift too; by default it is a warning in the log."""
    wall = Wall(10_000)
    clock = HLC(wall)
    first = clock.now()
    wall.ms = 9_000
    assert clock.now() == first + 1
    assert "differ by 1000 ms" in caplog.text


def test_threads_never_share_a_stamp():
    """Stamps are unique across threads."""
    clock, stamps = HLC(), [[] for _ in range(4)]
    threads = [
        threading.Thread(target=lambda mine=mine: mine.extend(clock.now() for _ in range(5000))) for mine in stamps
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({s for mine in stamps for s in mine}) == 20_000
    assert all(mine == sorted(mine) for mine in stamps)

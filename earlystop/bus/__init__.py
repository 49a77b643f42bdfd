"""Signals between processes: a bus for watchers, which may lose records and says so, and a sink, which may not.

=====================  ============================================================================================
`Publisher`            sends signals to any number of watchers and replays its buffer to those who come late
`SinkWriter`           sends signals to the one driver process that needs all of them
`SinkReader`           collects them there; `SinkReader.barrier` makes sure that all are in
`Outlet`               what the engine uses: stamps, then sends to both
`Stamper`              gives each record its place in its stream (`seq`) and its time (`t`)
`check_gapless`        refuses a trace with a gap
`recall`               what a publisher still holds in its buffer
`default_endpoint`     where the bus is, when nobody said otherwise
`default_sink`         the sink that is open in this process
=====================  ============================================================================================

Names are loaded on first use: reading recorded signals needs no ZeroMQ.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from earlystop.bus.endpoint import default_endpoint, pin_endpoint
    from earlystop.bus.follow import recall
    from earlystop.bus.outlet import Outlet
    from earlystop.bus.publisher import Publisher
    from earlystop.bus.sequence import Stamper, check_gapless
    from earlystop.bus.sink import SinkReader, default_sink
    from earlystop.bus.sink_writer import SinkWriter
    from earlystop.bus.wire import finite

__all__ = [
    "Outlet",
    "Publisher",
    "SinkReader",
    "SinkWriter",
    "Stamper",
    "check_gapless",
    "default_endpoint",
    "default_sink",
    "finite",
    "pin_endpoint",
    "recall",
]

_HOME = {
    "Outlet": "outlet",
    "Publisher": "publisher",
    "SinkReader": "sink",
    "SinkWriter": "sink_writer",
    "Stamper": "sequence",
    "check_gapless": "sequence",
    "default_endpoint": "endpoint",
    "default_sink": "sink",
    "finite": "wire",
    "pin_endpoint": "endpoint",
    "recall": "follow",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'earlystop.bus' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"earlystop.bus.{_HOME[name]}"), name)
    globals()[name] = value
    return value

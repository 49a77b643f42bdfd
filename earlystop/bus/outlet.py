"""Where the engine puts its signals: onto the bus, and into the driver's sink if it has opened one."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Self

from earlystop.bus.endpoint import BUS_ENV, SINK_ENV
from earlystop.bus.publisher import Publisher
from earlystop.bus.sequence import Stamper
from earlystop.bus.sink_writer import SinkWriter
from earlystop.config import BusConfig
from earlystop.errors import ConfigError
from earlystop.signals import Signal

_log = logging.getLogger(__name__)


class Outlet:
    """Stamps signals and sends them to the bus and the sink. A bus that cannot be opened is logged and left out.

    Args:
        config: The ``[bus]`` table; $EARLYSTOP_BUS wins over its endpoint.
        dp_rank: Data-parallel rank of this engine.
        flush: Called on a thread of ours when a reader wants everything: publish here what is still on its way. It
            is called by two threads and must not wait for either.
    """

    def __init__(
        self, config: BusConfig | None = None, *, dp_rank: int = 0, flush: Callable[[], None] | None = None
    ) -> None:
        config = config or BusConfig()
        self._stamper = Stamper()
        self.publisher: Publisher | None = None
        """The bus, None if it could not be opened."""
        self.sink: SinkWriter | None = None
        """The driver's sink, None if it has none."""
        try:
            self.publisher = Publisher(
                os.environ.get(BUS_ENV) or config.endpoint,
                buffer_steps=config.replay,
                queue_size=config.queue,
                dp_rank=dp_rank,
                on_request=flush,
            )
        except ConfigError as error:
            _log.warning("no signals on the bus: %s", error)
        if os.environ.get(SINK_ENV):
            self.sink = SinkWriter(on_sync=flush)

    def publish(self, signals: Sequence[Signal]) -> list[Signal]:
        """Stamp signals and send them; never blocks.

        Returns:
            The stamped records.
        """
        stamped = self._stamper.stamp(signals)
        if self.publisher is not None:
            self.publisher.publish(stamped)
        if self.sink is not None:
            self.sink.send(stamped)
        return stamped

    def close(self, timeout: float = 2.0) -> None:
        """Flush and close both, each within about `timeout` seconds."""
        if self.sink is not None:
            self.sink.close(timeout)
        if self.publisher is not None:
            self.publisher.close(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

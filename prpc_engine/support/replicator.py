"""One channel's items to every one of several channels, by one thread.

    source  event                       then
    open    items come                  each output gets all of them, in order; the slowest sets the
                                        pace
    closed  drained                     the outputs are closed: their readers end when they have
                                        read what is in them
    open    a reader closes its output  that output gets no more, the others go on
    open    all readers have            the source is closed: its producers must not fill a channel
                                        that nobody empties

Made with no outputs at all it drops what comes. What had begun its way and reaches nobody is
logged.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Generic

from prpc_engine.errors import Closed
from prpc_engine.settings.config import check_number, check_wait
from prpc_engine.support.channel import CAPACITY_ITEMS, Channel, T

# on their way at a time: what a lock costs is shared by so many, and no reader waits for more
BATCH_ITEMS = 8
OUTPUTS_MAX = 1024
# for the thread to see that its channels are closed: it waits for nothing else
CLOSE_TIMEOUT_S = 10.0

logger = logging.getLogger("prpc")


class ChannelReplicator(Generic[T]):
    """A channel replicator gives every item of one channel to each of several others.

    It owns its outputs and its one thread, the caller owns `source`. A context manager. What
    follows when one of them is closed: the table at the file's head.

    source     what is read, by nobody else
    outputs    how many get it all
    capacity   of each of them, in items

    Raises ConfigError.
    """

    def __init__(self, source: Channel[T], outputs: int, capacity: int = CAPACITY_ITEMS) -> None:
        check_number("outputs", outputs, 0, OUTPUTS_MAX)
        self._source = source
        self.outputs: tuple[Channel[T], ...] = tuple(
            Channel(capacity, f"output {number} of {source.name}") for number in range(outputs)
        )
        self._thread = threading.Thread(target=self._run, name="prpc-replicator", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        live = list(self.outputs)
        try:
            while not self.outputs or live:
                batch = self._source.get_many(BATCH_ITEMS)
                live = [output for output in live if self._give(output, batch)]
            lost = len(self._source.abort())
            if lost:
                logger.warning("%s: %d items had no reader any more", self._source.name, lost)
        except Closed:
            for output in live:
                output.close()

    def _give(self, output: Channel[T], batch: Sequence[T]) -> bool:
        """Whether the reader is there still."""
        try:
            given = output.put_many(batch)
        except Closed:
            given = 0
        if given < len(batch):
            logger.warning(
                "%s was closed by its reader: %d items did not reach it",
                output.name,
                len(batch) - given,
            )
        return given == len(batch)

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until the source is closed and every output has all of it. Raises TimeoutError,
        ConfigError.
        """
        check_wait(timeout_s)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            waiting = (
                ", ".join(
                    f"{output.name} holds {len(output)} of {output.capacity}"
                    for output in self.outputs
                )
                or "none"
            )
            raise TimeoutError(
                f"{self._source.name} is not replicated after {timeout_s} s: {waiting}"
            )

    def close(self) -> None:
        """End now: the source is closed and emptied, readers get what their outputs hold. Again:
        does nothing.
        """
        lost = len(self._source.abort())
        if lost:
            logger.warning(
                "%s: %d items were not replicated, it was closed before", self._source.name, lost
            )
        for output in self.outputs:
            output.close()
        self.join(CLOSE_TIMEOUT_S)

    def __enter__(self) -> ChannelReplicator[T]:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

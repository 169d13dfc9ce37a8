"""What a worker does after a loss: find out who serves the partition now, and send what was lost
there, until it arrives.

One thread, `prpc-kv-mending`, is there while requests are lost, and only then: so whoever asks
never waits for a connection or for the master, and the path of a request that nothing happens to
has none of this in it.

    a round: ask where the lost lanes' partitions are now, send what is lost there, and settle what
    is past its deadline; then rest, each time twice as long up to BACKOFF_S_MAX; the thread ends
    when nothing is lost after that
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Sequence

from prpc_engine.errors import Closed
from prpc_engine.kv.client.partition_client import PartitionClient

logger = logging.getLogger("prpc")
BACKOFF_S_MIN = 0.005  # of a connection that was cut, the first attempt mostly succeeds
BACKOFF_S_MAX = 0.5  # of a server that died: its replica is promoted within some of these
# requests that wait are told of in the log: a replica has been promoted by then
TOLD_AFTER_S, TOLD_EVERY_S = 2.0, 10.0


class Recovery:
    """A recovery sends a worker's lost requests again, in a thread that ends when none is left.

    Owned by one worker; add() is called from any thread. locate: tells lanes where their partitions
    are now; it may block for a little. Raises nothing: what goes wrong is logged, and requests end
    by their deadlines.
    """

    def __init__(self, locate: Callable[[Sequence[PartitionClient]], None]) -> None:
        self._locate = locate
        self._lock = threading.Lock()
        self._lanes: dict[int, PartitionClient] = {}  # lost, by partition
        self._thread: threading.Thread | None = None

    def add(self, lane: PartitionClient) -> None:
        """Requests of that lane are lost. From any thread, and from the reactor's: it does not
        wait.
        """
        with self._lock:
            self._lanes[lane.partition] = lane
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="prpc-kv-mending", daemon=True
                )
                self._thread.start()

    def _run(self) -> None:
        backoff_s, tell_at = BACKOFF_S_MIN, time.monotonic() + TOLD_AFTER_S
        while True:
            with self._lock:
                if not self._lanes:
                    self._thread = None
                    return
                lanes = list(self._lanes.values())
                self._lanes = {}
            try:
                self._locate(lanes)
                broken = [lane for lane in lanes if not lane.repeat()]
            except Closed as error:
                for lane in lanes:
                    lane.fail(error)
                broken = []
            except Exception as error:
                # whatever it is, those who wait for these lanes are told at their deadlines
                logger.warning(
                    "lost requests to %s wait: %s",
                    ", ".join(map(str, lanes)),
                    str(error).partition("\n")[0],
                )
                broken = lanes
            now = time.monotonic()
            if broken and now >= tell_at:
                tell_at = now + TOLD_EVERY_S
                logger.warning(
                    "requests wait, until their deadlines, for %s",
                    "; ".join(lane.waits_for for lane in broken),
                )
            until = min(
                [now + random.uniform(0.5, 1.0) * backoff_s, *(lane.expire(now) for lane in broken)]
            )
            time.sleep(max(0.0, until - now))
            backoff_s = min(BACKOFF_S_MAX, 2 * backoff_s)
            with self._lock:
                self._lanes.update({lane.partition: lane for lane in broken})

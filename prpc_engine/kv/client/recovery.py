"""What a worker does after a loss: find out who serves the partition now, and send what was lost
there, until it arrives.

One coroutine of the control loop is there while requests are lost, and only then: so whoever asks
never waits for a connection or for the master, and the path of a request that nothing happens to
has none of this in it.

    state       event                            next
    idle        requests of a lane are lost      a round
    a round     asks where the lost lanes'       pause: as recovery_pace.py says
                  partitions are now, sends
                  what is lost there, in turns
                  of the data's reactor
    pause       its end; something is lost       a round
    pause       its end; nothing is lost         idle
    any         the service is closed            idle: all that is lost ends with that
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from prpc_engine.errors import Closed
from prpc_engine.kv.client.partition_client import PartitionClient
from prpc_engine.kv.client.recovery_pace import RecoveryPace
from shard import ClosedError, control_loop, runtime, sleep

logger = logging.getLogger("prpc")


class Recovery:
    """A recovery sends a worker's lost requests again, by a coroutine that ends when none is left.

    Owned by one worker; add() is called from any thread. locate: tells lanes where their partitions
    are now, as a coroutine of the control loop. Raises nothing: what goes wrong is logged, and
    requests end by their deadlines.
    """

    def __init__(
        self, locate: Callable[[Sequence[PartitionClient]], Coroutine[Any, Any, None]]
    ) -> None:
        self._locate = locate
        # of what follows: add() comes from any thread, and must see either a coroutine that will
        # look again, or none
        self._lock = runtime.Lock()
        self._lanes: dict[int, PartitionClient] = {}  # lost, by partition
        self.is_running = False  # whether some are, or were until now

    def add(self, lane: PartitionClient) -> None:
        """Requests of that lane are lost. From any thread, and from the reactor's: it does not
        wait.
        """
        with self._lock:
            self._lanes[lane.partition] = lane
            if not self.is_running:
                control_loop().spawn(self._run())
                self.is_running = True

    def _take(self) -> list[PartitionClient]:
        """Those that are lost; none: this coroutine ends, and the next loss begins another."""
        with self._lock:
            lanes, self._lanes = list(self._lanes.values()), {}
            self.is_running = bool(lanes)
        return lanes

    async def _run(self) -> None:
        pace = RecoveryPace(runtime.monotonic())
        while lanes := self._take():
            broken = await self._round(lanes)
            now = runtime.monotonic()
            if broken and pace.tells(now):
                logger.warning(
                    "requests wait, until their deadlines, for %s",
                    "; ".join(lane.waits_for for lane in broken),
                )
            await sleep(pace.pause_s(runtime.random()))
            with self._lock:
                self._lanes.update({lane.partition: lane for lane in broken})

    async def _round(self, lanes: Sequence[PartitionClient]) -> list[PartitionClient]:
        """Those of them that are still lost."""
        try:
            await self._locate(lanes)
            whole = [(lane, lane.repeat()) for lane in lanes]  # all at once
            return [lane for lane, done in whole if not await done]
        except (Closed, ClosedError):
            for lane in lanes:
                lane.close()
            return []
        except Exception as error:
            # whatever it is, those who wait for these lanes are told at their deadlines
            logger.warning(
                "lost requests to %s wait: %s",
                ", ".join(map(str, lanes)),
                str(error).partition("\n")[0],
            )
            return list(lanes)

"""Threads that run a server's handle, so that one worker's request is no obstacle to another's.

Everything of one worker goes to one thread: its requests are handled in the order in which it sent
them. The handle is then called from several threads at a time, and has to see to its own data;
numpy lets them run side by side.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from prpc_engine.errors import Backpressure, Closed
from shard import runtime

THREADS_MAX = 256
WAITING_MAX = 65536  # for one thread, before senders are refused
END_TIMEOUT_S = 5.0  # for the handle that runs at the end

logger = logging.getLogger("prpc")
Work = Callable[[], object]


class HandlerThreads:
    """Runs a KVServer's request handle in threads of its own, for `KVServer(handler_threads=...)`.
    Requests of one worker go to one thread, in order; those of several run in parallel.

    name: of the threads. threads: how many. put() raises Backpressure when too many requests wait,
    Closed after close(). Owned by its KVServer, which closes it.
    """

    def __init__(self, name: str, threads: int) -> None:
        self._name = name
        self._guard = runtime.Lock()  # nothing is queued behind the end of a queue
        self._closed = False
        self._queues: list[queue.SimpleQueue[Work | None]] = [
            queue.SimpleQueue() for _ in range(threads)
        ]
        self._threads = [
            runtime.Thread(target=_run, args=(each,), name=f"{name}-{number}", daemon=True)
            for number, each in enumerate(self._queues)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, worker: int, work: Work) -> None:
        """Have it run by the thread of that worker, after what came before. Raises Backpressure,
        and Closed after close().
        """
        chosen = self._queues[worker % len(self._queues)]
        waiting = chosen.qsize()
        if waiting >= WAITING_MAX:
            raise Backpressure(
                f"{waiting} requests wait for a handler thread, {WAITING_MAX} may: wait() "
                "for some first"
            )
        with self._guard:
            if self._closed:  # behind the end of the queue nobody would run it
                raise Closed(f"{self._name} takes no more requests: its server was closed")
            chosen.put(work)

    def close(self) -> None:
        """Finish what waits, and end; what takes too long is named in the log."""
        with self._guard:
            self._closed = True
        for each in self._queues:
            each.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(END_TIMEOUT_S)
                if thread.is_alive():
                    logger.warning(
                        "handler thread %s is busy %s s after its server was closed",
                        thread.name,
                        END_TIMEOUT_S,
                    )


def _run(waiting: queue.SimpleQueue[Work | None]) -> None:
    while (work := waiting.get()) is not None:  # close() ends the wait
        work()

"""A gate that work passes: count who is inside, let nobody else in, wait until it is empty. For
orderly shutdown.

state    enter()            leave()              close()
open     inside + 1         inside - 1           -> closed; its future is done once nobody is inside
closed   ClosedError        inside - 1           the same
"""

from __future__ import annotations

from types import TracebackType

from shard.errors import ClosedError
from shard.loop.future import Future, Waiter


class Gate:
    """Owned by one reactor's process and used in its thread.

        async def handler(request):
            with gate:
                ...

        await gate.close()          # nobody new comes in, all who are inside have left

    `waiter` is who makes progress while a thread blocks on the future; None where only tasks await
    it.
    """

    def __init__(self, name: str = "this gate", waiter: Waiter | None = None) -> None:
        self.name = name
        self.inside = 0
        self.closed = False
        self._waiter = waiter
        self._waiting: list[Future] = []

    def enter(self) -> None:
        """Go in; leave() is owed. Raises ClosedError."""
        if self.closed:
            raise ClosedError(f"{self.name} is closed: no new work is taken on")
        self.inside += 1

    def leave(self) -> None:
        """Go out; the last one out completes what waits for it."""
        assert self.inside > 0, "left more often than entered"
        self.inside -= 1
        if not self.inside:
            waiting, self._waiting = self._waiting, []
            for future in waiting:
                future.set_result(None)

    def wait_empty(self) -> Future:
        """A future done at the first moment when nobody is inside; the gate stays as it is."""
        future = Future(self._waiter)
        if self.inside:
            self._waiting.append(future)
        else:
            future.set_result(None)
        return future

    def close(self) -> Future:
        """Let nobody in any more; the future is done when the last one has left."""
        self.closed = True
        return self.wait_empty()

    def __enter__(self) -> Gate:
        self.enter()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.leave()

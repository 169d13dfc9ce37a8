"""How tasks of one reactor wait for one another: a bounded number of them at a time (Semaphore),
and until something is so (Condition).

Tasks change places only where they await, so what lies between two awaits needs no lock, and these
have none. Waiting is in order, and who is cancelled or gives up leaves its place: a permit that was
granted to it meanwhile goes to the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import TracebackType

from shard.checks import is_count
from shard.loop.future import VALUE, Future


class Semaphore:
    """Lets in so many tasks at a time; the others wait in the order in which they came.

        calls = shard.Semaphore(8)

        async with calls:
            await client.submit("mean", batch)

    permits  how many, from 0 on; with 0 somebody calls release() first

    Of one reactor. Raises ValueError.
    """

    def __init__(self, permits: int) -> None:
        if not is_count(permits, 0):
            raise ValueError(f"Semaphore({permits!r:.100}): a whole number from 0 on is allowed")
        self._free = permits
        self._waiting: deque[Future] = deque()

    @property
    def free(self) -> int:
        """Permits that a task would get at once."""
        return self._free

    @property
    def waiting(self) -> int:
        """Tasks that wait for one."""
        return sum(1 for each in self._waiting if not each.finished)

    def try_acquire(self) -> bool:
        """Take a permit if one is free."""
        if not self._free:
            return False
        self._free -= 1
        return True

    async def acquire(self) -> None:
        """Take a permit, once there is one."""
        if self.try_acquire():
            return
        granted = Future()
        self._waiting.append(granted)
        try:
            await granted
        except BaseException:  # whoever waits is ended
            if granted.finished == VALUE:
                self.release()
            else:
                granted.cancel()  # release() passes it over
            raise

    def release(self) -> None:
        """Give one back, or one more than there were: to the task that waits longest."""
        while self._waiting:
            if self._waiting.popleft().set_result(None):
                return
        self._free += 1

    async def __aenter__(self) -> Semaphore:
        await self.acquire()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()


class Condition:
    """Tasks wait until something is so; who changes it notifies them.

        await changed.wait(lambda: len(queue) < 10)
        queue.append(item)
        changed.notify_all()

    Of one reactor.
    """

    def __init__(self) -> None:
        self._waiting: deque[Future] = deque()

    async def wait(self, is_so: Callable[[], bool] | None = None) -> None:
        """Wait until is_so(): asked now, and after each notification. Without it: for the next
        notification.
        """
        if is_so is None:
            await self._notified()
            return
        while not is_so():
            await self._notified()

    async def _notified(self) -> None:
        told = Future()
        self._waiting.append(told)
        try:
            await told
        except BaseException:  # whoever waits is ended
            if told.finished == VALUE:
                self.notify()
            else:
                told.cancel()
            raise

    def notify(self, count: int = 1) -> None:
        """Have the `count` tasks that wait longest go on, or look again."""
        while count > 0 and self._waiting:
            count -= self._waiting.popleft().set_result(None)

    def notify_all(self) -> None:
        """The same with all that wait now."""
        self.notify(len(self._waiting))

"""What somebody who receives a tensor holds, and the message that asks for it, alone or with
others. No I/O here.

message     until                              then
collecting  fuse.py says so                    left: one request for all of its keys
left        answered                           each receipt has its tensor
left        the request failed                 each receipt has the error
left        all receipts were cancelled        the request is withdrawn
any         its step is aborted or cleaned up  each receipt has the error, and the request is
                                               withdrawn
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from prpc_engine.errors import Cancelled
from shard import VALUE, Future, Waiter

Leave = Callable[["Message"], Future]  # sends it; the future of the list of its tensors


class Message:
    """One request for tensors of one source and step. Whoever made it fills it, and lets it leave
    once.

    `under_way`: where it is found, from its first receipt to its end. `hurry()` sees to it that it
    leaves, or will have left soon.
    """

    def __init__(
        self,
        number: int,
        step: int,
        timeout_s: float,
        under_way: dict[Message, None],
        hurry: Callable[[int], None],
    ) -> None:
        self.number = number  # of the source
        self.step = step
        self.timeout_s = timeout_s  # from when it leaves
        self.hurry = hurry
        self.keys: list[str] = []
        self.receipts: list[Receipt] = []
        self.whole = False  # one receipt for all keys
        self.left = False
        self._call: Future | None = None
        self._under_way = under_way

    def leave(self, send: Leave) -> None:
        """Send it; not when it has ended before."""
        self.left = True
        if not self.receipts:
            return
        try:
            call = self._call = send(self)
        except Exception as error:
            self.end(error)
            return
        call.when_done(self._answered)
        self.given_up()  # perhaps, while it left

    def _answered(self, call: Future) -> None:
        if call.finished != VALUE:
            self.end(call._outcome)
            return
        # Who has a receipt has its tensor, and nobody else does: its lease ends with it.
        self._call, receipts = None, self._over()
        if self.whole:
            for receipt in receipts:
                receipt.set_result(call._outcome)
        else:
            # none when it was ended before
            for receipt, tensor in zip(receipts, call._outcome, strict=False):
                receipt.set_result(tensor)

    def end(self, error: BaseException) -> None:
        """End all that wait for it. Again: does nothing."""
        call, self._call = self._call, None
        for receipt in self._over():
            receipt.set_error(error)
        if call is not None:
            call.cancel()

    def _over(self) -> list[Receipt]:
        receipts, self.receipts = self.receipts, []
        self._under_way.pop(self, None)
        return receipts

    def given_up(self) -> None:
        """A receipt was cancelled: nobody may be waiting any more."""
        if (
            self.left
            and self._call is not None
            and all(receipt.finished for receipt in self.receipts)
        ):
            self.end(Cancelled("all of its receivers gave it up"))


class Receipt(Future):
    """The future of one tensor, or of several asked for together: result(timeout_s), done(), await;
    cancel() gives it up.

    A tensor that was on its way as it was given up is kept for another receive of its key and step.
    """

    message: Message | None = None

    @classmethod
    def of(cls, message: Message, waiter: Waiter) -> Receipt:
        """One more of that message."""
        receipt = cls(waiter, message=message)
        message.receipts.append(receipt)
        # only now: one that was ended while nobody waited for it would be found no more
        message._under_way[message] = None
        return receipt

    def _hurry(self) -> None:
        if self.message is not None and not self.message.left:
            self.message.hurry(self.message.step)

    def done(self) -> bool:
        """Whether there is a tensor or an error."""
        self._hurry()
        return Future.done(self)

    def result(self, timeout_s: float | None = None) -> Any:
        """The tensor; None for a dead one. Raises the error it ended with, or TimeoutError after
        `timeout_s` seconds.
        """
        self._hurry()
        return Future.result(self, timeout_s)

    def error(self, timeout_s: float | None = None) -> BaseException | None:
        """The error it ended with, or None for a tensor; TimeoutError as result()."""
        self._hurry()
        return Future.error(self, timeout_s)

    def when_done(self, callback: Callable[[Future], object]) -> None:
        """Run callback(self) when it is done."""
        self._hurry()
        Future.when_done(self, callback)

    def __await__(self) -> Generator[Any, None, Any]:
        self._hurry()
        return Future.__await__(self)

    def cancel(self, error: BaseException | None = None) -> bool:
        """Wait no longer; False when it was done before."""
        ended = self.set_error(error or Cancelled("this tensor was given up by its receiver"))
        if self.message is not None:
            self.message.given_up()
        return ended

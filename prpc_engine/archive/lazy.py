"""A value whose ownership moves with the message: `Lazy`.

    client.call("train", Lazy(batch))       the server gets `batch`, not a Lazy
    return Lazy(result)                     of a handler: the caller gets `result`

It may stand anywhere in what is sent. To another process its value is encoded as if it stood there
without Lazy. A receiver in this process gets the very object, whatever it is, without encoding or
copy. So whatever way it goes, who sends a Lazy must not use its value any more; the receiver may
change it, and its arrays are not read-only to a receiver in this process. All else in the same
message is copied, as between processes.

In this process the Lazy itself goes along, in a Handover that lies among the blocks of its message.
No table names it, so a message that is dropped anywhere leaves nothing behind, and no other process
can send one: what arrives from there are bytes. A request is encoded so before it is known where it
goes; one that then goes to another process is encoded anew when it does.

    the message                                                            the value is with
    is encoded, in flight, in an outbox; was not sent, was lost            the Lazy: it can be sent
                                                                           again, here or elsewhere
    is refused (UnknownMethod, Stopping, Backpressure, ...), is an answer  the Lazy, the same
      or item that nobody waits for, cannot be read
    was decoded, and its request waits in the server's queue               the receiver's Handover
    its request is dropped from there: cancelled, too late                 the Lazy again
    reaches its handler, caller or stream                                  the receiver, whatever
                                                                           becomes of it then

So when a call fails, is_handed_over says who has the value; an attempt that has taken it is the
last. The value's size counts nowhere: bounds on bytes do not see it, those on messages do, and each
Lazy is one of the arrays that a message may have.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from prpc_engine.errors import BadArguments


class Lazy:
    """Owns one value until somebody takes it. Owned by whoever made it, then by the call that it is
    given to.
    """

    __slots__ = ("_held",)

    def __init__(self, value: Any) -> None:
        self._held = [value]  # or nothing: list.pop() lets one of two threads have it, never both

    @property
    def value(self) -> Any:
        """What is to be sent; it stays here, so that a call that was not sent can be repeated.
        Raises BadArguments when a receiver in this process has it already."""
        try:
            return self._held[0]
        except IndexError:
            raise _gone() from None

    @property
    def is_handed_over(self) -> bool:
        """Whether a receiver in this process has the value."""
        return not self._held

    def take(self) -> Any:
        """The value, once. Raises BadArguments from then on."""
        try:
            return self._held.pop()
        except IndexError:
            raise _gone() from None

    def __repr__(self) -> str:
        held = self._held[:]
        return f"Lazy({type(held[0]).__name__})" if held else "Lazy(handed over)"


def _gone() -> BadArguments:
    return BadArguments(
        "this Lazy was handed over already: its value belongs to the receiver; make a new one"
    )


class Handover(np.ndarray[Any, np.dtype[np.uint8]]):
    """A Lazy on its way inside of this process: a block without bytes. Owned by its message, which
    has one at either end; the receiver's claims the value, and belongs to the request while that
    waits."""

    _lazy: Lazy
    _taken: list[Any]  # the value, once it was

    def __new__(cls, lazy: Lazy) -> Handover:
        made = super().__new__(cls, (0,), np.uint8)
        made._lazy = lazy
        made._taken = []
        return made

    def copy(self, order: Any = "C") -> Handover:
        """What the transport within this process delivers: another one of the same Lazy."""
        return Handover(self._lazy)

    def peek(self) -> Any:
        """The value, which stays where it is. Raises BadArguments when it was taken before."""
        return self._lazy.value

    def claim(self) -> Any:
        """The value, for the receiver. Raises BadArguments when it was taken before."""
        value = self._lazy.take()
        self._taken.append(value)
        return value

    def give_back(self) -> None:
        """The receiver was not reached: the Lazy has the value again, if this took it."""
        self._lazy._held += self._taken
        self._taken = []


def handovers_in(blocks: Iterable[Any]) -> list[Handover]:
    """Those among the blocks of a message."""
    return [block for block in blocks if type(block) is Handover]

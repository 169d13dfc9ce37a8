"""A value whose ownership moves with the message: `Lazy`.

    client.call("train", Lazy(batch))       the server gets `batch`, not a Lazy
    return Lazy(result)                     of a handler: the caller gets `result`

To a server in another process it is encoded when it is sent, as if it stood there without Lazy. A server in this process gets
the very object, without encoding or copy: see hand_over(). So whatever way the call goes, who sends a Lazy must not use its
value any more; the receiver may change it, and its arrays are not read-only to a receiver in this process.
"""

from __future__ import annotations

from typing import Any

from prpc_engine.errors import BadArguments

_NOTHING: Any = object()


class Lazy:
    """Owns one value until somebody takes it. Owned by whoever made it, then by the call that it is given to."""

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    @property
    def value(self) -> Any:
        """What is to be sent; it stays here, so that a call that was not sent can be repeated. Raises BadArguments when a server
        in this process has it already."""
        if self._value is _NOTHING:
            raise BadArguments("this Lazy was handed over already: its value belongs to the receiver; make a new one")
        return self._value

    @property
    def is_handed_over(self) -> bool:
        """Whether a server in this process has the value."""
        return self._value is _NOTHING

    def take(self) -> Any:
        """The value, once. Raises BadArguments from then on."""
        value, self._value = self.value, _NOTHING
        return value

    def __repr__(self) -> str:
        return "Lazy(handed over)" if self.is_handed_over else f"Lazy({type(self._value).__name__})"

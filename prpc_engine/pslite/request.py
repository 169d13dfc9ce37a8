"""One request of a customer, and its parts: what goes to each node. No I/O here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from shard import Future

MISSING = object()  # an answer that has not come; None is one


class Timestamp(Future):
    """The state of one ps-lite request from its push or pull until wait() returns: which nodes have
    not answered yet, and their answers. ps-lite knows it by the number `timestamp`. `finish` is the
    engine's own, `callback` the application's.
    """

    timestamp: int = 0
    missing: int = 0
    answers: Any = None  # by part, a list
    finish: Callable[[int, list[Any]], object] | None = None
    callback: Callable[[int, list[Any]], object] | None = None
    # node, arguments, bytes of each, until it is done
    parts: Sequence[tuple[int, tuple[Any, ...], int]] = ()
    # that alone answers it and that nobody hears of: who wants to know looks there
    call: Future | None = None


class NodePart(msgspec.Struct, eq=False):
    """The part of a request that goes to one node, on its way through the outbox. deadline: on
    runtime.monotonic(), in seconds.
    """

    request: Timestamp
    index: int
    kind: str
    arguments: tuple[Any, ...]
    nbytes: int
    timeout_s: float
    deadline: float
    sequence: int = -1  # where messages are sent again: its number in its lane
    attempts: int = 0
    is_taken: bool = False  # out of the outbox: its arrays are the transport's

"""Which pushes a server has counted already: the last sequence number of each client. No I/O and no
clock.

A client pushes to a server one batch at a time, and the next only when it has an answer; so what
has to be remembered of a client is one number, and the answer that went with it:

    sequence == last + 1  new: count it
    sequence  > last + 1  new, and pushes between were counted by a server that lost them when it
                          was restarted: `lost` of them
    sequence <= last      counted before: answer, and count nothing
    client unknown        new, when the client pushes it for the first time, or when this server has
                          begun after the client last heard of it (what it counted before is gone).
                          Otherwise it was forgotten (clients_max others were heard since), nobody
                          knows, and the push is refused rather than counted twice

A client is known by its id and its incarnation, which is another one each time it starts.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from prpc_engine.accumulator.aggregator import check_count
from prpc_engine.errors import BadArguments

# some 200 bytes each; a client that is silent while so many others push is taken for gone
CLIENTS_MAX = 65536

APPLY, DUPLICATE, UNKNOWN = "apply", "duplicate", "unknown"
ClientKey = tuple[int, int]  # id, incarnation


@dataclass(frozen=True)
class Verdict:
    """What a server does with a push: `action` is APPLY (count it), DUPLICATE (answer, count
    nothing) or UNKNOWN (refuse it).
    """

    action: str
    lost: int = 0  # pushes of this client that were counted, and are counted no more


class WriteWindow:
    """A write window knows which pushes a server has counted, so that none is counted twice.

    Owned by one AccumulatorShard. clients_max: how many clients it remembers; of more, the one
    heard least recently is forgotten. What judge() answers: the table at the file's head.
    """

    def __init__(self, clients_max: int = CLIENTS_MAX) -> None:
        self._clients_max = clients_max
        # least recently heard first
        self._last: OrderedDict[ClientKey, tuple[int, dict[int, str]]] = OrderedDict()

    def judge(
        self, client: ClientKey, sequence: int, maybe_applied: bool, knows_us: bool
    ) -> Verdict:
        """`maybe_applied`: the client has pushed this before; `knows_us`: it has heard of this
        server since it began.
        """
        there = self._last.get(client)
        if there is None:
            if maybe_applied and knows_us:
                return Verdict(UNKNOWN)
            return Verdict(APPLY, 0 if knows_us else sequence - 1)
        if sequence <= there[0]:
            return Verdict(DUPLICATE)
        return Verdict(APPLY, sequence - there[0] - 1)

    def record(self, client: ClientKey, sequence: int, refused: dict[int, str]) -> None:
        """That push has been counted, but for the entries in `refused`."""
        self._last[client] = (sequence, refused)
        self._last.move_to_end(client)
        if len(self._last) > self._clients_max:
            self._last.popitem(last=False)

    def refused(self, client: ClientKey, sequence: int) -> dict[int, str]:
        """What was refused of that push, as far as it is remembered: of the last one."""
        last, refused = self._last[client]
        return refused if last == sequence else {}

    def serialize(self) -> Any:
        """As plain values."""
        return [(*client, last, refused) for client, (last, refused) in self._last.items()]

    def deserialize(self, state: Any) -> None:
        """Become what serialize() gave. Raises BadArguments."""
        for identity, incarnation, last, refused in state:
            if (
                type(identity) is not int
                or type(incarnation) is not int
                or not isinstance(refused, dict)
            ):
                raise BadArguments(
                    "a window of pushes: two ints, a sequence number and a dict are expected for "
                    "each client"
                )
            self.record((identity, incarnation), check_count("a window of pushes", last), refused)

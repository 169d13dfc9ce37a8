"""Which pushes a server has counted already: the last sequence number of each client. No I/O and no
clock.

A client pushes to a server one batch at a time, and the next only when it has an answer. So with a
push it waits for none before that (settle() of idempotency_window.py), and what is remembered of a
client is its last number, and what was refused of that push:

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

from dataclasses import dataclass
from typing import Any

from prpc_engine.accumulator.aggregator import check_count
from prpc_engine.errors import BadArguments
from prpc_engine.idempotency_window import NEW, IdempotencyWindow

# some 560 bytes each; a client that is silent while so many others push is taken for gone
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
        self._seen: IdempotencyWindow[ClientKey, dict[int, str]] = IdempotencyWindow(clients_max)

    def judge(
        self, client: ClientKey, sequence: int, maybe_applied: bool, knows_us: bool
    ) -> Verdict:
        """`maybe_applied`: the client has pushed this before; `knows_us`: it has heard of this
        server since it began.
        """
        numbers = self._seen.of(client)
        if numbers is None:
            if maybe_applied and knows_us:
                return Verdict(UNKNOWN)
            return Verdict(APPLY, 0 if knows_us else sequence - 1)
        if numbers.find(sequence) is not NEW:
            return Verdict(DUPLICATE)
        return Verdict(APPLY, sequence - numbers.highest - 1)

    def record(self, client: ClientKey, sequence: int, refused: dict[int, str]) -> None:
        """That push has been counted, but for the entries in `refused`."""
        numbers = self._seen.heard(client)
        numbers.settle(sequence - 1)
        numbers.keep(sequence, refused)

    def refused(self, client: ClientKey, sequence: int) -> dict[int, str]:
        """What was refused of that push, as far as it is remembered: of the last one."""
        numbers = self._seen.of(client)
        assert numbers is not None, "judge() called it a duplicate"
        return numbers.kept.get(sequence, {})

    def serialize(self) -> Any:
        """As plain values: (id, incarnation, last number, what was refused of that push) of each
        client, the one heard least recently first.
        """
        return [
            (*client, numbers.highest, numbers.kept.get(numbers.highest))
            for client, numbers in self._seen.senders()
        ]

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

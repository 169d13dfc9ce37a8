"""Which path to another node is taken, and which rests for a while: decided here, gone in node.py.
No I/O, no clock.

A path is one of our transports to one other node, a pair of nodes has as many as both have in
common. They are tried in our order of preference (RpcService(transports=), else PRPC_TRANSPORTS,
else shm, unix, tcp), those that rest after all others, and the first that connects is taken. Every
one before it leaves a Refusal:

    the path                                          reason                       failed  counted
    is not offered by the other node                  not offered by ADDRESS       no      no
    leads to another host, network namespace or user  what the transport says      no      no
    rests, and another one connected                  the last failure, and until  yes     no
                                                      when
    does not connect: ShmFull, attach, handshake      the error                    yes     yes
    connected, and broke                              the error                    -       yes

"failed" is what a user may want to mend, so that the choice is logged as a warning; the rest is as
it should be. A failure counts only where another path connects: else it was the node. One that was
lost counts at once; should its node have died, nobody comes back to that count, as addresses are of
one incarnation.

    failures in a row     what follows
    up to FAILURES_MAX-1  the path keeps its place
    FAILURES_MAX          it rests for REST.first_s, and after each more for twice as long, up
                          to REST.max_s
    any number            forgotten when a connection lives for HEALTHY_S

A connection that was taken because a preferred path had failed is left again for that path: after
its rest, REST.first_s where it has none (Choice.again_s), best when nothing is under way (node.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from prpc_engine.rpc.backoff import Backoff

FAILURES_MAX = 3  # one may be chance, and a second its echo
# connecting anew costs calls that may have run: not every few seconds, and not for ever where it
# was mended
REST = Backoff(first_s=30.0, max_s=600.0)
HEALTHY_S = 60.0
PAIRS_MAX = 4096  # that are remembered: the longest known is forgotten first


@dataclass(frozen=True)
class Refusal:
    """Why one path to a node was not taken: its transport, the reason, and whether a user may want
    to mend it.
    """

    transport: str
    reason: str
    failed: bool  # where it should have worked
    rests_s: float = 0.0  # it is not tried for so long

    def __str__(self) -> str:
        return f"{self.transport}: {self.reason}"


@dataclass(frozen=True)
class Choice:
    """Which transport a connection took, and why those that are preferred were not. Shown by
    RpcService.transports and in the log.
    """

    transport: str
    peer: str  # where it leads
    node: str  # the other node: the last address that it offers
    refusals: tuple[Refusal, ...]  # of those that would have been preferred
    since_s: float  # when, by the reactor's clock

    @property
    def failed(self) -> bool:
        """Whether one was refused that a user may want to mend."""
        return any(refusal.failed for refusal in self.refusals)

    @property
    def again_s(self) -> float | None:
        """After how many seconds a path that was preferred, and failed, is worth another try; None
        where none has failed.
        """
        return min(
            (refusal.rests_s or REST.first_s for refusal in self.refusals if refusal.failed),
            default=None,
        )

    def __str__(self) -> str:
        return "; ".join([f"{self.transport} to {self.peer}", *map(str, self.refusals)])


@dataclass
class _Path:
    """What is remembered of one."""

    failures: int = 0  # in a row
    reason: str = ""  # of the last
    rests_until_s: float = 0.0


@dataclass
class _Pair:
    """What is remembered of one other node."""

    paths: dict[str, _Path] = field(default_factory=dict)  # by transport
    told: str = ""  # the transport that was taken last


class Paths:
    """Remembers how the paths to each other node have done, and says in which order they are tried.

    A node is known by the first address that it offers. Owned by a Node, which calls it under its
    guard: not thread-safe. What counts, and which path rests: the tables at the file's head.
    """

    def __init__(self) -> None:
        self._pairs: dict[str, _Pair] = {}

    def arrange(
        self, node: str, transports: Iterable[str], now: float
    ) -> list[tuple[str, Refusal | None]]:
        """The transports in the order to be tried; those that rest last, each with what is said
        when another one connects.
        """
        pair = self._pairs.get(node, _Pair())
        return sorted(
            ((one, _rest(one, pair.paths.get(one), now)) for one in transports),
            key=lambda way: way[1] is not None,
        )

    def took(self, node: str, choice: Choice) -> bool:
        """A path was taken; whether it is another one than before, and worth a line in the log."""
        pair = self._pair(node)
        for refusal in choice.refusals:
            if (
                refusal.failed
                and _rest(refusal.transport, pair.paths.get(refusal.transport), choice.since_s)
                is None
            ):
                _count(pair, refusal.transport, refusal.reason, choice.since_s)
        before, pair.told = pair.told, choice.transport
        return before != choice.transport

    def broke(self, node: str, choice: Choice, reason: str, now: float) -> None:
        """A connection ended, and not by this side."""
        pair = self._pair(node)
        if now - choice.since_s >= HEALTHY_S:
            pair.paths.pop(choice.transport, None)
        _count(pair, choice.transport, reason, now)

    def _pair(self, node: str) -> _Pair:
        pair = self._pairs.get(node)
        if pair is None:
            if len(self._pairs) >= PAIRS_MAX:
                del self._pairs[next(iter(self._pairs))]
            pair = self._pairs[node] = _Pair()
        return pair


def _count(pair: _Pair, transport: str, reason: str, now: float) -> None:
    """One failure more of a path, in a row."""
    path = pair.paths.setdefault(transport, _Path())
    path.failures += 1
    path.reason = reason
    if path.failures >= FAILURES_MAX:
        path.rests_until_s = now + REST.bound_s(path.failures - FAILURES_MAX + 1)


def _rest(transport: str, path: _Path | None, now: float) -> Refusal | None:
    if path is None or now >= path.rests_until_s:
        return None
    left_s = path.rests_until_s - now
    return Refusal(
        transport,
        f"failed {path.failures} times in a row, tried again in {left_s:.0f} s: {path.reason}",
        True,
        left_s,
    )

"""Who asks the echo server: one connection for each question, and what came of it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shard import Connection, Node, Reactor, ShardError, Slab, TcpTransport
from shard.transport import Blocks
from shard.transport.handshake import ACCEPTED, CLAIM_BYTES, HELLO, PROOF_BYTES
from tests.certificates import Files
from tests.connecting import connect
from tests.network.echo_server import SECRET, lanes_of, limits
from tests.network.proxy import set_buffers
from tests.network.tally import TALLY
from tests.prpc_engine.processes import PATIENCE_S

# Of one lane, without TLS: hello and proof of each side, and the verdict.
HANDSHAKE_BYTES = {
    "to_server": HELLO.size + PROOF_BYTES + CLAIM_BYTES,
    "to_client": HELLO.size + PROOF_BYTES + len(ACCEPTED),
}
Message = tuple[bytes, list[bytes]]


@dataclass(frozen=True)
class Outcome:
    """The answers, without their numbers, and the error that ended the connection or kept it from
    being made.
    """

    answers: list[Message]
    numbers: list[int]
    error: ShardError | None


class Talk:
    """One connection. The test turns its reactor."""

    def __init__(self, connection: Connection[Any], reactor: Reactor) -> None:
        self.connection = connection
        self.answers: list[Message] = []
        self.numbers: list[int] = []
        self.error: ShardError | None = None
        self._reactor = reactor
        connection.on_message = self._take
        connection.on_close = self._ended
        connection.attach(reactor)

    def _take(self, body: memoryview, blocks: Blocks = ()) -> None:
        self.numbers.append(int.from_bytes(body[:8], "little"))
        self.answers.append((bytes(body[8:]), [bytes(block) for block in blocks]))

    def _ended(self, connection: object, error: ShardError) -> None:
        self.error = error

    def turn_until(self, count: int) -> None:
        """Until there are so many answers, or the end."""
        deadline = time.monotonic() + PATIENCE_S
        while len(self.answers) < count and self.error is None:
            if time.monotonic() >= deadline:
                TALLY.add("hang")
                raise AssertionError("it hangs")
            if not self._reactor.poll(time.monotonic()):
                self._reactor.park(0.02)

    def outcome(self) -> Outcome:
        return Outcome(self.answers, self.numbers, self.error)


class Caller:
    """A process that connects. A context manager."""

    def __init__(
        self,
        bulk_lanes: int = 0,
        tls: Files | None = None,
        buffer_bytes: int = 0,
        checked: bool = False,
    ) -> None:
        self._slab = Slab()
        node = Node(
            secret=SECRET, incarnation=1, limits=limits(bulk_lanes=bulk_lanes), tcp_checksum=checked
        )
        self._transport = TcpTransport(node, self._slab, tls)
        self._buffer_bytes = buffer_bytes

    @contextlib.contextmanager
    def talk(self, address: str, timeout_s: float = PATIENCE_S) -> Iterator[Talk]:
        """Raises ShardError when it cannot connect."""
        connection = connect(self._transport, address, timeout_s)
        for sock in lanes_of(connection) if self._buffer_bytes else ():
            set_buffers(sock, self._buffer_bytes)
        reactor = Reactor(time.monotonic)
        try:
            yield Talk(connection, reactor)
        finally:
            connection.close()
            reactor.close()

    def ask(
        self,
        address: str,
        *messages: tuple[bytes, Sequence[NDArray[np.uint8]]],
        timeout_s: float = PATIENCE_S,
        may_be_wrong: bool = False,
    ) -> Outcome:
        """Connect, send them, and wait until all are answered or the connection ends.
        `may_be_wrong`: an answer may have other bytes than were sent, which is the test's to look
        at; else that is an AssertionError."""
        outcome = self._ask(address, messages, timeout_s)
        sent = [(body, [bytes(block) for block in blocks]) for body, blocks in messages]
        is_right = all(answer in sent for answer in outcome.answers)
        if may_be_wrong and not is_right:
            TALLY.add("unfound")
        else:
            TALLY.ended(outcome.error, is_right)
            assert is_right
        return outcome

    def _ask(
        self,
        address: str,
        messages: Sequence[tuple[bytes, Sequence[NDArray[np.uint8]]]],
        timeout_s: float,
    ) -> Outcome:
        try:
            with self.talk(address, timeout_s) as talk:
                try:
                    for body, blocks in messages:
                        talk.connection.send(body, blocks)
                except ShardError as error:
                    return Outcome(talk.answers, talk.numbers, error)
                talk.turn_until(len(messages))
                return talk.outcome()
        except ShardError as error:
            return Outcome([], [], error)

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *error: object) -> None:
        self._slab.close()

"""What every transport promises (shard/transport/__init__.py), written once. A transport's test
subclasses TransportContract.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from shard import (
    BackpressureError,
    ClosedError,
    Connection,
    DeviceMemory,
    Limits,
    Listener,
    LocalProtocolError,
    Node,
    PeerLostError,
    Reactor,
    ShardError,
    Slab,
    Transport,
    UnreachableError,
    device_block,
)
from shard.transport.life import ConnectionLife
from tests.connecting import connect
from tests.ports import address_of, hold_port

PATIENCE_S = 60.0  # a test that waits longer has failed
LIMITS = Limits(
    body_bytes_max=1 << 20,
    blocks_bytes_max=64 << 20,
    blocks_max=64,
    outbox_messages_max=512,
    outbox_bytes_max=8 << 20,
    ring_bytes=64 << 10,
    handshake_s=PATIENCE_S,  # a test may lack a core in the middle of one
)


class Side:
    """One end of a connection in a test: what it received, and how it ended."""

    def __init__(self, connection: Connection[Any]) -> None:
        self.connection = connection
        self.messages: list[tuple[bytes, list[NDArray[np.uint8]]]] = []
        self.ends: list[ShardError] = []
        self.on_each: Callable[[bytes], None] = lambda body: None
        connection.on_message = self._take  # type: ignore[assignment]
        connection.on_close = lambda _, error: self.ends.append(error)

    def _take(self, body: memoryview, blocks: Any = ()) -> None:
        self.messages.append((bytes(body), list(blocks)))
        self.on_each(bytes(body))

    @property
    def bodies(self) -> list[bytes]:
        return [body for body, _ in self.messages]


class World:
    """A reactor turned by the test, two slabs (as of two processes), and one connection between two
    sides.
    """

    connect_s = PATIENCE_S

    def __init__(
        self,
        make: Callable[[Node, Slab], Transport],
        address: str,
        secret: bytes = b"",
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.patience_s = patience_s
        self.reactor = Reactor(time.monotonic)
        self.slabs = (Slab(), Slab())
        self.accepted: list[Side] = []
        node = Node(secret=secret, incarnation=7, limits=LIMITS)
        self.transports = (make(node, self.slabs[0]), make(node, self.slabs[1]))
        self._address = address
        self.listener = self._listen()

    def _listen(self) -> Listener:
        return self.transports[0].listen(
            self._address, self.reactor, lambda c: self.accepted.append(Side(c))
        )

    def listen_anew(self) -> None:
        """At an address of its own; what had not come in whole is given up."""
        self.listener.close()
        self.listener = self._listen()

    def connect(self, transport: Transport | None = None) -> tuple[Side, Side]:
        """(the side that called, the side that was called)."""
        before = len(self.accepted)
        caller = self.call(transport or self.connecting_transport())
        caller.attach(self.reactor)
        self.turn_until(lambda: len(self.accepted) > before)
        return Side(caller), self.accepted[-1]

    def connecting_transport(self) -> Transport:
        """Memory knows only its own addresses; the others meet through the system."""
        second = self.transports[1]
        return second if second.cannot_reach(self.listener.address) is None else self.transports[0]

    @property
    def calling_slab(self) -> Slab:
        """That of the side that calls."""
        return self.slabs[self.transports.index(self.connecting_transport())]

    def call(self, transport: Transport) -> Connection[Any]:
        """The control loop connects and a thread waits, while this one turns the reactor."""
        result: list[Any] = []

        def run() -> None:
            try:
                result.append(connect(transport, self.listener.address, self.connect_s))
            except BaseException as error:
                result.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        self.turn_until(lambda: bool(result))
        thread.join()
        if isinstance(result[0], BaseException):
            raise result[0]
        connection: Connection[Any] = result[0]
        return connection

    def turn_until(self, done: Callable[[], Any]) -> None:
        deadline = time.monotonic() + self.patience_s
        while not done():
            assert time.monotonic() < deadline, "it did not come to pass"
            if not self.reactor.poll(time.monotonic()):
                self.reactor.park(0.01)

    def close(self) -> None:
        self.listener.close()
        for side in self.accepted:
            side.connection.close()
        self.accepted.clear()
        self.reactor.close()
        for slab in self.slabs:
            slab.close()
        gc.collect()


class TransportContract:
    """Subclass it with `make` and `address`."""

    address: str

    @staticmethod
    def make(node: Node, slab: Slab) -> Transport:
        raise AssertionError("a subclass says how its transport is made")

    @pytest.fixture
    def world(self) -> Iterator[World]:
        world = World(type(self).make, self.address)
        yield world
        world.close()

    @pytest.fixture
    def sides(self, world: World) -> Iterator[tuple[Side, Side]]:
        one, two = world.connect()
        yield one, two
        one.connection.close()
        two.connection.close()
        one.messages.clear()
        two.messages.clear()

    def test_messages_arrive_whole_and_in_order_both_ways(
        self, world: World, sides: tuple[Side, Side]
    ) -> None:
        one, two = sides
        bodies = [bytes([number % 251]) * (number * 37 % 900) for number in range(300)]
        for body in bodies:
            one.connection.send(body)
            two.connection.send(body[::-1])
        world.turn_until(lambda: len(one.messages) == len(two.messages) == 300)
        assert two.bodies == bodies
        assert one.bodies == [body[::-1] for body in bodies]

    def test_small_messages_keep_their_order_and_so_do_large_ones(
        self, world: World, sides: tuple[Side, Side]
    ) -> None:
        one, two = sides
        for number in range(20):
            one.connection.send(b"small %d" % number)
            one.connection.send(b"bulk %d" % number, [np.full(300_000 + number, number, np.uint8)])
        world.turn_until(lambda: len(two.messages) == 40)
        for name in (b"small", b"bulk"):
            assert [body for body in two.bodies if body.startswith(name)] == [
                b"%s %d" % (name, number) for number in range(20)
            ]
        assert [block[-1] for _, blocks in two.messages for block in blocks] == list(range(20))

    def test_what_is_sent_everywhere_overtakes_nothing(
        self, world: World, sides: tuple[Side, Side]
    ) -> None:
        one, two = sides
        one.connection.send(b"bulk", [np.zeros(20_000_000, np.uint8)])
        one.connection.send(b"small")
        one.connection.send_everywhere(b"note")
        two_are_there = {b"bulk", b"small"}
        world.turn_until(lambda: two_are_there <= set(two.bodies) and two.bodies[-1] == b"note")

    def test_an_answer_sent_from_the_handler_arrives(
        self, world: World, sides: tuple[Side, Side]
    ) -> None:
        one, two = sides
        two.on_each = lambda body: two.connection.send(body.upper())
        one.connection.send(b"hello")
        world.turn_until(lambda: one.messages)
        assert one.bodies == [b"HELLO"]

    @pytest.mark.parametrize("size", [0, 1, 63, 4096, 16 << 10, (16 << 10) + 1, 300_000, 5_000_000])
    def test_blocks_of_every_size_arrive_byte_for_byte_and_read_only(
        self, world: World, sides: tuple[Side, Side], size: int
    ) -> None:
        one, two = sides
        data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
        one.connection.send(b"body", [data, np.arange(3, dtype=np.uint8)])
        world.turn_until(lambda: two.messages)
        body, blocks = two.messages[0]
        assert body == b"body"
        assert np.array_equal(blocks[0], data)
        assert blocks[1].tolist() == [0, 1, 2]
        assert not blocks[0].flags.writeable

    def test_an_ordinary_array_may_be_changed_as_soon_as_send_returns(
        self, world: World, sides: tuple[Side, Side]
    ) -> None:
        one, two = sides
        for size in (100, 100_000, 20_000_000):
            data = np.full(size, 1, np.uint8)
            one.connection.send(b"", [data])
            data[:] = 2
            world.turn_until(lambda: two.messages)
            _, (block,) = two.messages.pop()
            assert block.min() == block.max() == 1

    def test_an_array_of_the_slab_arrives_with_its_values(
        self, world: World, sides: tuple[Side, Side]
    ) -> None:
        one, two = sides
        slab = world.calling_slab
        array = slab.empty(1_000_000, np.uint8)
        array[:] = 7
        one.connection.send(b"", [array[1000:]])
        world.turn_until(lambda: two.messages)
        _, (block,) = two.messages.pop()
        assert block.nbytes == 999_000
        assert block.min() == block.max() == 7

    def test_bytes_of_a_device_arrive_and_are_copied_to_the_host_by_who_has_to(
        self, world: World, sides: tuple[Side, Side]
    ) -> None:
        """Beside arrays of the host, small ones and one of the slab. That memory is the host's."""
        one, two = sides
        there = np.arange(1_000_000, dtype=np.uint32).view(np.uint8)
        slab = world.calling_slab
        ticket = slab.empty(20_000, np.uint8)
        ticket[:] = 9  # which nobody looks at
        memory = DeviceMemory(there.ctypes.data, there.nbytes)
        copies = []

        def stage() -> NDArray[np.uint8]:
            copies.append(there[:3_000_000].copy())
            return copies[-1]

        block = device_block(ticket, memory, 3_000_000, 0, stage)
        of_slab = slab.empty(500_000, np.uint8)
        of_slab[:] = 4
        for _ in range(2):
            one.connection.send(b"x", [np.ones(10, np.uint8), block, of_slab])
            world.turn_until(lambda: two.messages)
            body, (first, second, third) = two.messages.pop()
            assert (body, first.sum(), third.min(), third.max()) == (b"x", 10, 4, 4)
            assert np.array_equal(second, there[:3_000_000])
            del first, second, third
        assert len(copies) == (0 if one.connection.reads_devices else 2)
        del ticket, block, of_slab
        copies.clear()
        world.turn_until(lambda: not any(one.statistics().leases for one in world.slabs))
        world.turn_until(lambda: not slab.statistics().blocks_used)
        memory.end()

    def test_a_received_block_outlives_the_connection(
        self, world: World, sides: tuple[Side, Side]
    ) -> None:
        one, two = sides
        one.connection.send(b"", [np.full(1_000_000, 5, np.uint8)])
        world.turn_until(lambda: two.messages)
        _, (block,) = two.messages.pop()
        part = block[10:20]
        del block
        one.connection.close()
        world.turn_until(lambda: two.ends)
        assert part.tolist() == [5] * 10

    def test_memory_of_the_slab_comes_back_when_the_receiver_drops_its_arrays(
        self, world: World, sides: tuple[Side, Side]
    ) -> None:
        one, two = sides
        for _ in range(50):
            one.connection.send(b"", [np.zeros(1_000_000, np.uint8)])
            world.turn_until(lambda: two.messages)
            two.messages.clear()
            world.reactor.poll(time.monotonic())
        # Else each message took a block, and gave none back.
        world.turn_until(lambda: max(slab.statistics().blocks_used for slab in world.slabs) <= 3)

    def test_a_message_that_the_end_cuts_off_keeps_no_memory_of_the_slab(
        self, world: World, sides: tuple[Side, Side]
    ) -> None:
        one, two = sides
        with pytest.raises(BackpressureError):
            while True:
                one.connection.send(b"", [np.zeros(300_000, np.uint8)])
        one.connection.close()
        world.turn_until(lambda: two.ends)
        two.messages.clear()
        # The connections themselves are kept, as by a caller who looks at their errors.
        world.turn_until(lambda: not any(slab.statistics().blocks_used for slab in world.slabs))

    @pytest.mark.parametrize("why", [None, PeerLostError, ShardError])
    def test_the_end_is_seen_by_a_peer_whose_arrays_are_still_held(
        self, world: World, sides: tuple[Side, Side], why: type[ShardError] | None
    ) -> None:
        """Also where this end takes it for dead: it was only stopped, say."""
        one, two = sides
        one.connection.send(b"", [np.zeros(300_000, np.uint8)])
        world.turn_until(lambda: two.messages)
        two.connection.close(why("silent for too long") if why is not None else None)
        world.turn_until(lambda: one.ends)
        assert isinstance(one.ends[0], PeerLostError)
        two.messages.clear()
        world.turn_until(lambda: not any(slab.statistics().blocks_used for slab in world.slabs))

    def test_large_bodies_pass(self, world: World, sides: tuple[Side, Side]) -> None:
        one, two = sides
        body = np.random.default_rng(1).bytes(1_000_000)
        one.connection.send(body)
        one.connection.send(body, [np.zeros(10, np.uint8)])
        world.turn_until(lambda: len(two.messages) == 2)
        assert two.bodies == [body, body]

    def test_what_is_over_a_limit_is_refused_before_it_is_sent(
        self, world: World, sides: tuple[Side, Side]
    ) -> None:
        one, two = sides
        with pytest.raises(LocalProtocolError, match="at most 1048576 allowed"):
            one.connection.send(bytes((1 << 20) + 1))
        with pytest.raises(LocalProtocolError, match="at most 64 allowed"):
            one.connection.send(b"", [np.zeros(1, np.uint8)] * 65)
        with pytest.raises(LocalProtocolError, match="bytes of arrays"):
            one.connection.send(b"", [np.zeros(33 << 20, np.uint8)] * 2)
        one.connection.send(b"still works")
        world.turn_until(lambda: two.messages)
        assert two.bodies == [b"still works"]

    def test_a_peer_that_does_not_read_is_backpressure_and_nothing_is_lost(
        self, world: World, sides: tuple[Side, Side]
    ) -> None:
        one, two = sides
        sent = 0
        with pytest.raises(BackpressureError, match="reads too slowly"):
            for number in range(200_000):
                one.connection.send(number.to_bytes(4, "little") * 250)
                sent += 1
        world.turn_until(lambda: len(two.messages) == sent)
        assert [int.from_bytes(body[:4], "little") for body in two.bodies] == list(range(sent))
        one.connection.send(b"room again")
        world.turn_until(lambda: two.bodies[-1] == b"room again")

    def test_arrays_of_refused_messages_do_not_count_as_sent(
        self, world: World, sides: tuple[Side, Side]
    ) -> None:
        one, two = sides
        array = world.calling_slab.empty((50_000,), np.uint8)
        sent = refused = 0
        while refused < 200:
            try:
                one.connection.send(b"", [array])
                sent += 1
            except BackpressureError:
                refused += 1
        world.turn_until(lambda: len(two.messages) == sent)
        bytes_sent = one.connection.traffic().bytes_sent
        assert sent * array.nbytes <= bytes_sent <= sent * (array.nbytes + 1000)

    def test_threads_may_send_at_the_same_time_and_each_ones_order_holds(
        self, world: World, sides: tuple[Side, Side]
    ) -> None:
        one, two = sides

        def send(name: int) -> None:
            number = 0
            while number < 200:
                blocks = (
                    [np.full(20_000 + number, number % 256, np.uint8)] if number % 4 == 0 else []
                )
                try:
                    one.connection.send(
                        bytes([name]) + number.to_bytes(4, "little") + bytes(500), blocks
                    )
                    number += 1
                except BackpressureError:
                    continue

        threads = [threading.Thread(target=send, args=(name,)) for name in range(4)]
        for thread in threads:
            thread.start()
        world.turn_until(lambda: len(two.messages) == 800)
        for thread in threads:
            thread.join()
        for name in range(4):
            own = [int.from_bytes(body[1:5], "little") for body in two.bodies if body[0] == name]
            assert own == list(range(200))
        for body, blocks in two.messages:
            number = int.from_bytes(body[1:5], "little")
            assert [(block.nbytes, bytes(block[:1]), np.ptp(block)) for block in blocks] == (
                [(20_000 + number, bytes([number % 256]), 0)] if number % 4 == 0 else []
            )

    def test_closing_tells_both_sides_once_and_what_was_sent_before_still_arrives(
        self, world: World, sides: tuple[Side, Side]
    ) -> None:
        one, two = sides
        one.connection.send(b"last words")
        world.reactor.poll(time.monotonic())
        one.connection.close()
        one.connection.close()
        world.turn_until(lambda: one.ends and two.ends)
        assert two.bodies == [b"last words"]
        assert [type(error) for error in one.ends] == [ClosedError]
        assert [type(error) for error in two.ends] == [PeerLostError]
        with pytest.raises(ClosedError):
            one.connection.send(b"too late")
        with pytest.raises(PeerLostError):
            two.connection.send(b"too late")

    def test_one_that_was_closed_before_it_was_attached_is_not_driven(self, world: World) -> None:
        connection = world.call(world.connecting_transport())
        side = Side(connection)
        connection.close()
        connection.attach(world.reactor)
        assert (connection.reactor, connection.life) == (None, ConnectionLife.CLOSED)
        assert [type(error) for error in side.ends] == [ClosedError]

    @pytest.mark.parametrize(
        ("body_bytes", "block_bytes"), [(100, 0), (100, 20_000), (100, 300_000), (400_000, 0)]
    )
    def test_messages_that_wait_at_the_end_are_told_by_their_beginnings_and_none_arrives(
        self, world: World, sides: tuple[Side, Side], body_bytes: int, block_bytes: int
    ) -> None:
        one, two = sides
        blocks = [np.zeros(block_bytes, np.uint8)] if block_bytes else []
        sent = 0
        with pytest.raises(BackpressureError):
            while True:
                one.connection.send(b"%8d" % sent + bytes(body_bytes - 8), blocks)
                sent += 1
        one.connection.close()
        world.turn_until(lambda: two.ends)
        unsent = [int(bytes(beginning[:8])) for beginning in one.connection.unsent]
        arrived = [int(body[:8]) for body in two.bodies]
        if not unsent:
            assert arrived == list(range(sent)), (
                "the bound on copies in the slab was reached first: all of it was written"
            )
            return
        assert min(map(len, one.connection.unsent)) >= min(64, body_bytes)
        assert unsent == list(range(sent - len(unsent), sent)), "the last ones"
        assert arrived == list(range(len(arrived)))
        assert len(arrived) <= sent - len(unsent)

    @pytest.mark.parametrize(
        "when", ["while the outbox is emptied", "made ready after the end", "written after the end"]
    )
    def test_a_message_that_another_thread_sends_at_the_end_goes_nowhere_and_keeps_nothing(
        self, world: World, sides: tuple[Side, Side], when: str
    ) -> None:
        one, two = sides
        connection: Any = one.connection
        passed, go_on = threading.Event(), threading.Event()
        prepare, beginning = connection._prepare, connection._beginning

        def prepare_held(*message: Any) -> Any:
            made = None if when == "made ready after the end" else prepare(*message)
            passed.set()  # send() has seen that the connection is open
            assert go_on.wait(PATIENCE_S)
            return made or prepare(*message)

        def let_it_go_on(item: Any) -> Any:
            go_on.set()
            late.join(PATIENCE_S)
            return beginning(item)

        def send() -> None:
            with contextlib.suppress(ClosedError):
                connection.send(b"late", [np.zeros(100_000, np.uint8)], True)

        connection.send(b"early", [np.zeros(100_000, np.uint8)])
        world.turn_until(lambda: two.messages)
        two.messages.clear()
        world.turn_until(lambda: not any(slab.statistics().blocks_used for slab in world.slabs))
        late = threading.Thread(target=send)
        if when == "while the outbox is emptied":
            while connection.outbox_messages < 3:
                connection.send(bytes(1000))
            connection._beginning = let_it_go_on
        connection._prepare = prepare_held
        late.start()
        assert passed.wait(PATIENCE_S)
        connection.close()
        go_on.set()
        late.join(PATIENCE_S)
        world.turn_until(lambda: two.ends)
        assert [type(error) for error in one.ends] == [ClosedError]
        assert b"late" not in two.bodies
        assert connection.waiting() == (0, 0)
        world.turn_until(lambda: not any(slab.statistics().blocks_used for slab in world.slabs))

    @pytest.mark.parametrize("block_bytes", [0, 100_000])
    def test_a_send_that_is_about_to_write_when_this_side_closes_says_that_or_goes_nowhere(
        self, world: World, sides: tuple[Side, Side], block_bytes: int
    ) -> None:
        one, two = sides
        connection: Any = one.connection
        blocks = [np.zeros(block_bytes, np.uint8)] if block_bytes else []

        class ClosedMeanwhile:
            """Stands for the baton of the one writer until somebody wants it: then the connection
            is closed first.
            """

            def get_nowait(self) -> None:
                connection._writing = writing
                connection.close()
                writing.get_nowait()

            def take(self) -> bool:
                self.get_nowait()
                return True

        writing = connection._writing
        connection._writing = ClosedMeanwhile()
        with contextlib.suppress(ClosedError):
            connection.send(b"late", blocks)
        world.turn_until(lambda: two.ends)
        assert [type(error) for error in one.ends] == [ClosedError]
        assert two.bodies == []

    def test_a_handler_that_closes_sees_no_further_message(
        self, world: World, sides: tuple[Side, Side]
    ) -> None:
        one, two = sides
        two.on_each = lambda body: two.connection.close()
        for _ in range(5):
            one.connection.send(b"x")
        world.turn_until(lambda: two.ends and one.ends)
        assert len(two.messages) == 1

    def test_the_connector_hears_the_incarnation_and_the_acceptor_has_a_name_for_who_called(
        self, sides: tuple[Side, Side]
    ) -> None:
        one, two = sides
        assert one.connection.peer_incarnation == two.connection.peer_incarnation == 7
        connector, acceptor = (one, two) if two.connection.peer_name else (two, one)
        # 0 in one process
        assert acceptor.connection.peer_name == (connector.connection.known_as or 7)

    def test_nobody_at_the_address_is_unreachable_at_once(self, world: World) -> None:
        world.listener.close()
        with contextlib.ExitStack() as holding:
            # another process may take the port that was left; not one that is held, unheard
            if self.address.startswith("tcp:"):
                world.listener.address = f"tcp://{address_of(holding.enter_context(hold_port()))}"
            with pytest.raises(UnreachableError, match="nobody listens"):
                world.call(world.connecting_transport())

    def test_two_connections_do_not_mix(self, world: World, sides: tuple[Side, Side]) -> None:
        one, two = sides
        three, four = world.connect()
        one.connection.send(b"first")
        three.connection.send(b"second")
        world.turn_until(lambda: two.messages and four.messages)
        assert two.bodies == [b"first"]
        assert four.bodies == [b"second"]
        three.connection.close()

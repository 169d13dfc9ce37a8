"""shm keeps the contract, and what is particular to shared memory."""

from __future__ import annotations

import contextlib
import gc
import os
import secrets
import select
import socket
import threading
import time
from typing import Any

import numpy as np
import pytest

from shard import (
    AuthenticationError,
    BackpressureError,
    ClosedError,
    Node,
    PeerLostError,
    RemoteProtocolError,
    ShardError,
    ShmFull,
    ShmTransport,
    Slab,
    Transport,
    UnreachableError,
)
from shard.memory.segment import SEAL_GROW, SIZE_SEALS
from shard.memory.slab import IDLE_TURNS, TRIM_S
from shard.transport import unix_rendezvous
from shard.transport.handshake import NONCE_BYTES, Connector
from shard.transport.records import DESCRIPTOR, MESSAGE, PREFIX
from shard.transport.rings import make_rings, rings_bytes
from shard.transport.shm import KIND, ShmListener
from shard.transport.shm_connection import ShmConnection
from shard.transport.spill import LENGTH, SPILLED, SpillWriter
from tests.connecting import connect, meet_by, run_in_loop
from tests.helpers import ManualClock
from tests.shard.processes import in_fork
from tests.shard.small_memory import no_descriptors
from tests.shard.strangers import Stranger, memfd
from tests.transport_contract import LIMITS, PATIENCE_S, Side, TransportContract, World


class TestShm(TransportContract):
    address = "shm://"

    @staticmethod
    def make(node: Node, slab: Slab) -> Transport:
        return ShmTransport(node, slab)

    def test_nothing_of_a_connection_has_a_name_in_dev_shm(
        self, world: World, sides: tuple[Side, Side]
    ) -> None:
        one, two = sides
        one.connection.send(b"", [np.zeros(1_000_000, np.uint8)])
        world.turn_until(lambda: two.messages)
        assert [name for name in os.listdir("/dev/shm") if f".{os.getpid()}." in name] == []

    def test_a_slab_array_is_the_very_memory_at_the_other_end(
        self, world: World, sides: tuple[Side, Side]
    ) -> None:
        one, two = sides
        array = world.calling_slab.empty(100_000, np.uint8)
        array[:] = 1
        one.connection.send(b"", [array])
        world.turn_until(lambda: two.messages)
        array[500] = 99
        assert two.messages[0][1][0][500] == 99

    def test_a_lease_lasts_as_long_as_any_view_and_comes_back_once(
        self, world: World, sides: tuple[Side, Side]
    ) -> None:
        one, two = sides
        slab = world.calling_slab
        one.connection.send(b"", [np.arange(100_000, dtype=np.uint8)])
        world.turn_until(lambda: two.messages)
        _, (block,) = two.messages.pop()
        views = [
            block.view(np.uint16)[7:].reshape(-1, 1),
            memoryview(block)[3:],
            np.frombuffer(block, np.uint32)[:5],
        ]
        del block
        gc.collect()
        for _ in range(3):
            world.reactor.poll(time.monotonic())
        assert slab.statistics().leases == 1
        while views:
            assert slab.statistics().leases == 1
            views.pop()
        gc.collect()
        world.turn_until(lambda: slab.statistics().leases == 0)

    @pytest.mark.parametrize("count", [1, 2])
    def test_what_is_dropped_before_an_answer_is_free_when_that_is_there(
        self, world: World, sides: tuple[Side, Side], count: int
    ) -> None:
        one, two = sides
        slab = world.calling_slab
        arrays = [slab.empty(100_000, np.uint8) for _ in range(count)]
        free: list[int] = []

        def answer(body: memoryview, blocks: Any = ()) -> None:
            blocks.clear()
            two.connection.send(bytes(body).upper())

        two.connection.on_message = answer
        one.on_each = lambda _: free.append(slab.statistics().leases)
        for _ in range(20):  # the first hands the segment over
            before = one.connection.traffic().records_received
            one.connection.send(b"first", arrays)
            world.turn_until(lambda: one.messages)
            assert one.messages.pop() == (b"FIRST", [])
            # one lease is in the record of the answer; several are in one of their own
            assert one.connection.traffic().records_received - before == count
        assert free == [0] * 20

    def test_leases_and_messages_that_find_the_ring_full_all_arrive(
        self, world: World, sides: tuple[Side, Side]
    ) -> None:
        one, two = sides
        for number in range(200):
            one.connection.send(b"%d" % number, [np.full(20_000, number, np.uint8)])
        world.turn_until(lambda: len(two.messages) == 200)
        bodies = [b"%d" % number + bytes(1000) for number in range(200)]
        for body in bodies:
            two.messages.pop()  # its lease is to go back before this, or with it
            two.connection.send(body)
        assert two.connection.outbox_messages
        world.turn_until(lambda: len(one.messages) == 200)
        assert one.bodies == bodies
        world.turn_until(lambda: not world.slabs[1].statistics().leases)

    def test_an_array_of_the_slab_waits_behind_what_finds_the_ring_full(
        self, world: World, sides: tuple[Side, Side]
    ) -> None:
        one, two = sides
        slab = world.calling_slab
        array = slab.empty(100_000, np.uint8)
        array[:] = 7
        one.connection.send(b"the first hands the segment over", [array])
        world.turn_until(lambda: two.messages)
        two.messages.clear()
        sent = 0
        while not one.connection.outbox_messages:
            one.connection.send(b"%d" % sent, [array])
            sent += 1
        one.connection.send(b"last", [array])
        world.turn_until(lambda: len(two.messages) == sent + 1)
        assert two.bodies == [*(b"%d" % number for number in range(sent)), b"last"]
        assert all(block.tolist() == [7] * 100_000 for _, (block,) in two.messages[::100])
        two.messages.clear()
        world.turn_until(lambda: slab.statistics().leases == 0)

    def test_a_parked_reactor_gives_leases_back_too(
        self, world: World, sides: tuple[Side, Side]
    ) -> None:
        one, two = sides
        one.connection.send(b"", [np.zeros(100_000, np.uint8)])
        world.turn_until(lambda: two.messages)
        two.connection.reactor.parked = True  # type: ignore[union-attr]
        two.messages.clear()
        world.reactor.parked = False
        world.reactor.park(5.0)  # returns at once: the array's end woke it
        world.turn_until(lambda: not world.calling_slab.statistics().leases)

    def test_blocks_held_by_a_peer_that_closed_are_not_used_again_while_it_reads(
        self, world: World, sides: tuple[Side, Side]
    ) -> None:
        one, two = sides
        one.connection.send(b"", [np.full(100_000, 3, np.uint8)])
        world.turn_until(lambda: two.messages)
        _, (kept,) = two.messages.pop()
        two.connection.close()
        world.turn_until(lambda: one.ends)
        slab = world.calling_slab
        assert slab.statistics().blocks_used == 1
        other = slab.empty(100_000, np.uint8)
        other[:] = 9
        assert kept.min() == kept.max() == 3
        del kept, other
        gc.collect()
        world.turn_until(lambda: slab.statistics().blocks_used == 0)

    def test_the_death_of_the_peer_ends_the_connection_and_takes_all_leases_back(
        self, world: World
    ) -> None:
        peer = Stranger(world)
        victim, slab = peer.victim, world.slabs[0]
        victim.connection.send(b"", [np.zeros(100_000, np.uint8)])
        assert slab.statistics().blocks_used == 1
        peer.line.socket.close()  # as the kernel does for a killed process
        world.turn_until(lambda: victim.ends)
        assert isinstance(victim.ends[0], PeerLostError)
        assert "died or hung up" in str(victim.ends[0])
        assert slab.statistics().blocks_used == 0

    def test_a_sleeper_woken_before_its_message_is_rung_again_if_it_sleeps_again(
        self, world: World, sides: tuple[Side, Side]
    ) -> None:
        one, two = sides
        sleeper = two.connection
        assert isinstance(sleeper, ShmConnection)
        assert not one.connection.asleep[0]
        for wake in (one.connection.wake_peer, lambda: one.connection.send(b"the message")):
            sleeper.prepare_sleep(True)
            assert one.connection.asleep[0]
            wake()
            assert not one.connection.asleep[0]
            assert select.select([sleeper.notes.fileno()], [], [], PATIENCE_S)[0]
            sleeper.notes.read()
        world.turn_until(lambda: two.messages)
        sleeper.prepare_sleep(True)
        one.connection.close()
        assert not one.connection.asleep[0]

    def test_a_doorbell_under_way_at_the_end_is_never_rung_at_a_number_that_is_used_again(
        self, world: World, sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        one, two = sides
        connection, other = one.connection, two.connection
        assert isinstance(connection, ShmConnection) and isinstance(other, ShmConnection)
        number = connection.notes.fileno()
        under_way, go_on = threading.Event(), threading.Event()

        def send_late(sock: socket.socket, data: bytes) -> int:
            """As in C, by a thread that is held between its look at the number and the system
            call.
            """
            fd = sock.fileno()
            under_way.set()
            assert go_on.wait(PATIENCE_S)
            return os.write(fd, data)

        other.prepare_sleep(True)
        monkeypatch.setattr(socket.socket, "send", send_late)
        sender = threading.Thread(target=connection.send, args=(b"wake up",))
        sender.start()
        assert under_way.wait(PATIENCE_S)
        monkeypatch.undo()
        connection.close()
        os.fstat(number)  # still there
        go_on.set()
        sender.join(PATIENCE_S)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(number)

    def test_a_send_under_way_when_connection_and_slab_are_closed_says_so(
        self, world: World, sides: tuple[Side, Side]
    ) -> None:
        one, _ = sides
        connection: Any = one.connection
        slab: Any = world.calling_slab
        allocated, go_on = threading.Event(), threading.Event()
        allocate, errors = slab.allocate, []

        def allocate_and_wait(*args: Any) -> Any:
            block = allocate(*args)
            allocated.set()
            assert go_on.wait(PATIENCE_S)
            return block

        def send() -> None:
            try:
                connection.send(b"", [np.zeros(100_000, np.uint8)])
            except Exception as error:
                errors.append(error)

        slab.allocate = allocate_and_wait
        sender = threading.Thread(target=send)
        sender.start()
        assert allocated.wait(PATIENCE_S)
        connection.close()
        slab.close()
        go_on.set()
        sender.join(PATIENCE_S)
        assert [type(error) for error in errors] == [ClosedError]
        errors.clear()

    def test_a_connection_that_is_closed_before_it_is_attached_takes_no_part(
        self, world: World
    ) -> None:
        connection = world.call(world.transports[1])
        connection.close()
        connection.attach(world.reactor)
        world.turn_until(lambda: world.accepted and world.accepted[0].ends)

    def test_leases_are_counted_as_the_connection_ends(
        self, world: World, sides: tuple[Side, Side]
    ) -> None:
        one, two = sides
        one.connection.send(b"", [np.zeros(100_000, np.uint8)])
        world.turn_until(lambda: two.messages)

        class Ending(ShmConnection):
            """The reactor's thread ends it after another thread has seen that it goes on."""

            def __getattribute__(self, name: str) -> Any:
                if name == "error":
                    self.__class__ = ShmConnection
                    self.close()
                    return None
                return super().__getattribute__(name)

        connection: Any = two.connection
        assert connection.leases_held == 1
        connection.__class__ = Ending
        assert connection.leases_held == 1
        assert connection.leases_held == 0

    def test_a_segment_that_its_owner_dropped_is_unmapped_over_there(
        self, world: World, sides: tuple[Side, Side]
    ) -> None:
        one, two = sides
        sender, receiver = one.connection, two.connection
        assert isinstance(sender, ShmConnection) and isinstance(receiver, ShmConnection)
        slab = world.calling_slab
        # no room for both: the second array needs the place of the first
        slab.limit_bytes = 60 << 20
        large = slab.empty((10 << 20,), np.uint8)
        sender.send(b"", [large])
        world.turn_until(lambda: two.messages)
        mapped = set(receiver.mapped)
        two.messages.clear()
        del large
        world.turn_until(lambda: slab.statistics().blocks_used == 0)
        other = slab.empty((50 << 20,), np.uint8)
        sender.send(b"", [other])
        world.turn_until(lambda: two.messages)
        assert slab.segments_dropped
        world.turn_until(lambda: not mapped & set(receiver.mapped))

    @pytest.mark.parametrize(
        "record",
        [
            (b"short", 1),
            (b"\xff" * 40, 1),
            ((1).to_bytes(4, "little") + bytes(4) + (1 << 40).to_bytes(8, "little") + bytes(24), 1),
            (
                (1).to_bytes(4, "little")
                + bytes(4)
                + (100).to_bytes(8, "little")
                + bytes(8)
                + b"\1"
                + bytes(7)
                + b"\7"
                + bytes(7),
                1,
            ),
            ((77).to_bytes(8, "little"), 2),
            (b"", 9),
        ],
    )
    def test_a_broken_record_ends_the_connection_by_name(
        self, world: World, record: tuple[bytes, int]
    ) -> None:
        liar = Stranger(world)
        liar.ring.try_write(*record)
        world.turn_until(lambda: liar.victim.ends)
        assert isinstance(liar.victim.ends[0], RemoteProtocolError)
        assert not liar.victim.messages

    def test_another_host_or_user_is_not_tried(self, world: World) -> None:
        transport = world.transports[1]
        host, uid, token = world.listener.address.removeprefix("shm://").split("/")
        assert (
            transport.cannot_reach(f"shm://other/{uid}/{token}")
            == "another host or network namespace"
        )
        assert transport.cannot_reach(f"shm://{host}/123456/{token}") == "another user (123456)"
        with pytest.raises(UnreachableError, match="another host"):
            connect(transport, f"shm://other/{uid}/{token}", 1.0)

    def test_another_secret_is_refused(self) -> None:
        world = World(self.make, self.address, secret=b"right")
        wrong = ShmTransport(Node(secret=b"wrong", incarnation=2, limits=LIMITS), world.slabs[1])
        with pytest.raises(AuthenticationError):
            world.call(wrong)
        assert world.accepted == []
        world.close()

    def test_an_array_that_a_handler_has_in_hand_holds_nobody_back(
        self, world: World, sides: tuple[Side, Side]
    ) -> None:
        """As of a function that calls back, and is called again before it returns."""
        one, two = sides
        nbytes = LIMITS.outbox_bytes_max * 3 // 4
        failures: list[BaseException] = []

        def answer(body: bytes) -> None:
            if int(body) < 4:
                try:
                    one.connection.send(b"%d" % (int(body) + 1), [np.full(nbytes, 7, np.uint8)])
                except BackpressureError as error:
                    failures.append(error)

        two.on_each = answer
        one.connection.send(b"0", [np.full(nbytes, 7, np.uint8)])
        world.turn_until(lambda: failures or len(two.messages) == 5)
        assert not failures
        for _, (block,) in two.messages:
            assert (block.nbytes, block[0], block[-1]) == (nbytes, 7, 7)

    @pytest.mark.parametrize("nbytes", [20_000, 1_000_000, 40_000_000])
    def test_arrays_for_a_peer_that_does_not_read_are_bounded_in_bytes_and_arrive_when_it_does(
        self, world: World, sides: tuple[Side, Side], nbytes: int
    ) -> None:
        """A record of a ring is short however long its array is: over shm 300 MB went to a stopped
        peer.
        """
        one, two = sides
        sent = 0
        with pytest.raises(BackpressureError, match="reads too slowly"):
            while sent * nbytes < 20 * LIMITS.outbox_bytes_max:
                one.connection.send(b"%8d" % sent, [np.full(nbytes, sent % 256, np.uint8)])
                sent += 1
        assert sent * nbytes < LIMITS.outbox_bytes_max + max(2 * nbytes, 10 << 20), (
            "and what sockets hold"
        )
        world.turn_until(lambda: len(two.messages) == sent)
        for number, (body, (block,)) in enumerate(two.messages):
            assert (int(body), block.nbytes, block[0], block[-1]) == (
                number,
                nbytes,
                number % 256,
                number % 256,
            )
        two.messages.clear()
        one.connection.send(b"room again", [np.zeros(nbytes, np.uint8)])
        world.turn_until(lambda: two.bodies[-1:] == [b"room again"])

    def test_arrays_without_room_go_over_a_socket_in_order_and_are_counted_and_told_once(
        self, world: World, sides: tuple[Side, Side], caplog: pytest.LogCaptureFixture
    ) -> None:
        one, two = sides
        slab = world.calling_slab
        kept = slab.empty((4 << 20,), np.uint8)
        slab.limit_bytes = 9 << 20  # two arrays of 1 MiB fit, no more
        sent = []
        for number in range(40):
            sizes = (100, 1 << 20, 0, 3 << 20)[: number % 5]
            sent.append(
                (
                    b"%d" % number + bytes(number * 1000),
                    [np.full(size, number, np.uint8) for size in sizes],
                )
            )
            while True:
                try:
                    one.connection.send(*sent[-1])
                    break
                except BackpressureError:
                    world.reactor.poll(time.monotonic())
            for block in sent[-1][1]:
                block[:] = 255  # ours again
        world.turn_until(lambda: len(two.messages) == 40)
        for number, (body, blocks) in enumerate(two.messages):
            assert body == sent[number][0]
            assert [(len(block), set(block.tolist())) for block in blocks] == [
                (len(block), {number} if len(block) else set()) for block in sent[number][1]
            ]
            assert not any(block.flags.writeable for block in blocks)
        assert one.connection.traffic().arrays_spilled >= 8
        assert caplog.text.count("goes over a socket") == 1
        with pytest.raises(ShmFull):
            slab.empty((6 << 20,), np.uint8)
        del kept

    def test_a_body_without_room_goes_over_a_socket_too(
        self, world: World, sides: tuple[Side, Side]
    ) -> None:
        one, two = sides
        world.calling_slab.limit_bytes = 4096
        body = bytes(range(256)) * 4000
        one.connection.send(body, [np.full(2_000_000, 7, np.uint8)])
        one.connection.send(b"next")
        world.turn_until(lambda: len(two.messages) == 2)
        assert two.bodies == [body, b"next"]
        assert set(two.messages[0][1][0].tolist()) == {7}

    def test_what_a_peer_keeps_counts_against_its_share_and_more_goes_over_a_socket(
        self, world: World, sides: tuple[Side, Side]
    ) -> None:
        one, two = sides
        slab = world.calling_slab
        slab.limit_bytes = slab.budget_bytes = 16 << 20
        for number in range(12):  # the peer reads them all, and keeps them
            one.connection.send(b"", [np.full(2 << 20, number, np.uint8)])
            world.turn_until(lambda count=number + 1: len(two.messages) == count)
        assert slab.statistics().used_bytes <= 8 << 20
        assert slab.empty((7 << 20,), np.uint8).nbytes, "the other half is for others"
        assert [block[-1] for _, (block,) in two.messages] == list(range(12))

    @pytest.mark.parametrize(
        ("descriptor", "spilled"),
        [
            ((5, 0, 0, SPILLED, 0), None),  # no socket came
            ((5, 0, 0, SPILLED, 0), b""),  # nothing came over it
            ((5, 0, 0, SPILLED, 0), LENGTH.pack(6) + b"abcdef"),
            ((5, 0, 0, SPILLED, 0), LENGTH.pack(1 << 50)),
        ],
    )
    def test_a_record_whose_arrays_never_came_ends_the_connection(
        self, world: World, descriptor: tuple[int, ...], spilled: bytes | None
    ) -> None:
        liar = Stranger(world)
        with contextlib.ExitStack() as closing:
            if spilled is not None:
                writer = SpillWriter(liar.notes)
                closing.callback(writer.close)
                assert writer.write([memoryview(spilled)])
            liar.ring.try_write(PREFIX.pack(1, 0) + DESCRIPTOR.pack(*descriptor), MESSAGE)
            world.turn_until(lambda: liar.victim.ends)
        assert isinstance(liar.victim.ends[0], RemoteProtocolError)
        assert not liar.victim.messages

    def test_idle_memory_that_goes_back_is_unmapped_over_there_though_nothing_is_sent(
        self, world: World, sides: tuple[Side, Side]
    ) -> None:
        one, two = sides
        slab = world.calling_slab
        arrays = [slab.empty((112 << 20,), np.uint8) for _ in range(3)]
        one.connection.send(b"", [array[:100_000] for array in arrays])
        world.turn_until(lambda: two.messages)
        mapped = two.connection.mapped  # type: ignore[attr-defined]
        assert len(mapped) == 3
        del arrays
        two.messages.clear()
        world.turn_until(lambda: slab.statistics().blocks_used == 0)
        slab.clock = clock = ManualClock(time.monotonic())
        for _ in range(2 * IDLE_TURNS):
            clock.advance(TRIM_S)
            slab.trim()
        assert slab.statistics().segments_trimmed == 1
        world.turn_until(lambda: len(mapped) == 2)

    def test_a_fork_that_drops_received_arrays_writes_nothing_into_its_parents_rings(
        self, world: World, sides: tuple[Side, Side]
    ) -> None:
        one, two = sides
        for _ in range(3):
            one.connection.send(b"", [np.full(100_000, 3, np.uint8)])
        world.turn_until(lambda: len(two.messages) == 3)
        two.messages.pop()
        gc.collect()  # one lease waits to be returned: by the parent alone

        def child() -> None:
            two.messages.clear()
            gc.collect()
            with contextlib.suppress(ShardError):
                two.connection.send(b"from the child")
            two.connection.drain()
            assert two.connection.poll() == 0
            two.connection.close()

        assert in_fork(child) == 0
        assert one.connection.poll() == 0, "no record in its ring"
        assert [block.min() for _, (block,) in two.messages] == [3, 3]
        for number in range(10):
            two.connection.send(bytes([number]))
        world.turn_until(lambda: len(one.messages) == 10)
        assert [body for body, _ in one.messages] == [bytes([number]) for number in range(10)]
        two.messages.clear()
        gc.collect()
        world.turn_until(lambda: not world.calling_slab.statistics().leases)
        assert not one.ends and not two.ends

    @pytest.mark.parametrize(
        ("size_bytes", "seals", "why"),
        [
            (rings_bytes(LIMITS.ring_bytes), 0, "its maker could change it under us"),
            (rings_bytes(LIMITS.ring_bytes), SEAL_GROW, "its maker could change it under us"),
            (rings_bytes(LIMITS.ring_bytes_max * 2), SIZE_SEALS, "bytes, at most "),
            (rings_bytes(LIMITS.ring_bytes), SIZE_SEALS, "not a ring"),
        ],
    )
    def test_rings_that_a_peer_could_cut_short_or_that_are_too_large_are_not_mapped(
        self, world: World, caplog: pytest.LogCaptureFixture, size_bytes: int, seals: int, why: str
    ) -> None:
        """Each of them ended this process by SIGBUS, or in its memory, as soon as it was used."""
        fd = memfd(size_bytes, seals)
        sock = run_in_loop(
            unix_rendezvous.dial(world.listener.address, time.monotonic() + PATIENCE_S)
        )

        def run() -> None:
            def send_proof(proof: bytes) -> None:
                socket.send_fds(sock, [proof], [fd])

            with contextlib.suppress(OSError, ShardError):
                meet_by(
                    sock,
                    world.listener.address,
                    Node(b"", 2, LIMITS),
                    KIND,
                    PATIENCE_S,
                    send_proof=send_proof,
                )

        thread = threading.Thread(target=run)
        thread.start()
        world.turn_until(lambda: why in caplog.text)
        thread.join(PATIENCE_S)
        sock.close()
        os.close(fd)
        assert world.accepted == []

    def test_a_peer_that_is_gone_right_after_its_proof_is_no_refusal_and_costs_one_descriptor_once(
        self, world: World, caplog: pytest.LogCaptureFixture
    ) -> None:
        before = len(os.listdir("/proc/self/fd"))
        segment = make_rings(LIMITS.ring_bytes)
        sock = run_in_loop(
            unix_rendezvous.dial(world.listener.address, time.monotonic() + PATIENCE_S)
        )

        about_to, go_on, gone = threading.Event(), threading.Event(), threading.Event()

        def prove_and_go(proof: bytes) -> None:
            about_to.set()
            assert go_on.wait(PATIENCE_S)
            socket.send_fds(sock, [proof], [segment.fd])
            sock.close()
            gone.set()

        def run() -> None:
            with contextlib.suppress(OSError, ShardError):
                meet_by(
                    sock,
                    world.listener.address,
                    Node(b"", 2, LIMITS),
                    KIND,
                    PATIENCE_S,
                    send_proof=prove_and_go,
                )

        thread = threading.Thread(target=run)
        thread.start()
        world.turn_until(about_to.is_set)
        go_on.set()
        assert gone.wait(PATIENCE_S)  # before the listener reads the proof
        listener = world.listener
        assert isinstance(listener, ShmListener)
        world.turn_until(lambda: listener.statistics().gave_up)
        assert caplog.text == ""
        thread.join(PATIENCE_S)
        segment.close()
        gc.collect()
        assert world.accepted == []
        world.turn_until(lambda: len(os.listdir("/proc/self/fd")) == before)

    def test_a_peer_that_is_closed_while_it_connects_is_counted_and_not_logged(
        self, world: World, caplog: pytest.LogCaptureFixture
    ) -> None:
        sock = run_in_loop(
            unix_rendezvous.dial(world.listener.address, time.monotonic() + PATIENCE_S)
        )
        sock.send(Connector(b"", KIND, 2, secrets.token_bytes(NONCE_BYTES)).start())
        readable = select.poll()
        readable.register(sock, select.POLLIN)
        world.turn_until(lambda: readable.poll(0))
        sock.close()
        listener = world.listener
        assert isinstance(listener, ShmListener)
        world.turn_until(lambda: listener.statistics().gave_up)
        assert (listener.statistics().refused, caplog.text) == (0, "")

    def test_without_a_descriptor_for_a_segment_that_comes_the_connection_ends_and_says_why(
        self, world: World, sides: tuple[Side, Side]
    ) -> None:
        one, two = sides
        one.connection.send(b"", [np.zeros(1_000_000, np.uint8)])
        with no_descriptors():
            world.turn_until(lambda: two.ends)
        assert "this process has none left: raise `ulimit -n`" in str(two.ends[0])
        assert not two.messages

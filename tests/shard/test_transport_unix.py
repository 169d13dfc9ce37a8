"""unix keeps the contract, and what is particular to sockets of one host."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from shard import (
    AuthenticationError,
    Node,
    PeerLostError,
    Slab,
    Transport,
    UnixTransport,
    UnreachableError,
)
from shard.transport import unix_rendezvous
from shard.transport.laned_connection import BULK_BYTES_MIN, LanedConnection
from shard.transport.unix import KIND
from tests.connecting import connect, meet_by, run_in_loop
from tests.transport_contract import LIMITS, PATIENCE_S, Side, TransportContract, World

ROOT = Path(__file__).parents[2]
PEER = """
import sys
from shard import Node, Slab, UnixTransport, control_loop

node = Node(secret=b"", incarnation=2, limits={limits})
transport = UnixTransport(node, Slab())
connection = control_loop().spawn(transport.connect({address!r}, {timeout_s})).result()
print("connected", flush=True)
sys.stdin.read()
"""


class TestUnix(TransportContract):
    address = "unix://"

    @staticmethod
    def make(node: Node, slab: Slab) -> Transport:
        return UnixTransport(node, slab)

    def test_large_messages_have_a_lane_of_their_own(
        self, world: World, sides: tuple[Side, Side]
    ) -> None:
        one, two = sides
        assert isinstance(one.connection, LanedConnection)
        for number in range(8):
            one.connection.send(b"bulk", [np.full(4 * BULK_BYTES_MIN, number, np.uint8)])
        one.connection.send(b"small")
        world.turn_until(lambda: len(two.messages) == 9)
        assert two.bodies.index(b"small") < 8, "it waited for nobody"
        assert [blocks[0][-1] for _, blocks in two.messages if blocks] == list(range(8))

    def test_the_kernel_says_who_is_there(self, sides: tuple[Side, Side]) -> None:
        for side in sides:
            assert side.connection.peer == f"unix://process {os.getpid()}"
            assert side.connection.peer_identity.same_user
            assert side.connection.transport == "unix"

    def test_a_peer_that_is_killed_is_lost_at_once(self, world: World) -> None:
        script = PEER.format(
            limits="__import__('shard').DEFAULT_LIMITS",
            address=world.listener.address,
            timeout_s=PATIENCE_S,
        )
        with subprocess.Popen(
            [sys.executable, "-c", script], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process:
            world.turn_until(lambda: world.accepted)
            (side,) = world.accepted
            assert side.connection.peer == f"unix://process {process.pid}"
            process.send_signal(signal.SIGKILL)
            world.turn_until(lambda: side.ends)
        assert isinstance(side.ends[0], PeerLostError)

    def test_another_host_or_user_is_not_tried(self, world: World) -> None:
        transport = world.transports[1]
        host, uid, token = world.listener.address.removeprefix("unix://").split("/")
        assert (
            transport.cannot_reach(f"unix://other/{uid}/{token}")
            == "another host or network namespace"
        )
        assert transport.cannot_reach(f"unix://{host}/123456/{token}") == "another user (123456)"
        with pytest.raises(UnreachableError, match="another host"):
            connect(transport, f"unix://other/{uid}/{token}", 1.0)
        with pytest.raises(UnreachableError, match="unix://host/uid/token expected"):
            connect(transport, "unix://here", 1.0)

    def test_a_user_of_the_same_number_in_another_namespace_is_refused_at_both_ends(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """All are user 4711 by their own account; the kernel knows better."""
        here = world.listener.address.replace(f"/{os.getuid()}/", "/4711/")
        monkeypatch.setattr(os, "getuid", lambda: 4711)
        with pytest.raises(
            UnreachableError,
            match=r"process \d+ at unix://.* belongs to user \d+, this one to 4711",
        ):
            connect(world.transports[1], here, 5.0)
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect("\0prpc." + here.rpartition("/")[2])
            world.turn_until(lambda: world.listener.statistics().refused)  # type: ignore[attr-defined]
            sock.settimeout(PATIENCE_S)
            assert sock.recv(1) == b""

    def test_a_descriptor_that_nobody_asked_for_is_refused(self, world: World) -> None:
        before = len(os.listdir("/proc/self/fd"))
        node = Node(secret=b"", incarnation=2, limits=LIMITS)
        address = world.listener.address

        refused: list[UnreachableError] = []

        with run_in_loop(unix_rendezvous.dial(address, time.monotonic() + PATIENCE_S)) as sock:

            def send_with_another(proof: bytes) -> None:
                socket.send_fds(sock, [proof], [sock.fileno()])

            def run() -> None:
                try:
                    meet_by(sock, address, node, KIND, PATIENCE_S, send_proof=send_with_another)
                except UnreachableError as error:
                    refused.append(error)

            thread = threading.Thread(target=run)
            thread.start()
            world.turn_until(lambda: refused)
            thread.join()
        assert world.accepted == []
        assert len(os.listdir("/proc/self/fd")) == before

    def test_who_finds_all_places_taken_waits_for_one(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(unix_rendezvous, "LISTEN_BACKLOG", 1)
        listener, address = unix_rendezvous.listen("unix")
        with contextlib.ExitStack() as closing:
            closing.enter_context(listener)
            closing.enter_context(
                run_in_loop(unix_rendezvous.dial(address, time.monotonic() + PATIENCE_S))
            )
            closing.enter_context(
                run_in_loop(unix_rendezvous.dial(address, time.monotonic() + PATIENCE_S))
            )
            with pytest.raises(UnreachableError, match="in time: 1 or so wait there"):
                run_in_loop(unix_rendezvous.dial(address, time.monotonic()))
            with ThreadPoolExecutor() as pool:
                third = pool.submit(
                    run_in_loop, unix_rendezvous.dial(address, time.monotonic() + PATIENCE_S)
                )
                closing.enter_context(listener.accept()[0])
                closing.enter_context(third.result(PATIENCE_S))

    def test_another_secret_is_refused(self) -> None:
        world = World(self.make, self.address, secret=b"right")
        wrong = UnixTransport(Node(secret=b"wrong", incarnation=2, limits=LIMITS), world.slabs[1])
        with pytest.raises(AuthenticationError):
            world.call(wrong)
        assert world.accepted == []
        world.close()

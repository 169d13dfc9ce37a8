"""The path between two real processes: the best there is, another one at once when it fails, and
told in either case.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from prpc_engine import Master, RpcClient, RpcService
from prpc_engine.errors import Cancelled, ConfigError, DeadlineExceeded, MaybeExecuted, NotSent
from prpc_engine.node import node
from prpc_engine.rpc import paths
from prpc_engine.rpc.backoff import Backoff
from prpc_engine.rpc.paths import FAILURES_MAX, Choice
from prpc_engine.rpc.peer import Peer
from shard import (
    Future,
    Limits,
    PeerLostError,
    UnreachableError,
    control_loop,
)
from shard.transport import shm, shm_connection
from tests.connecting import connect
from tests.held import at
from tests.prpc_engine.inside import make_unreadable, node_of, peers_by_address, session_of
from tests.prpc_engine.processes import PATIENCE_S, ROOT, ServerProcess, wait_connected, wait_until
from tests.shard.small_memory import run_with_memory
from tests.transport_contract import World as ShmWorld


@contextlib.contextmanager
def world(
    master: Master, server: str = "shm,unix,tcp", **settings: object
) -> Iterator[tuple[RpcService, RpcClient]]:
    """A server in another process that offers those transports, and a client of it."""
    with (
        ServerProcess(master.address, "test", server),
        RpcService(master=master.address, **settings) as service,  # type: ignore[arg-type]
    ):
        yield service, service.create_client("test", timeout_s=PATIENCE_S)


def peer_of(service: RpcService) -> Peer:
    """The one that is not the master."""
    (peer,) = [
        peer
        for first, peer in peers_by_address(node_of(service)).items()
        if first.startswith("memory://")
    ]
    return peer


def choice_of(service: RpcService) -> Choice:
    (choice,) = [
        peer.choice
        for peer in service.statistics().peers
        if peer.choice is not None and not peer.choice.node.endswith(session_of(service).address)
    ]
    return choice


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    """Level and text of what was logged of the server's path."""
    return [
        (one.levelname, one.getMessage())
        for one in caplog.records
        if one.getMessage().startswith("server 0 of 'test'")
    ]


def hang_up(service: RpcService) -> None:
    """On the server, as its reactor does."""
    peer = peer_of(service)
    node_of(service).reactor.call_soon(peer.connection.close)
    wait_until(lambda: peer.lost, "the end of the connection")


def find_no_room() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


# -- what is there ---------------------------------------------------------------------------------


def test_shared_memory_is_taken_on_one_host_and_a_new_pair_is_one_line_of_the_log(
    master: Master, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "prpc")
    with world(master) as (service, client):
        client.call("echo", 1)
        choice = choice_of(service)
        assert (choice.transport, choice.refusals) == ("shm", ())
        assert service.transports[choice.node] == str(choice)
        hang_up(service)
        client.call("echo", 2)
    assert lines(caplog) == [("INFO", f"server 0 of 'test' (rank 0): {choice}")]


def test_who_was_connected_to_sees_that_the_other_side_chose(master: Master) -> None:
    with RpcService(master=master.address) as serving, RpcService(master=master.address) as service:
        serving.create_server("test", {"one": lambda: 1})
        assert service.create_client("test").call("one") == 1
        accepted = [peer for peer in serving.statistics().peers if peer.choice is None]
        assert [peer.transport for peer in accepted] == ["shm"]


def test_only_nodes_that_are_connected_are_told_of(master: Master) -> None:
    with world(master) as (service, client):
        client.call("echo", 1)
        assert len(service.transports) == 2, "the master and the server"
    for number in range(3):
        with RpcService(master=master.address) as service:
            with ServerProcess(master.address, f"gone {number}", "tcp"):
                service.create_client(f"gone {number}").call("echo", 1)
            wait_until(lambda service=service: len(service.transports) == 1, "only the master")


@pytest.mark.parametrize(
    ("server", "client", "taken", "refusals"),
    [
        ("shm,unix,tcp", ["tcp", "unix", "shm"], "tcp", []),
        ("shm,unix,tcp", ["unix", "tcp"], "unix", []),
        ("shm,unix,tcp", ["tcp"], "tcp", []),
        ("unix,tcp", None, "unix", [("shm", "not offered by tcp://", False)]),
        ("shm,tcp", ["unix", "tcp"], "tcp", [("unix", "not offered by tcp://", False)]),
        (
            "tcp",
            None,
            "tcp",
            [("shm", "not offered by tcp://", False), ("unix", "not offered by tcp://", False)],
        ),
    ],
)
def test_either_side_orders_and_forbids(
    master: Master,
    server: str,
    client: list[str] | None,
    taken: str,
    refusals: list[tuple[str, str, bool]],
) -> None:
    with world(master, server, transports=client) as (service, asking):
        asking.call("echo", 1)
        choice = choice_of(service)
        assert choice.transport == taken
        told = [(one.transport, one.reason, one.failed) for one in choice.refusals]
        assert [(name, failed) for name, _, failed in told] == [
            (name, failed) for name, _, failed in refusals
        ]
        assert all(
            text.startswith(expected)
            for (_, text, _), (_, expected, _) in zip(told, refusals, strict=True)
        )


def test_a_path_that_is_forced_and_not_offered_is_named(master: Master) -> None:
    with (
        world(master, "tcp", transports=["shm"]) as (_, client),
        pytest.raises(NotSent, match="shm: not offered by tcp://"),
    ):
        client.call("echo", 1)


def test_the_environment_chooses_where_the_program_does_not(
    master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRPC_TRANSPORTS", "tcp")
    with world(master) as (service, client):
        client.call("echo", 1)
        assert choice_of(service).transport == "tcp"
    monkeypatch.setenv("PRPC_TRANSPORTS", "infiniband")
    with pytest.raises(
        ConfigError, match="PRPC_TRANSPORTS='infiniband': allowed are shm, unix, verbs, tcp"
    ):
        RpcService(master=master.address)


# -- what fails while connecting -------------------------------------------------------------------


def test_without_room_for_rings_unix_is_taken_at_once_and_the_log_warns_once(
    master: Master, caplog: pytest.LogCaptureFixture
) -> None:
    with at("segment.opened", find_no_room), world(master) as (service, client):
        client.call("echo", 1)
        choice = choice_of(service)
        assert choice.transport == "unix"
        (refusal,) = choice.refusals
        assert str(refusal).startswith("shm: no memory for a segment")
        hang_up(service)
        client.call("echo", 2)
    assert lines(caplog) == [("WARNING", f"server 0 of 'test' (rank 0): {choice}")]


def test_a_peer_that_cannot_attach_the_segment_is_reached_over_unix(master: Master) -> None:
    """It has no descriptor left for the mapping, or is not let."""
    script = f"""
from prpc_engine import RpcService
from shard.memory.segment import Segment

def attach(fd, *args, **kwargs):
    raise OSError(24, "Too many open files")

Segment.attach = attach
with RpcService({master.address!r}) as service:
    service.create_server("test", {{"one": lambda: 1}})
    print("ready", flush=True)
    input()
"""
    with (
        subprocess.Popen(
            [sys.executable, "-c", script], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as server,
        RpcService(master.address) as service,
    ):
        assert service.create_client("test", timeout_s=PATIENCE_S).call("one") == 1
        choice = choice_of(service)
        assert choice.transport == "unix"
        (refusal,) = choice.refusals
        assert refusal.failed
        assert "hung up during the handshake" in refusal.reason
        server.communicate(b"\n", PATIENCE_S)


def test_memory_that_is_taken_away_before_they_connect_is_told_and_unix_is_taken() -> None:
    run_with_memory(
        16 << 20,
        """
from prpc_engine import Master, RpcService

if __name__ == "__main__":
    with Master() as master, RpcService(master.address) as one, RpcService(master.address) as two:
        one.create_server("test", {"double": lambda value: 2 * value})
        client = two.create_client("test")
        bound_memory(4096)
        assert client.call("double", 4) == 8
        (way,) = [way for way in two.transports.values() if "shm" in way]
        assert way.startswith("unix to ") and "shm: no memory for a segment" in way, way
""",
    )


# -- what fails later ------------------------------------------------------------------------------


def break_it(service: RpcService) -> None:
    """Over shared memory a ring that cannot be: more was written to it than it holds."""
    peer = peer_of(service)
    node_of(service).reactor.call_soon(lambda: make_unreadable(peer.connection, "here"))
    wait_until(lambda: peer.lost, "the loss")


@pytest.mark.parametrize(("first", "second"), [("shm", "unix"), ("unix", "tcp")])
def test_a_broken_path_is_tried_again_until_it_broke_too_often_then_the_next_is_taken(
    master: Master, caplog: pytest.LogCaptureFixture, first: str, second: str
) -> None:
    caplog.set_level(logging.INFO, "prpc")
    with world(master, transports=[first, second]) as (service, client):
        for number in range(FAILURES_MAX):
            assert client.call("echo", number) == number
            assert choice_of(service).transport == first
            break_it(service)
        assert client.call("echo", "over the next") == "over the next"
        choice = choice_of(service)
        assert choice.transport == second
        (refusal,) = choice.refusals
        assert re.match(
            rf"{first}: failed {FAILURES_MAX} times in a row, tried again in \d+ s: ", str(refusal)
        )
    assert [level for level, _ in lines(caplog)] == ["INFO", "WARNING"], "one when it changes"


@pytest.fixture
def _short_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "REST", Backoff(first_s=0.01, max_s=600.0))
    monkeypatch.setattr(node, "LEAVE_S", 0.01)


def over_unix(service: RpcService) -> list[Peer]:
    return [one for one in node_of(service).peers() if one.connection.transport == "unix"]


def goes_over(service: RpcService, transport: str) -> bool:
    return any(
        way.startswith(f"{transport} to")
        for at, way in service.transports.items()
        if not at.endswith(session_of(service).address)
    )


@pytest.mark.usefixtures("_short_rests")
def test_when_its_rest_is_over_calls_come_back_to_the_preferred_path(master: Master) -> None:
    with world(master) as (service, client):
        for _ in range(FAILURES_MAX):
            client.call("echo", 1)
            break_it(service)
        wait_until(
            lambda: client.call("echo", 2) == 2 and goes_over(service, "shm"), "shared memory again"
        )
        wait_until(lambda: not over_unix(service), "the end of the connection over unix")


@pytest.mark.usefixtures("_short_rests")
def test_a_connection_that_is_left_ends_no_call(
    master: Master,
) -> None:
    with world(master) as (service, client):
        with at("segment.opened", find_no_room):
            nap = client.submit("nap", 3600.0, timeout_s=None)
            wait_until(lambda: goes_over(service, "unix"), "unix")
        wait_until(
            lambda: client.call("echo", 1) == 1 and goes_over(service, "shm"), "shared memory"
        )
        assert not nap.done()
        (left,) = over_unix(service)
        nap.cancel()
        wait_until(lambda: left.connection.error, "its end")
        assert [type(error) for error in (nap.error(0.0), left.connection.error)] == [
            Cancelled,
            PeerLostError,
        ]
        assert "is reached by another path from now on" in str(left.connection.error)


def test_where_nothing_else_connects_a_path_that_should_rest_is_tried_all_the_same(
    master: Master,
) -> None:
    with world(master, transports=["shm"]) as (service, client):
        for number in range(FAILURES_MAX + 2):
            assert client.call("echo", number) == number
            break_it(service)
        assert client.call("echo", "still") == "still"


@pytest.mark.parametrize("transport", ["shm", "unix", "tcp"])
def test_calls_that_wait_for_room_when_the_path_breaks_go_over_the_next_and_run_once(
    master: Master, tmp_path: Path, transport: str
) -> None:
    fifo = str(tmp_path / "fifo")
    os.mkfifo(fifo)
    limits = Limits(ring_bytes=64 << 10, outbox_messages_max=4096)
    with world(master, transport, transports=[transport], limits=limits) as (service, client):
        client.call("echo", 0)
        wait_connected(client)
        # the server reads nothing more
        blocked = client.submit("read_fifo", fifo, timeout_s=PATIENCE_S)
        calls = [
            client.submit("hear", (number, "x" * 12_000), timeout_s=PATIENCE_S)
            for number in range(3000)
        ]
        assert peer_of(service).connection.outbox_messages > 100
        with Path(fifo).open("w") as gate:  # once the handler reads it
            break_it(service)
            gate.write("go on")
        ended = [call.error(PATIENCE_S) for call in calls]
        assert isinstance(blocked.error(PATIENCE_S), MaybeExecuted)
        unsent = [number for number, error in enumerate(ended) if error is None]
        assert len(unsent) > 100, "they left later, over the new connection"
        assert {type(error) for error in ended if error is not None} == {MaybeExecuted}, (
            "what had left"
        )
        heard = [number for number, _ in client.call("heard_so_far", timeout_s=PATIENCE_S)]
        assert len(set(heard)) == len(heard)
        assert set(unsent) <= set(heard)


def test_arrays_of_a_segment_that_cannot_be_mapped_are_copied_and_the_log_says_why(
    master: Master, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with world(master) as (_, client):
        client.call("echo", 1)

        def no_descriptor(*args: object, **kwargs: object) -> None:
            raise OSError(24, "Too many open files")

        with monkeypatch.context() as patched:
            patched.setattr(shm_connection.Segment, "attach", no_descriptor)
            assert client.call("double", np.ones(100_000)).sum() == 200_000
        assert "MiB cannot be mapped (Too many open files): its arrays" in caplog.text
        assert client.call("double", np.ones(100_000)).sum() == 200_000


# -- who is the same host and user -----------------------------------------------------------------


@pytest.mark.root
@pytest.mark.skipif(os.getuid() != 0, reason="runs as two users: needs root")
def test_another_user_of_this_host_is_reached_over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    # without one, users have each their own
    monkeypatch.setenv("PRPC_SECRET", "a secret of the whole job")
    with Master() as master:
        _reach_another_user(master)


def _reach_another_user(master: Master) -> None:
    program = f"""
import encodings.idna, os
from prpc_engine import RpcService

os.setgroups([])  # here, as that user need not be able to read this tree, or Python's own
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
with RpcService({master.address!r}) as service:
    service.create_server("test", {{"one": lambda: 1}})
    print("ready", flush=True)
    input()
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with (
        subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            cwd="/",
        ) as server,
        RpcService(master.address) as service,
    ):
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        assert service.create_client("test", timeout_s=PATIENCE_S).call("one") == 1
        choice = choice_of(service)
        assert str(choice).endswith("; shm: another user (65534); unix: another user (65534)")
        assert not choice.failed
        server.communicate(b"\n", PATIENCE_S)


def test_a_user_of_the_same_number_in_another_namespace_is_not_the_same_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both are user 4711 by their own account; the kernel knows better."""
    world = ShmWorld(shm.ShmTransport, "shm://")
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    address = re.sub(r"/\d+/", "/4711/", world.listener.address)
    assert world.transports[1].cannot_reach(address) is None
    with pytest.raises(
        UnreachableError, match=r"process \d+ at shm://.* belongs to user \d+, this one to 4711"
    ):
        connect(world.transports[1], address, 5.0)
    monkeypatch.undo()
    world.close()


@pytest.mark.parametrize("is_turning", [False, True])
def test_descriptors_that_run_out_while_connecting_are_a_named_error(
    master: Master, is_turning: bool
) -> None:
    """For the sockets, or for the loop that connects them."""
    over = Future()

    async def keep_turning() -> None:
        await over

    with contextlib.ExitStack() as closing:
        _, client = closing.enter_context(world(master))
        if is_turning:
            closing.callback(over.set_result, None)
            control_loop().spawn(keep_turning())
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        used = max(map(int, os.listdir("/proc/self/fd")))
        resource.setrlimit(resource.RLIMIT_NOFILE, (1, hard))
        try:
            # the latter where the deadline comes in the middle of an attempt
            with pytest.raises(
                (NotSent, DeadlineExceeded),
                match=r"shm: .*Too many open files.*; tcp: .*no file descriptors left",
            ):
                client.call("echo", 1, timeout_s=1.0)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert client.call("echo", 2) == 2
        assert max(map(int, os.listdir("/proc/self/fd"))) < used + 20

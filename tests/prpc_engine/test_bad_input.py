"""What a user, a peer or the system can do wrong: a named error each, in bounded time, and the
service works after it.

The first line of each error says what was asked, of whom, and what to try; so these tests read
texts on purpose.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import prpc_engine
from prpc_engine import NO_SECRET, Master, RpcClient, RpcService, bulk, errors, idempotent, once
from prpc_engine.settings.config import secret_from
from shard import DEFAULT_LIMITS, Limits, usable_cores
from shard.transport.handshake import HELLO, PROOF_BYTES, Connector
from tests.ports import address_of, hold_port
from tests.prpc_engine import seen
from tests.prpc_engine.handlers import Plain
from tests.prpc_engine.inside import entries_of, looks_up, node_of
from tests.prpc_engine.processes import PATIENCE_S, ServerProcess, wait_until

BOUND_S = 20.0  # far above what any of these takes, below the default timeouts of 30 s
SMALL = Limits(body_bytes_max=100_000, blocks_bytes_max=1_000_000, blocks_max=8)


class World(NamedTuple):
    """One server called "test" in a process of its own, and a client of it."""

    transport: str
    service: RpcService
    client: RpcClient
    master: Master


@pytest.fixture(params=["shm", "tcp"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Whatever a test does, the client and its server must work when it has ended."""
    with (
        Master() as master,
        ServerProcess(master.address, "test", request.param),
        RpcService(master=master.address, transports=[request.param]) as service,
    ):
        client = service.create_client("test", timeout_s=PATIENCE_S)
        started = time.monotonic()
        yield World(request.param, service, client, master)
        assert time.monotonic() - started < BOUND_S
        client = service.create_client("test", timeout_s=PATIENCE_S)
        assert client.call("echo", "still works") == "still works"


@contextlib.contextmanager
def refused(kind: type[Exception], *words: str) -> Iterator[None]:
    """The block raises exactly `kind`, and the first line of its text holds all these words."""
    with pytest.raises(kind) as caught:
        yield
    assert type(caught.value) is kind
    first_line = str(caught.value).partition("\n")[0]
    missing = [word for word in words if word not in first_line]
    assert not missing, f"{missing} not in: {first_line}"


# -- calls -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_unknown_method_is_named_with_those_there_are(world: World) -> None:
    with refused(
        errors.UnknownMethod,
        "'ecko'",
        "server 0 of 'test' (rank 0)",
        world.transport,
        "add, boom",
        "echo",
    ):
        world.client.call("ecko", 1)


def test_private_methods_are_unknown(world: World) -> None:
    for name in ("_client", "__init__", "__class__", ""):
        with refused(errors.UnknownMethod, repr(name)):
            world.client.call(name)


def test_a_method_name_that_is_no_text_is_named(world: World) -> None:
    with refused(errors.BadArguments, "a method's name is a str, not int (7)"):
        world.client.call(7)  # type: ignore[arg-type]


@pytest.mark.usefixtures("patient_sessions")
def test_an_unknown_service_is_named_with_those_there_are(world: World) -> None:
    with refused(
        errors.NoServer, "'toast'", "0 of 1 servers after 0.1 s", world.master.address, "test"
    ):
        world.service.create_client("toast", timeout_s=0.1)


@pytest.mark.usefixtures("patient_sessions")
def test_too_few_servers_are_counted(world: World) -> None:
    with refused(errors.NoServer, "'test'", "1 of 3 servers"):
        world.service.create_client("test", expected_servers=3, timeout_s=0.1)


def test_when_the_only_server_was_taken_back_there_is_none_to_be_found(world: World) -> None:
    with RpcService(master=world.master.address) as other:
        server = other.create_server("brief", Plain())
        entries = entries_of(world.service, "brief", 1, PATIENCE_S)
        # Of its own, as the service's are told of the end, perhaps before they call.
        with RpcClient(
            "brief",
            node_of(world.service),
            entries,
            looks_up(lambda: entries_of(world.service, "brief", 0, PATIENCE_S)),
        ) as client:
            assert client.call("echo", 1) == 1
            server.close()
            # Which of these, the deadline decides; what was tried, each says.
            with pytest.raises(
                (errors.NoServer, errors.UnknownService, errors.DeadlineExceeded),
                match=r"tried .* times .* UnknownService at server 0 of 'brief'",
            ):
                client.call("echo", 1, timeout_s=1.0)


def test_a_handler_that_raises_gives_its_type_message_and_traceback(world: World) -> None:
    with pytest.raises(errors.RemoteError) as caught:
        world.client.call("boom", "the key")
    error = caught.value
    assert (error.type_name, error.remote_message) == ("KeyError", "'the key'")
    assert "handlers.py" in error.remote_traceback
    assert "raise KeyError(text)" in error.remote_traceback
    first_line, _, rest = str(error).partition("\n")
    assert "'boom' of server 0 of 'test' (rank 0)" in first_line
    assert first_line.endswith("raised KeyError: 'the key'")
    assert error.remote_traceback in rest


def test_a_handler_that_exits_ends_its_call_and_not_the_server(world: World) -> None:
    for method in ("leave", "leave_async"):
        with refused(errors.RemoteError, f"{method!r}", "raised SystemExit: enough"):
            world.client.call(method)


class Custom:
    """Nothing that a message can hold."""


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([1, {"x": (0, Custom())}], ("argument 0[1]['x'][1] is of type", "Custom")),
        (lambda: 1, ("argument 0", "function")),
        (
            np.array([1, "a", None], object),
            ("argument 0 is an array of dtype object", "convert it to numbers"),
        ),
        ({"a": [np.array([Custom()])]}, ("argument 0['a'][0] is an array of dtype object",)),
        (1 << 10_000, ("argument 0 is an integer of 1251 bytes", "at most 1024")),
        ("\ud800", ("cannot be put into a message",)),
    ],
    ids=[
        "custom class",
        "function",
        "array of objects",
        "array of objects inside",
        "integer",
        "surrogate",
    ],
)
def test_an_argument_that_cannot_be_sent_is_named_with_its_place(
    world: World, value: Any, words: tuple[str, ...]
) -> None:
    with refused(errors.BadArguments, *words):
        world.client.call("echo", value)
    with refused(errors.BadArguments, *words):
        world.client.submit("echo", value)
    with refused(errors.BadArguments, *words):
        world.client.notify("echo", value)
    with pytest.raises(TypeError):
        world.client.broadcast("echo", value)
    assert world.client.call("echo", 1) == 1


def test_a_result_that_cannot_be_sent_is_an_error_of_the_server(world: World) -> None:
    with refused(
        errors.RemoteError,
        "'unsendable' of server 0 of 'test'",
        "the value['bad'] is of type builtins.object",
    ):
        world.client.call("unsendable")


def test_arguments_that_do_not_fit_are_refused_with_the_signature(world: World) -> None:
    for arguments in ((), (1, 2, 3)):
        with refused(
            errors.BadArguments,
            "'add' of server 0 of 'test'",
            "refused its arguments",
            "add(one",
            "two",
        ):
            world.client.call("add", *arguments)


def test_a_type_error_inside_a_handler_is_the_handlers(world: World) -> None:
    with refused(errors.RemoteError, "'add'", "raised TypeError"):
        world.client.call("add", "one", 2)


def test_a_length_of_numpys_is_a_shape() -> None:
    assert prpc_engine.empty(np.prod((3, 4)), np.float32).shape == (12,)


def test_an_object_dtype_has_no_place_in_the_slab() -> None:
    with refused(TypeError, "dtype object holds Python objects"):
        prpc_engine.empty((3,), object)
    with refused(ValueError, "negative dimensions", "(-1,)"):
        prpc_engine.empty((-1,))


# -- life ------------------------------------------------------------------------------------------


def test_a_second_close_does_nothing(world: World) -> None:
    service = RpcService(master=world.master.address)
    server = service.create_server("again", Plain())
    for _ in range(3):
        service.close()
    server.close()
    master = Master()
    for _ in range(3):
        master.close()


def test_after_close_everything_says_closed(world: World) -> None:
    service = RpcService(master=world.master.address, transports=[world.transport])
    client = service.create_client("test")
    fresh = service.create_client("test")
    assert client.call("echo", 1) == 1
    service.close()
    for each in (client, fresh):
        for verb in (each.call, each.submit, each.notify):
            with refused(errors.Closed):
                verb("echo", 1)
        with refused(errors.Closed):
            each.broadcast("echo", 1)
    with refused(errors.Closed, "this RpcService was closed here"):
        service.create_client("test")
    with refused(errors.Closed, "this RpcService was closed here"):
        service.create_server("test", Plain())


def test_a_closed_client_says_so(world: World) -> None:
    client = world.service.create_client("test")
    client.close()
    with refused(errors.Closed, "the client of 'test' was closed here"):
        client.call("echo", 1)


def test_a_server_id_that_is_taken_is_refused_with_who_has_it(world: World) -> None:
    with refused(errors.NodeExists, "'test'", "server 0", "exists already, at rank 0"):
        world.service.create_server("test", Plain(), server_id=0)


@pytest.mark.parametrize(
    ("served", "words"),
    [
        (object(), ("no public method", "pass an object with public methods, or a dict")),
        ({}, ("no public method",)),
        ({"one": 1}, ("'one': 1",)),
        ({1: len}, ("maps str to callables",)),
        (Plain, ("Plain'> is a class", "such as Plain()", "sharded=True")),
    ],
)
def test_an_object_without_methods_cannot_be_served(
    world: World, served: object, words: tuple[str, ...]
) -> None:
    with refused(errors.ConfigError, *words):
        world.service.create_server("empty", served)
    assert seen.servers(world.service) == {"test": [0]}


@pytest.fixture
def alone() -> Iterator[RpcService]:
    """A service with two servers of "who", each of which says its id."""
    with Master() as master, RpcService(master.address) as service:
        for server_id in range(2):
            service.create_server("who", {"am_i": partial(int, server_id)}, server_id)
        yield service


def test_settings_of_a_client_or_server_that_are_none_are_refused_before_there_is_one(
    alone: RpcService,
) -> None:
    made: dict[str, Any]
    for made, word in (
        ({"hedge": True}, "HedgePolicy()"),
        ({"retry": 5}, "RetryPolicy()"),
    ):
        (name,) = made
        with refused(errors.ConfigError, f"{name}={made[name]}: None or a ", word):
            alone.create_client("who", **made)
    for made, word in (
        ({"bounds": 5}, "such as Bounds()"),
        ({"inline": "x"}, "True or False"),
        ({"sharded": 1}, "True or False"),
    ):
        (name,) = made
        with refused(errors.ConfigError, f"{name}={made[name]!r}: ", word):
            alone.create_server("more", Plain(), **made)
    assert seen.servers(alone) == {"who": [0, 1]}


@pytest.mark.parametrize("key", [None, 1.5, np.float64(1.5), (1, 2), [1]], ids=repr)
def test_a_key_that_is_no_number_or_text_is_refused(alone: RpcService, key: Any) -> None:
    client = alone.create_client("who", 2)
    for verb in (client.call_by, client.submit_by):
        with refused(errors.BadArguments, f"key {key!r} is of type", "a whole number, a str"):
            verb(key, "am_i")


def test_equal_keys_have_one_owner_whatever_their_type(alone: RpcService) -> None:
    client = alone.create_client("who", 2)
    for number in range(8):
        owner = client.call_by(number, "am_i")
        assert client.call_by(np.int64(number), "am_i") == owner
        text = client.call_by(f"key {number}", "am_i")
        assert client.call_by(bytearray(b"key %d" % number), "am_i") == text


@pytest.mark.parametrize("mark", [idempotent, once, bulk])
def test_what_is_no_function_cannot_be_marked(mark: Any) -> None:
    with refused(errors.ConfigError, f"{mark.__name__}(5): a function is marked"):
        mark(5)


# -- addresses, secrets, settings ------------------------------------------------------------------


@pytest.fixture
def silent() -> Iterator[str]:
    """An address where connections are accepted and nothing is ever said."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def test_a_master_that_is_not_there_is_unreachable_at_the_deadline(world: World) -> None:
    with hold_port() as held:
        address = address_of(held)
        with refused(
            errors.MasterUnreachable,
            f"no master answers at {address}",
            "start one",
            "mend the address",
        ):
            RpcService(master=address, timeout_s=0.3)


def test_a_master_that_says_nothing_is_unreachable_in_time(world: World, silent: str) -> None:
    # what connecting left of it
    with refused(errors.MasterUnreachable, silent, "within 0.", "hangs, or is no prpc peer"):
        RpcService(master=silent, timeout_s=0.3)


@pytest.mark.parametrize(
    "address",
    [
        *("", "localhost", "127.0.0.1:", ":1", "127.0.0.1:http", "127.0.0.1:99999", "host:-1"),
        *(None, 5, b"127.0.0.1:1", ("127.0.0.1", 1)),
    ],
)
def test_an_address_that_is_none_is_named_with_what_is_expected(address: Any) -> None:
    with refused(errors.ConfigError, repr(address), "host:port expected"):
        RpcService(master=address)
    with refused(errors.ConfigError, repr(address), "host:port expected"):
        Master(address)


def test_a_host_that_does_not_exist_is_named() -> None:
    with refused(errors.MasterUnreachable, "no-such-host.invalid:1"):
        RpcService(master="no-such-host.invalid:1", timeout_s=0.5)


def test_a_taken_port_is_named_with_what_to_do(world: World) -> None:
    taken = world.master.address
    with refused(errors.AddressInUse, taken, "the port is taken", "or 0"):
        Master(taken)
    with refused(errors.AddressInUse, taken, "the port is taken", "or 0"):
        RpcService(master=taken, bind=taken)


def test_another_secret_is_refused_by_name() -> None:
    with Master(secret="the right secret") as master:
        for wrong in ("the wrong secret", NO_SECRET, None):
            with refused(
                errors.AuthenticationFailed,
                "the master",
                master.address,
                "secret",
                "PRPC_SECRET_FILE",
            ):
                RpcService(master=master.address, secret=wrong)
        with RpcService(master=master.address, secret=b"the right secret") as service:
            service.create_server("test", Plain())
            assert service.create_client("test").call("echo", 1) == 1
    with Master() as master, refused(errors.AuthenticationFailed, "the master"):
        RpcService(master=master.address, secret="an unwanted secret")


def test_listening_to_other_hosts_takes_a_secret(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for address in ("0.0.0.0:0", "[::]:0", "example.org:0"):
        with refused(
            errors.ConfigError,
            "refusing to listen",
            "without a secret of the job",
            "PRPC_SECRET_FILE",
            "127.0.0.1",
        ):
            Master(address)
        with refused(errors.ConfigError, "refusing to listen", "without a secret"):
            RpcService(master=world.master.address, bind=address)
    monkeypatch.setenv("PRPC_SECRET", "a secret of this test")
    with Master("0.0.0.0:0"):
        pass


def test_a_core_that_does_not_exist_is_named_with_those_that_do(world: World) -> None:
    before = os.sched_getaffinity(0)
    for core in (4096, -1, "one"):
        with refused(errors.ConfigError, f"pin={core!r}", str(usable_cores())):
            RpcService(master=world.master.address, pin=core)  # type: ignore[arg-type]
    assert os.sched_getaffinity(0) == before


def test_a_pinned_thread_is_let_go_at_close(world: World) -> None:
    before = os.sched_getaffinity(0)
    core = min(before)
    with RpcService(master=world.master.address, pin=core):
        assert os.sched_getaffinity(0) == {core}
    assert os.sched_getaffinity(0) == before
    with refused(errors.MasterUnreachable):
        RpcService(master="127.0.0.1:1", pin=core, timeout_s=0.1)
    assert os.sched_getaffinity(0) == before, "also when it could not be made"


@pytest.mark.parametrize("transports", [["nonsense"], ["shm", "nonsense"], []])
def test_unknown_transports_are_refused_with_those_there_are(
    world: World, transports: list[str]
) -> None:
    with refused(errors.ConfigError, f"transports={transports!r}", "shm, unix, verbs, tcp"):
        RpcService(master=world.master.address, transports=transports)


@pytest.mark.parametrize("shards", [-1, 1000, 1.5, "2", True])
def test_an_impossible_number_of_shards_is_refused_with_the_bounds(
    world: World, shards: Any
) -> None:
    with refused(errors.ConfigError, f"shards={shards!r}", "from 0 to 64"):
        RpcService(master=world.master.address, shards=shards)


# -- peers that break the protocol -----------------------------------------------------------------


def authenticated_socket(address: str) -> socket.socket:
    """Connected over tcp and past the handshake, as a process of this user."""
    host, port = address.rsplit(":", 1)
    sock = socket.create_connection((host, int(port)), PATIENCE_S)
    exchange = Connector(secret_from(None), 1, 1, secrets.token_bytes(32))
    sock.sendall(exchange.start())
    answer = sock.recv(HELLO.size + PROOF_BYTES, socket.MSG_WAITALL)
    sock.sendall(exchange.feed(answer))
    exchange.feed(sock.recv(1))
    return sock


def hung_up(sock: socket.socket) -> bool:
    """Whether the other side ends the connection within the socket's patience."""
    with contextlib.suppress(ConnectionError):
        while sock.recv(4096):
            pass
    return True


@pytest.mark.parametrize(
    "frame",
    [
        struct.pack("<IHH", DEFAULT_LIMITS.body_bytes_max + 1, 0, 1),
        struct.pack("<IHH", 0xFFFFFFFF, 0, 1),
        struct.pack("<IHHQ", 24, 1, 1, 1 << 50),
        struct.pack("<IHH", 24, 0xFFFF, 1),
        struct.pack("<IHH", 24, 0, 77),
        struct.pack("<IHH", 3, 0, 1) + b"???",
        struct.pack("<IHH", 24, 0, 1) + bytes(24),
    ],
    ids=[
        "body over the limit",
        "largest body",
        "block over the limit",
        "too many blocks",
        "version",
        "short message",
        "kind",
    ],
)
def test_a_frame_that_breaks_the_protocol_ends_that_connection_only(frame: bytes) -> None:
    with Master() as master, RpcService(master=master.address, transports=["tcp"]) as service:
        service.create_server("test", Plain())
        for address in (master.address, service.address):
            with authenticated_socket(address) as sock:
                sock.sendall(frame)
                assert hung_up(sock)
        assert service.create_client("test").call("echo", 1) == 1


def test_a_peer_that_begins_with_something_else_is_hung_up_on() -> None:
    patient = Limits(handshake_s=3600.0)
    with (
        Master(limits=patient) as master,
        RpcService(master=master.address, transports=["tcp"], limits=patient) as service,
    ):
        for address in (master.address, service.address):
            host, port = address.rsplit(":", 1)
            with socket.create_connection((host, int(port)), PATIENCE_S) as sock:
                sock.sendall(b"GET / HTTP/1.1\r\nHost: somewhere-or-other.example.org\r\n\r\n")
                assert hung_up(sock)
        assert service.rank == 0


def test_a_peer_that_never_proves_itself_is_cut_in_time() -> None:
    with Master(limits=Limits(handshake_s=0.2)) as master:
        host, port = master.address.rsplit(":", 1)
        with socket.create_connection((host, int(port)), PATIENCE_S) as sock:
            sock.sendall(b"PRPC")
            assert hung_up(sock)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_what_is_over_our_own_limits_is_refused_before_it_is_sent(transport: str) -> None:
    with (
        Master() as master,
        RpcService(master=master.address, transports=[transport]) as serving,
        RpcService(master=master.address, transports=[transport], limits=SMALL) as service,
    ):
        serving.create_server("test", Plain())
        client = service.create_client("test")
        for value in ("x" * 200_000, [np.zeros(1)] * 9, np.zeros(1_000_000)):
            with refused(
                errors.BadArguments,
                "'echo' was not sent to server 0 of 'test'",
                transport,
                "allowed",
            ):
                client.call("echo", value)
        assert client.call("echo", 1) == 1


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_what_is_over_the_servers_limits_ends_the_connection_and_a_new_one_works(
    transport: str,
) -> None:
    with (
        Master() as master,
        RpcService(master=master.address, transports=[transport], limits=SMALL) as serving,
        RpcService(master=master.address, transports=[transport]) as service,
    ):
        serving.create_server("test", Plain())
        client = service.create_client("test")
        for value in ("x" * 2_000_000, [np.zeros(1)] * 9, np.zeros(1_000_000)):
            with refused(
                errors.MaybeExecuted, "'echo' was sent to server 0 of 'test'", "the peer was lost"
            ):
                client.call("echo", value, timeout_s=BOUND_S)
            wait_until(lambda: client.call("echo", 1, timeout_s=BOUND_S) == 1)


def test_a_result_over_the_servers_limits_is_an_error_of_the_server() -> None:
    with (
        Master() as master,
        RpcService(master=master.address, limits=SMALL) as serving,
        RpcService(master=master.address) as service,
    ):
        serving.create_server("test", {"much": lambda: "x" * 200_000, "little": lambda: 1})
        client = service.create_client("test")
        with refused(
            errors.RemoteError,
            "'much' of server 0 of 'test'",
            "cannot be sent",
            "at most 100000 allowed",
        ):
            client.call("much")
        assert client.call("little") == 1


def test_a_secret_file_that_cannot_be_read_or_is_empty_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "secret"
    monkeypatch.setenv("PRPC_SECRET_FILE", str(path))
    with refused(errors.ConfigError, f"PRPC_SECRET_FILE={str(path)!r}", "cannot be read"):
        Master()
    path.write_text("\n")
    with refused(errors.ConfigError, "is empty"):
        Master()

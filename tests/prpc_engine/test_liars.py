"""A member of the job that breaks the rules of calls: the service stays up, other clients are
served, and the log stays short.
"""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from prpc_engine import Master, RpcClient, RpcService, archive, errors
from prpc_engine.rpc.message import (
    CANCEL,
    CREDIT,
    END,
    FAILURE,
    HEADER,
    ITEM,
    NOTIFY,
    OPEN,
    REPEAT,
    REPLY,
    REQUEST,
    SIDE_SHIFT,
    STATUS_SHIFT,
    Status,
    method_key,
)
from prpc_engine.rpc.peer import Peer
from prpc_engine.settings.config import secret_from
from shard import Connection, ShardError, ShmTransport, Slab, TcpTransport
from shard import Node as Identity
from tests.connecting import connect
from tests.prpc_engine.handlers import Handlers
from tests.prpc_engine.inside import node_of
from tests.prpc_engine.processes import PATIENCE_S, wait_until

METHODS = (
    "echo",
    "add",
    "rows",
    "rows_async",
    "echo_async",
    "count_items",
    "nap",
    "no such method",
)
INCARNATIONS = itertools.count(1 << 40)


class World:
    """A service with a server, an honest client, and what lies to it."""

    def __init__(self, transport: str, master: Master) -> None:
        self.transport = transport
        self.serving = RpcService(master=master.address, transports=[transport])
        self.honest_service = RpcService(master=master.address, transports=[transport])
        self.serving.create_server("test", Handlers(self.serving))
        self.client: RpcClient = self.honest_service.create_client("test")
        self.target = next(
            target for target, one in node_of(self.serving).servers.items() if one.service == "test"
        )
        self.slab = Slab()

    def lie(self) -> Connection[Any]:
        """One more connection, past its handshake; nobody reads what comes over it."""
        known = set(node_of(self.serving).peers())
        node = Identity(
            secret=secret_from(None),
            incarnation=next(INCARNATIONS),
            limits=node_of(self.serving).limits,
        )
        make = ShmTransport if self.transport == "shm" else TcpTransport
        address = next(
            one.address
            for one in node_of(self.serving)._listeners
            if one.address.startswith(self.transport)
        )
        connection = connect(make(node, self.slab), address, PATIENCE_S)
        wait_until(lambda: set(node_of(self.serving).peers()) - known, "the connection")
        (self.peer,) = set(node_of(self.serving).peers()) - known
        return connection

    def is_served(self) -> bool:
        return bool(self.client.call("add", 1, timeout_s=PATIENCE_S) == 11)

    def close(self) -> None:
        self.honest_service.close()
        self.serving.close()
        self.slab.close()


@pytest.fixture(params=["shm", "tcp"])
def world(request: pytest.FixtureRequest, master: Master) -> Iterator[World]:
    made = World(request.param, master)
    yield made
    made.close()


def said_badly(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        one.message
        for one in caplog.records
        if one.exc_info or "turn failed" in one.message or "Traceback" in one.message
    ]


def sends(connection: Connection[Any], body: bytes, blocks: list[Any] | None = None) -> bool:
    """False when it is hung up on, or not read."""
    try:
        connection.send(body, blocks or [])
    except ShardError:
        return False
    return True


def is_closed(world: World, peer: Peer) -> None:
    wait_until(lambda: peer.lost, "the end of the liar's connection")


class AnyRoute:
    target = 7


@pytest.mark.parametrize("seed", range(4))
def test_whatever_kinds_numbers_and_values_a_member_sends_others_are_served(
    world: World, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    chance = random.Random(seed)
    encode = archive.Archive().encode
    values = [
        [],
        [1],
        [1, 2],
        ["x", "y", "z"],
        5,
        {"a": 1},
        None,
        b"bytes",
        [[1, 2], {"k": (1,)}],
        [np.zeros(10)],
        [1, "text", None],
        ["name", "text", 3],
    ]
    payloads = [encode(value) for value in values]
    connection, peer = world.lie(), world.peer
    asked: list[Any] = []
    for number in range(1500):
        if peer.lost:
            connection.close()
            connection, peer = world.lie(), world.peer
            asked = []
        if number % 20 == 0 and not peer.lost:
            try:
                asked.append(peer.request(AnyRoute(), "add", method_key("add"), (1,), 5.0, False))
            except errors.RpcError:
                continue
        kind = chance.choice(
            [REQUEST, NOTIFY, REPLY, FAILURE, CANCEL, OPEN, ITEM, CREDIT, END, REPEAT, 0, 11, 255]
        )
        target = chance.choice([world.target, 0, 1, 0xFFFF_FFFF, chance.randrange(20)])
        call_id = chance.choice(
            [0, 1, 2, (1 << 64) - 1, chance.randrange(1 << 16)]
            + [call.call_id for call in asked[-3:]]
        )
        key = method_key(chance.choice(METHODS))
        status = chance.choice([*Status, 0, 99])
        header = HEADER.pack(
            kind | chance.choice([0, 1, 2, 255]) << SIDE_SHIFT | status << STATUS_SHIFT,
            target,
            call_id,
            key,
            chance.choice([0, 1, 5000]),
        )
        body, blocks = chance.choice(payloads)
        if chance.random() < 0.2:
            body = body[: chance.randrange(len(body) + 1)] + chance.randbytes(chance.randrange(8))
        sends(
            connection,
            (header + body)[: chance.choice([1, 23, 24, 1 << 20, 1 << 20, 1 << 20])],
            list(blocks),
        )
    for call in asked:
        call.error(PATIENCE_S)
    assert world.is_served()
    assert said_badly(caplog) == []
    connection.close()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        bytes(23),
        HEADER.pack(0, 0, 1, 0, 0),
        HEADER.pack(200, 0, 1, 0, 0),
    ],
)
def test_what_is_no_message_ends_its_connection_with_one_line_at_most(
    world: World, body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    connection, peer = world.lie(), world.peer
    assert sends(connection, body or b"x")
    is_closed(world, peer)
    assert world.is_served()
    assert len([one for one in caplog.records if one.levelno >= logging.WARNING]) <= 1
    connection.close()


@pytest.mark.parametrize(
    "texts", [5, None, [], ["a"], [1, 2, 3], ["a", "b", None], [["x"], "b", "c"]]
)
def test_a_failure_whose_texts_are_none_ends_its_call_by_name(
    world: World, texts: Any, caplog: pytest.LogCaptureFixture
) -> None:
    connection, peer = world.lie(), world.peer
    call = peer.request(AnyRoute(), "add", method_key("add"), (1,), PATIENCE_S, False)
    body, _ = archive.Archive().encode(texts)
    sends(
        connection,
        HEADER.pack(FAILURE | Status.HANDLER_RAISED << STATUS_SHIFT, 0, call.call_id, 0, 0) + body,
    )
    assert "cannot be read" in str(call.error(PATIENCE_S))
    assert not peer.lost
    assert world.is_served()
    assert said_badly(caplog) == []
    connection.close()


def test_answers_to_calls_that_were_never_made_are_counted_and_dropped(world: World) -> None:
    connection, peer = world.lie(), world.peer
    body, _ = archive.Archive().encode(1)
    for number in range(100):
        sends(connection, HEADER.pack(REPLY, 0, number, 0, 0) + body)
    wait_until(lambda: peer.statistics().replies_dropped == 100)
    assert world.is_served()
    connection.close()


def test_a_flood_of_notifications_that_fail_and_of_answers_that_nobody_reads_is_a_few_lines(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    connection, peer = world.lie(), world.peer
    body, _ = archive.Archive().encode([1])
    notify = HEADER.pack(NOTIFY, world.target, 0, method_key("no such method"), 0) + body
    sent = 0
    while sent < 20_000 and sends(connection, notify):
        sent += 1
    wait_until(
        lambda: peer.statistics().traffic.bytes_received >= sent * len(notify), "all of them"
    )
    assert sent > 1000
    assert 0 < len([one for one in caplog.records if one.levelno >= logging.WARNING]) < 30
    assert world.is_served()
    connection.close()

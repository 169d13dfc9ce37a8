"""Where a task is reached: what listens for it, on one reactor that whoever waits turns
(shard/loop/driver.py) and one slab.

    node      listens at                                    serves
    data      shared memory, and tcp by the rule of         receive, abort
              endpoint_map.py: its address, or any port
    control   tcp, the task's address in the cluster        hello, describe

Both live in this process. Communication shards (relay.py) take the answers over tcp out of it,
where somebody asks for them; they share the data port.

    setting    without shards: the thread in run(), and else the progress thread  with shards
    polling    run(), and threads that wait, never sleep; the progress thread     that, and shards
               does, as it would keep the interpreter from threads that compute   never sleep
    pin_cores  both stay on one core                                              each shard stays
                                                                                  on one of its own
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from prpc_engine import errors
from prpc_engine.cluster.config import ServerConfig
from prpc_engine.cluster.control import (
    CONTROL_TARGET,
    DATA_TARGET,
    DESCRIBE,
    HELLO,
    Facts,
    ToldTasks,
    check_plan,
)
from prpc_engine.cluster.relay import Relays
from prpc_engine.master.master import close_in_reactor
from prpc_engine.node import slab
from prpc_engine.node.node import Node
from prpc_engine.rpc.method import ENGINE
from prpc_engine.rpc.peer import Peer
from prpc_engine.rpc.server import ServedObject as Methods
from prpc_engine.service.cores import take_cores
from prpc_engine.service.shard_statistics import ShardFigures
from prpc_engine.service.starting import asked_for_shards, refuse_in_import
from prpc_engine.settings.address import Address
from prpc_engine.settings.config import check_environment, wildcard_for
from prpc_engine.settings.node_config import NodeConfig
from shard import Driver, pin, restore

LINGER_S = 0.2  # at close(), for receivers to drop arrays that we lent them

logger = logging.getLogger("prpc")


@dataclass(frozen=True)
class Place:
    """The settings of a task's endpoint: who it is, where it listens, by which transports, with
    which secret and how many shards.
    """

    task: str
    plan: str
    control: Address
    data: Address  # port 0: any
    config: NodeConfig
    tasks: ToldTasks = ()  # of the cluster, for who asks for them


def node_config(config: ServerConfig, role: str, tasks: int) -> NodeConfig:
    """What the user, the environment and the file say: the task's job, and how many tasks the
    cluster has. Raises ConfigError.
    """
    check_environment()
    return NodeConfig.load(
        role,
        tasks,
        shards=config.shards,
        transports=config.transports,
        secret=config.secret,
        limits=config.limits,
        tls=config.tls,
        connection_timeout_s=config.connection_timeout_s,
        endpoint_map_folder=config.endpoint_map_folder,
        data_port_offset=config.data_port_offset,
        flow_control_max=config.tensors_max,
        tensor_fuse=config.tensor_fuse,
    )


def place_from(
    task: str,
    plan: str,
    control: Address,
    data: Address | None,
    config: ServerConfig,
    node: NodeConfig,
) -> Place:
    """Where a task listens, and with which shards. Raises ConfigError."""
    for line in node.notes:
        logger.warning("%s", line)
    needed = {"shm", "tcp"}
    if node.shards.count and not needed <= set(node.node.transports):
        asked = (
            f"{node.shards.count} communication shards were asked for "
            f"({node.origins['shards.count']}): they need shared memory and tcp, "
            f"and transports are {', '.join(node.node.transports)}"
        )
        if config.shards is not None:
            raise errors.ConfigError(f"{task}: {asked}; name both, or leave the shards out")
        logger.warning("%s has none: %s; its own process answers", task, asked)
        node = node.override(shards=0)
    return Place(task, plan, control, data or replace(control, port=0), node)


class Endpoint:
    """Listens at a task's data and control address, and starts its communication shards where some
    are asked for.

    place         what to listen at, and how
    methods       what other tasks may ask of the data node, by name; answered from serve() on
    on_peer_lost  called with each peer of the data node whose connection is over, in the reactor's
                  thread

    Owned by a Server, which closes it. Raises AddressInUse, ConfigError. Nodes and settings: the
    tables at the file's head.
    """

    def __init__(
        self,
        place: Place,
        methods: Mapping[str, Callable[..., Any]],
        on_peer_lost: Callable[[Peer], None],
    ) -> None:
        refuse_in_import(f"the Server of {place.task} is started")
        self._place = place
        self._methods = methods
        self._relays: Relays | None = None
        self._core: int | None = None  # of this process's communication threads
        self.driver = driver = Driver(place.config.shards.polling, "prpc-server", engine=ENGINE)
        with contextlib.ExitStack() as closing:
            closing.callback(driver.close)
            self.data = self._node("data", place.config.node.transports, place.data)
            closing.callback(close_in_reactor, driver, self.data)
            self.data.on_peer_lost = on_peer_lost
            incarnation = int(self.data.addresses[0].rpartition("/")[2], 16)
            self.me = Facts(place.plan, place.task, incarnation, tuple(self.data.addresses))
            self.control = self._node("control", ("tcp",), place.control)
            closing.callback(driver.reactor.call_soon, self.control.close)
            shards = place.config.shards
            if shards.count:
                with asked_for_shards(place.config):
                    self._relays = Relays(shards, driver)
                closing.callback(self._relays.close)
                host = _listening_host(place.data.host)
                port = int(self.data.address("tcp").rpartition(":")[2])
                self._relays.serve(
                    place.task, self.data, methods, place.config, Address(host, port)
                )
            elif shards.pin_cores:
                locks = take_cores(0)
                closing.callback(locks.close)
                for self._core in locks.cores:
                    driver.pin(self._core)
            self._closing = closing.pop_all()
        self.address = replace(
            place.control, port=int(self.control.address("tcp").rpartition(":")[2])
        )

    def _node(self, what: str, transports: Sequence[str], address: Address) -> Node:
        place = self._place
        text = f"{place.task} cannot listen for {what} at {address}"
        listening = Address(_listening_host(address.host), address.port)
        config = place.config.listening_at(listening, transports)
        if what == "control":  # its messages are all small
            config = config.limited_to(replace(config.limits, connections_per_peer=1))
        try:
            return Node(self.driver.reactor, self.driver, slab.default_slab(), config)
        except errors.AddressInUse as error:
            raise errors.AddressInUse(
                f"{text}: the port is taken; end who has it (ss -ltnp names it), "
                "perhaps an earlier run of this task, or give "
                "all tasks a cluster or .endpoint_map with another"
            ) from error
        except errors.ConfigError as error:
            raise errors.ConfigError(f"{text}: {error}") from error

    def serve(self) -> None:
        """Answer. Who came before finds no service, and asks again (link.py)."""
        allow = self._place.config.allow
        if self._methods:
            self.data.servers[DATA_TARGET] = Methods(
                "data", 0, DATA_TARGET, self._methods, allow=allow, inline=True
            )
        methods = {HELLO: self._hello, DESCRIBE: self._describe}
        self.control.servers[CONTROL_TARGET] = Methods(
            "control", 0, CONTROL_TARGET, methods, allow=allow, inline=True
        )
        self.driver.take_over()
        # failpoint: endpoint.serving

    def run(self, timeout_s: float | None) -> None:
        """Answer from this thread, for `timeout_s` seconds at most or until
        driver.stop_running().
        """
        before = None if self._core is None else pin(self._core)
        try:
            self.driver.run(timeout_s)
        finally:
            if before is not None:
                restore(before)

    @property
    def living_shards(self) -> int:
        """How many communication shards there are now."""
        return self._relays.living if self._relays is not None else 0

    @property
    def shard_connections(self) -> tuple[int, ...]:
        """How many connections each of them has."""
        return self._relays.connections() if self._relays is not None else ()

    def figures_of_shards(self, timeout_s: float) -> tuple[ShardFigures, ...]:
        """What each shard did, in order; () without shards. Waits for `timeout_s` seconds at most,
        for all of them.
        """
        return self._relays.figures(timeout_s) if self._relays is not None else ()

    def is_connected(self, incarnation: int) -> bool:
        """Whether a process has a connection for data here, by its incarnation."""
        return any(
            peer.connection.peer_incarnation == incarnation and not peer.lost
            for peer in self.data.peers()
        )

    def _hello(self, plan: str, task: str, incarnation: int) -> list[Any]:
        me = self.me
        try:
            check_plan(me.plan, me.task, plan, task)
        except errors.ConfigError as error:
            logger.warning("%s", str(error))  # who asked compares too, and fails
        return [me.plan, me.task, me.incarnation, list(me.data)]

    def _describe(self) -> list[Any]:
        return [self._place.plan, self._place.task, self._place.tasks]

    def close(self) -> None:
        """End the shards, hang up on everybody."""
        self._closing.close()
        self.data.slab.wait_for_readers(LINGER_S)


def _listening_host(host: str) -> str:
    """All addresses of this host, as a cluster's name for it may be none of them; but a loopback
    one stays what it is.
    """
    if host == "localhost" or host.startswith("127.") or host == "::1":
        return host
    return wildcard_for(host)

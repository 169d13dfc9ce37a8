"""The node that all queues of this process share: one reactor and one progress thread, whatever the
number of queues (vLLM's executor has one to its workers, and one from each of them).

    it listens at                    for
    127.0.0.1, and in shared memory  queues whose readers are on this host, and readers
    an address of this host          queues that have readers on others

Made with the first queue there, closed with the last.
"""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from prpc_engine.archive import Archive
from prpc_engine.errors import ConfigError
from prpc_engine.master.master import close_in_reactor
from prpc_engine.node.node import Node
from prpc_engine.node.slab import default_slab
from prpc_engine.rpc.method import ENGINE
from prpc_engine.rpc.server import ServedObject
from prpc_engine.settings.address import Address
from prpc_engine.settings.config import check_environment
from prpc_engine.settings.network import DEFAULT
from prpc_engine.settings.node_config import NodeConfig
from shard import Driver, runtime

LOOPBACK = "127.0.0.1"
SERVICE = "vllm-queue"
FIRST_TARGET = 64  # of a node that serves nothing else
READERS_S = 0.2  # at the end, for other processes to drop what they read of our memory
PICKLE = "node.allow_pickle"


class QueueNode:
    """One of them. Thread-safe. Raises ConfigError, AddressInUse."""

    def __init__(self, host: str) -> None:
        check_environment()
        config = NodeConfig.load()
        # Any object travels, as with vLLM's own: who holds the secret is trusted with that, unless
        # the configuration says otherwise.
        allow_pickle = config.node.allow_pickle
        if config.origins[PICKLE] == DEFAULT:
            allow_pickle = bool(config.secret)
        self.archive = Archive(allow_pickle=allow_pickle, limits=config.limits)
        self._config = config
        self.host = host
        self.pid = runtime.pid()
        self.driver = driver = Driver(config.shards.polling, "prpc-queues", engine=ENGINE)
        try:
            self.node = Node(driver.reactor, driver, default_slab(), _config_for(host, config))
        except BaseException:
            driver.close()
            raise
        self._targets = itertools.count(FIRST_TARGET)

    @property
    def addresses(self) -> list[str]:
        """Where other processes reach it, and this one."""
        return self.node.addresses

    def serve(self, methods: Mapping[str, Any]) -> int:
        """One end of a queue from now on; its target number."""
        target = next(self._targets)
        self.node.servers[target] = ServedObject(
            SERVICE, 0, target, methods, allow=self._config.allow, inline=True
        )
        return target

    def withdraw(self, target: int) -> None:
        """That end is no more."""
        self.node.servers.pop(target, None)

    def close(self) -> None:
        """Hang up on everybody."""
        close_in_reactor(self.driver, self.node)
        default_slab().wait_for_readers(READERS_S)


class QueueNodes:
    """Those of this process, by the host that they listen at."""

    def __init__(self) -> None:
        # Of the table: queues are made and shut down in any thread.
        self._guard = runtime.Lock()
        self._nodes: dict[str, tuple[QueueNode, int]] = {}

    def acquire(self, host: str = LOOPBACK) -> QueueNode:
        """The one there, for a queue; release() it. Raises as QueueNode()."""
        with self._guard:
            node, queues = self._nodes.get(host, (None, 0))
            if node is None:
                node = QueueNode(host)
            self._nodes[host] = node, queues + 1
            return node

    def release(self, node: QueueNode) -> None:
        """A queue needs it no more; with the last one it is closed."""
        with self._guard:
            known, queues = self._nodes.get(node.host, (None, 0))
            if known is not node:
                return
            if queues > 1:
                self._nodes[node.host] = node, queues - 1
                return
            del self._nodes[node.host]
        node.close()


def queue_nodes() -> QueueNodes:
    """This process's; one made by fork() has its own."""
    return runtime.own("vllm queues", QueueNodes)


def this_host() -> str:
    """Its name, for texts."""
    return socket.gethostname()


def outward_host() -> str:
    """The address of this host that others reach, as vLLM finds it: VLLM_HOST_IP, else that of the
    interface which leads out. Raises ConfigError where none does.
    """
    named = os.environ.get("VLLM_HOST_IP", "")
    if named:
        return named
    # a datagram socket sends nothing when it is connected
    for family, far in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as sock:
                sock.connect((far, 9))
                return str(sock.getsockname()[0])
        except OSError:
            continue
    raise ConfigError(
        "this host has no address that leads out: pass connect_ip, or set VLLM_HOST_IP"
    )


def _config_for(host: str, config: NodeConfig) -> NodeConfig:
    """One lane: items keep their order. Tcp is there, since readers dial it, too."""
    names = config.node.transports
    names = names if "tcp" in names else (*names, "tcp")
    limits = replace(config.limits, connections_per_peer=1)
    return config.listening_at(Address(host, 0), names).limited_to(limits)

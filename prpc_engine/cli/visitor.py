"""A node of a command that looks at others: it calls, and nobody calls it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

from prpc_engine.master.master import close_in_reactor
from prpc_engine.node.node import Node
from prpc_engine.settings.address import Address
from prpc_engine.settings.config import check_environment
from prpc_engine.settings.node_config import NodeConfig
from shard import Driver, Slab


@contextlib.contextmanager
def visiting_node(name: str, config: NodeConfig) -> Iterator[Node]:
    """Closed at the end. `name`: of its thread. It listens at this host's own address, whatever the
    settings say. Raises ConfigError.
    """
    check_environment()
    driver, slab = Driver(False, name, math.inf), Slab()  # no stalls: nobody's handlers run here
    try:
        node = Node(driver.reactor, driver, slab, config.listening_at(Address("127.0.0.1", 0)))
        try:
            yield node
        finally:
            close_in_reactor(driver, node)
    finally:
        driver.close()
        slab.close()

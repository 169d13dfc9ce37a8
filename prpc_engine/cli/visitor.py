"""A node of a command that looks at others: it calls, and nobody calls it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

from prpc_engine.master.master import close_in_reactor
from prpc_engine.node.node import Node
from prpc_engine.settings.config import check_environment, limits_from
from shard import Driver, Slab


@contextlib.contextmanager
def visiting_node(name: str, transports: tuple[str, ...], secret: bytes) -> Iterator[Node]:
    """Closed at the end. `name`: of its thread. Raises ConfigError."""
    check_environment()
    driver, slab = Driver(False, name, math.inf), Slab()  # no stalls: nobody's handlers run here
    try:
        node = Node(
            driver.reactor, driver, slab, secret, limits_from(None), transports, "127.0.0.1", 0
        )
        try:
            yield node
        finally:
            close_in_reactor(driver, node)
    finally:
        driver.close()
        slab.close()

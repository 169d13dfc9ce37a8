"""Memory that a process holds under names, for other processes to fetch: one copy in the slab,
however many readers.

    hold(name, blocks)       each block is kept in the slab: copied into it, unless it is there
    fetch(holder, name)      of another process: over shared memory the very blocks, lent until the
                             last array on them is dropped; over tcp a copy of them
    let_go(name)             what is lent stays for as long as somebody reads it

    the other process         fetch() and wait()
    has let go of the name    raise Missing
    is not reached, or lost   ask again, ATTEMPTS times in all: nothing is done twice by that; then
                              raise what the last one met

There is no master: whoever holds something tells who it is along with the name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from prpc_engine import errors
from prpc_engine.client.shared_message import owned_block
from prpc_engine.master.master import close_in_reactor
from prpc_engine.node.held_values import FETCH, FETCH_KEY, TARGET, HeldValues
from prpc_engine.node.node import Node
from prpc_engine.node.slab import default_slab
from prpc_engine.rpc.call import Call
from prpc_engine.rpc.fixed_route import FixedRoute
from prpc_engine.rpc.method import ENGINE
from prpc_engine.settings.config import check_environment
from prpc_engine.settings.node_config import NodeConfig
from shard import Driver, runtime

CONNECT_TIMEOUT_S = 10.0  # for one address
ATTEMPTS = 3
Blocks = Sequence[NDArray[np.uint8]]


class Missing(errors.RpcError):
    """Nothing is held there under that name, or not any more."""


class HolderProcess(NamedTuple):
    """The process that holds something; travels beside its name, pickled."""

    addresses: tuple[str, ...]
    process: str  # for errors


class Fetch:
    """One under way: HeldArrays.wait() brings what it asks for."""

    def __init__(self, holder: HolderProcess, name: str) -> None:
        self.holder, self.name = holder, name
        self.attempts = 0
        self.call: Call | None = None
        self.is_cancelled = False


class HeldArrays:
    """What this process holds, and its way to what others do. Thread-safe. Owned by who made it;
    close() ends its threads, and what it holds is there no more.

    config  all settings; None: of the file that PRPC_CONFIG names, and the environment

    Raises ConfigError, AddressInUse.
    """

    def __init__(self, config: NodeConfig | None = None) -> None:
        check_environment()
        config = config or NodeConfig.load()
        with contextlib.ExitStack() as closing:
            self._driver = driver = Driver(config.shards.polling, "prpc-ray", engine=ENGINE)
            closing.callback(driver.close)
            self._node = node = Node(driver.reactor, driver, default_slab(), config)
            closing.callback(close_in_reactor, driver, node)
            self._held = HeldValues(node, "ray", config.allow)
            self._held.serve()
            driver.take_over()
            self._closing = closing.pop_all()
        self.holder = HolderProcess(
            tuple(one for one in node.addresses if not one.startswith("memory://")),
            f"process {runtime.pid()}",
        )

    def hold(self, name: str, blocks: Blocks) -> None:
        """Hold these; the caller may change them at once, but for memory of prpc_engine.empty().
        What was held under that name is let go of.
        """
        slab = default_slab()
        self._held.hold(name, [owned_block(block, slab, may_lend=True) for block in blocks])

    def let_go(self, name: str) -> None:
        """Again: does nothing."""
        self._held.let_go(name)

    @property
    def names(self) -> list[str]:
        """What is held."""
        return self._held.names

    def fetch(self, holder: HolderProcess, name: str) -> Fetch:
        """Begin to; wait() for it. Connecting may take CONNECT_TIMEOUT_S an address. Raises as
        wait().
        """
        fetch = Fetch(holder, name)
        self._ask(fetch)
        return fetch

    def wait(self, fetch: Fetch, timeout_s: float | None) -> list[NDArray[np.uint8]]:
        """The blocks. Raises Missing, DeadlineExceeded, Cancelled after cancel(), and
        NotSent or MaybeExecuted where the other process cannot be reached, or was lost.
        """
        deadline = None if timeout_s is None else runtime.monotonic() + timeout_s
        while True:
            call = fetch.call
            assert call is not None, "fetch() has asked"
            if not self._driver.wait_until(call, deadline):
                raise errors.DeadlineExceeded(
                    f"{fetch.name!r} did not come from {fetch.holder.process} within "
                    f"{timeout_s:.3g} s"
                )
            error = call.error()
            if error is None:
                return [_checked(block, fetch) for block in call.result()]
            if isinstance(error, errors.RemoteError):
                raise Missing(
                    f"{fetch.holder.process} holds nothing under {fetch.name!r}, or not any more"
                ) from error
            is_lost = isinstance(error, errors.NotSent | errors.MaybeExecuted)
            if not is_lost or fetch.is_cancelled or fetch.attempts >= ATTEMPTS:
                raise error
            self._ask(fetch)

    def cancel(self, fetch: Fetch) -> None:
        """Whoever waits for it gets Cancelled. From any thread."""
        fetch.is_cancelled = True
        if fetch.call is not None:
            fetch.call.cancel()

    def _ask(self, fetch: Fetch) -> None:
        holder = fetch.holder
        route = FixedRoute(TARGET, holder.process)
        while True:
            fetch.attempts += 1
            try:
                peer = self._node.near_peer(holder.addresses) or self._node.peer_at(
                    holder.addresses, CONNECT_TIMEOUT_S, holder.process
                )
                fetch.call = peer.request(route, FETCH, FETCH_KEY, (fetch.name,), None, True)
            except errors.NotSent:
                if fetch.attempts >= ATTEMPTS:
                    raise
            else:
                return

    def close(self) -> None:
        """Again: does nothing."""
        self._held.clear()
        self._closing.close()


def _checked(block: Any, fetch: Fetch) -> NDArray[np.uint8]:
    if not isinstance(block, np.ndarray) or block.dtype != np.uint8 or block.ndim != 1:
        raise errors.RpcError(
            f"{fetch.holder.process} answered for {fetch.name!r} with no memory: is it of another "
            "release?"
        )
    return block

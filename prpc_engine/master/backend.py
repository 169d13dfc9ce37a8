"""Who answers a MasterClient's verbs: a session at our master, or whatever else has the face of a
Backend.
"""

from __future__ import annotations

from typing import Any, Protocol

from prpc_engine import errors
from prpc_engine.dropped import close_dropped
from prpc_engine.master.master import CLOSE_TIMEOUT_S, close_in_reactor, master_error
from prpc_engine.master.namespace import check_root
from prpc_engine.master.protocol import host_and_port
from prpc_engine.master.session import MasterSession, check_lease
from prpc_engine.master.watch import Callback, Watches
from prpc_engine.node.node import Node
from prpc_engine.rpc.method import ENGINE
from prpc_engine.settings.address import Address
from prpc_engine.settings.config import check_timeout
from prpc_engine.settings.node_config import NodeConfig
from shard import Driver, Future, Limits, Slab, runtime


class Backend(Protocol):
    """What a MasterClient stands on: who answers the verbs. Ours is TcpBackend; one for ZooKeeper
    would compose them.
    """

    @property
    def address(self) -> str:
        """For texts."""

    @property
    def connected(self) -> bool:
        """Whether there is a connection with a session now."""

    def ask(self, verb: str, *arguments: Any, timeout_s: float) -> Any:
        """One verb (see methods.py); raises the errors of prpc_engine.errors, soon after
        `timeout_s` at the latest.
        """

    def submit(self, verb: str, *arguments: Any, timeout_s: float) -> Future:
        """The future of the same: nobody waits."""

    def watch(self, path: str, callback: Callback, timeout_s: float, existing: bool) -> int:
        """Call callback(event) for each change of the node and all below it; the handle for
        unwatch().

        existing  begin with an event for each node there is

        Raises as ask().
        """

    def unwatch(self, handle: int) -> bool:
        """No callback of that watch begins after this; whether there was one."""

    def close(self) -> None:
        """End the session. A second close does nothing."""


class SessionBackend:
    """A backend on a session that somebody else owns, such as an RpcService's: `owner`, who is not
    dropped while this is held.
    """

    def __init__(self, session: MasterSession, owner: object = None) -> None:
        self._session = session
        self._owner = owner
        self._watches = Watches(session)

    @property
    def address(self) -> str:
        """host:port of the master."""
        return self._session.address

    @property
    def connected(self) -> bool:
        """Whether there is a connection with a session now."""
        return self._session.connected

    def ask(self, verb: str, *arguments: Any, timeout_s: float) -> Any:
        """One verb, over the session. Raises what is in prpc_engine.errors, soon after `timeout_s`
        at the latest.
        """
        return self._session.ask(verb, *arguments, timeout_s=timeout_s)

    def submit(self, verb: str, *arguments: Any, timeout_s: float) -> Future:
        """The future of one verb's answer. Raises Closed, Backpressure."""
        return self._session.submit(verb, *arguments, timeout_s=timeout_s)

    def watch(self, path: str, callback: Callback, timeout_s: float, existing: bool) -> int:
        """Begin a watch of that node and all below it; its handle. Raises as Watches.add()."""
        return self._watches.add(path, callback, timeout_s, existing)

    def watch_soon(self, path: str, callback: Callback) -> Future:
        """The same without waiting for it: a future of its beginning. Raises as Watches.begin()."""
        _, begun = self._watches.begin(path, callback, existing=False)
        return begun

    def unwatch(self, handle: int) -> bool:
        """No callback of that watch begins after this; whether there was one."""
        return self._watches.cancel(handle)

    def close(self) -> None:
        """End the watches; the session is its owner's."""
        self._watches.close()


class TcpBackend(SessionBackend):
    """A backend with a reactor, a node and a session of its own. Raises MasterUnreachable,
    AuthenticationFailed, ConfigError.
    """

    def __init__(
        self,
        address: str,
        root: str,
        secret: bytes | str | None,
        limits: Limits | None,
        lease_s: float,
        heartbeat_s: float | None,
        label: str,
        timeout_s: float,
    ) -> None:
        host_and_port(address)
        check_timeout(timeout_s)
        check_lease(lease_s, heartbeat_s)
        check_root(root)
        config = NodeConfig.load(secret=secret, limits=limits)
        config = config.listening_at(Address("127.0.0.1", 0), ())
        # of stalls: callbacks of watches run in its engine threads
        self._driver = Driver(
            False, "prpc-master-client", config.node.stall_budget_s, engine=ENGINE
        )
        self._slab = Slab()
        started = runtime.monotonic()
        try:
            self._node = Node(
                self._driver.reactor,
                self._driver,
                self._slab,
                config,
            )
        except BaseException:
            self._driver.close()
            raise
        try:
            session = MasterSession(
                self._node, address, lease_s, heartbeat_s, root, label, timeout_s
            )
        except BaseException:  # no descriptor is left to find out who this process is
            close_in_reactor(self._driver, self._node)
            self._slab.close()
            raise
        super().__init__(session)
        self._closed = False
        try:
            session.opened.result()
        except errors.RpcError as error:
            self.close()
            raise master_error(address, error, started) from error
        except BaseException:
            self.close()
            raise

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            close_dropped(self, f"MasterClient of {self.address}", self.close, self._node.pid)

    def close(self) -> None:
        """End the watches and the session, then the node and its reactor, within CLOSE_TIMEOUT_S,
        though a callback blocks. A second close does nothing.
        """
        if self._closed:
            return
        self._closed = True
        give_up_at = runtime.monotonic() + CLOSE_TIMEOUT_S
        super().close()
        self._session.close()
        close_in_reactor(self._driver, self._node, max(0.0, give_up_at - runtime.monotonic()))
        self._slab.close()

"""A process that is no task of a cluster, and asks its tasks: it knows one control address, and is
told the rest there (control.py).

    found        it asks that address to describe the cluster, again until somebody answers or the
                 connection timeout is over; a stock gRPC server there is named at once
    then         links to the tasks, as those of a task (links.py), by the cluster's own plan

A node has to listen: this one listens on the loopback alone, and serves no method.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from prpc_engine import errors
from prpc_engine.cluster.config import ServerConfig
from prpc_engine.cluster.control import CONTROL_TARGET, DESCRIBE, Description, Facts
from prpc_engine.cluster.endpoint import Endpoint, node_config, place_from
from prpc_engine.cluster.errors import TaskUnreachable
from prpc_engine.cluster.link import CONNECT_TIMEOUT_S, Errand
from prpc_engine.cluster.links import Links
from prpc_engine.cluster.names import Names
from prpc_engine.cluster.patience import Patience
from prpc_engine.rpc.fixed_route import FixedRoute
from prpc_engine.rpc.message import method_key
from prpc_engine.settings.address import Address
from prpc_engine.settings.cluster_spec import WORKER, Task
from shard import ShardError, control_loop, runtime, sleep

VISITOR = "a client"  # what it calls itself, in hello() and in logs
ANYWHERE = Address("127.0.0.1", 0)

logger = logging.getLogger("prpc")


class Visitor:
    """Asks the tasks of a cluster, as a client that is none of them. Thread-safe.

    address    the control address of one of them
    config     see ServerConfig: the secret, transports, limits, and how long tasks are waited for
               later
    timeout_s  how long that one is waited for now, in seconds; None: as long

    `task` is who was asked. close() by its owner. Raises TaskUnreachable, AuthenticationFailed, and
    ConfigError, also when something else listens there.
    """

    def __init__(
        self, address: Address, config: ServerConfig, timeout_s: float | None = None
    ) -> None:
        node = node_config(config, WORKER, 1).override(shards=0)
        patience_s = float(node.found_network()["connection_timeout_s"].value)
        self._timeout_s = patience_s if timeout_s is None else timeout_s
        self._is_closed = False
        place = place_from(VISITOR, "", ANYWHERE, None, config, node)
        self._at = Endpoint(place, {}, lambda peer: None)
        try:
            self._at.serve()
            found = control_loop().spawn(self._found(address), self._at.data.waiter).result()
        except BaseException:  # Ctrl-C, too
            self._at.close()
            raise
        self._address = address
        self.description: Description = found
        me = self._at.me
        self._at.me = Facts(found.plan, VISITOR, me.incarnation, me.data)
        self._names = Names(found.cluster)
        self.task: Task = self._names.tasks[self._names.number(found.task)]
        self._links = Links(
            self._names, found.data, self._at, None, patience_s, _ignore, self._check
        )

    async def _found(self, address: Address) -> Description:
        """Who is there. In the control loop."""
        text, patience = f"a task at {address}", Patience(runtime.monotonic(), self._timeout_s)
        while True:
            try:
                return await self._described(address, text)
            except errors.NotAPeer as error:
                raise errors.ConfigError(
                    f"{error}; a server with protocol='prpc' is expected there"
                ) from None
            except (errors.NotSent, errors.MaybeExecuted, errors.DeadlineExceeded) as error:
                now = runtime.monotonic()
                pause_s = patience.pause_s(now)
                if pause_s is None:
                    raise TaskUnreachable(
                        f"{text} does not answer ({patience.waited_s(now):.1f} s): {error}; "
                        "start it, or allow more time"
                    ) from None
                if patience.failed == 1:
                    logger.warning(
                        "waiting for %s, for up to %.3g s: %s", text, self._timeout_s, str(error)
                    )
                await sleep(pause_s)

    async def _described(self, address: Address, text: str) -> Description:
        control = await self._at.control.reach([f"tcp://{address}"], CONNECT_TIMEOUT_S, text)
        call = control.request(
            FixedRoute(CONTROL_TARGET, text),
            DESCRIBE,
            method_key(DESCRIBE),
            (),
            CONNECT_TIMEOUT_S,
            True,
        )
        try:
            return Description.read(await call, address)
        except errors.UnknownService:
            raise errors.NotSent(
                f"the process that listens at {address} is no task of a cluster, "
                "or has not started yet"
            ) from None

    def is_current(self) -> bool:
        """Whether the same cluster is there as before, as far as is known: one that does not answer
        now may come back.
        """
        text = f"a task at {self._address}"
        asked = control_loop().spawn(self._described(self._address, text), self._at.data.waiter)
        try:
            found: Description = asked.result()
        except (errors.RpcError, ShardError):
            return True
        return (found.plan, found.task) == (self.description.plan, self.description.task)

    def _check(self) -> None:
        if self._is_closed:
            raise errors.Closed("the connection to the cluster was closed here")

    def ask(
        self,
        task: str,
        method: str,
        what: str,
        arguments: Callable[[int], tuple[Any, ...]],
        timeout_s: float,
        is_patient: bool = True,
    ) -> Errand:
        """As Server.ask()."""
        return self._links.ask(task, method, what, arguments, timeout_s, is_patient)

    def meet(self, name: str, task: str, port: int) -> None:
        """As Server.meet()."""
        self._links.meet(name, task, port)

    def close(self) -> None:
        """Hang up. Again: does nothing."""
        if not self._is_closed:
            self._is_closed = True
            self._links.close()
            self._at.close()


def _ignore() -> None:
    """After an attempt that failed: there is no .endpoint_map here to look at."""

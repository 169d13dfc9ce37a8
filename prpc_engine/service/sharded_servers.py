"""Servers with an instance in each shard of a service: made, made again where a shard was started
again, taken back.

a shard died           its instances went with it; the master tells clients (at once where it is on
                       this host, else when the lease is over), and the group starts the shard
                       again, as its policy says
it is up again         each server gets a new instance there, from the same factory: under its old
                       id, with a new target and the new process's incarnation, so that clients know
                       that its state is gone
its id is still taken  (the dead one's lease lasts) it is asked for until it is free
a new one fails        that is in the log; the shard's other servers are there
it stays down          that is in the log, with the servers that it had
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from prpc_engine import errors
from prpc_engine.rpc.call import TIMEOUT_S
from prpc_engine.rpc.server import Bounds
from prpc_engine.service.in_shard import serve_in_shard, stop_serving_in_shard
from shard import Future, LocalProtocolError, PeerLostError, ShardError, ShardGroup, runtime

logger = logging.getLogger("prpc")


@dataclass(eq=False)
class ShardedServer:
    """One server that has an instance in every shard, as its service keeps it for shards that are
    started again. Changed by ShardedServers alone.
    """

    number: int  # of this service: shards know it by that
    name: str
    factory: Callable[[], object]
    bounds: Bounds | None
    # by shard, of those that have made their first instance
    server_ids: dict[int, int] = field(default_factory=dict)


class ShardedServers:
    """Makes servers with an instance in each shard, makes those anew where a shard was started
    again, and takes them back.

    group  of the shards

    Owned by the Servers of an RpcService. create() and remove() wait for the shards;
    shard_changed() is called in a thread of the group's. create() raises what a factory raises,
    ConfigError, PeerLostError, DeadlineExceeded. What follows when a shard dies: the table at the
    file's head.
    """

    def __init__(self, group: ShardGroup) -> None:
        self.group = group
        self._servers: dict[int, ShardedServer] = {}
        self._numbers = itertools.count(1)

    @property
    def has_servers(self) -> bool:
        """Whether any server lives in the shards."""
        return bool(self._servers)

    def create(
        self,
        name: str,
        factory: Callable[[], object],
        server_id: int,
        bounds: Bounds | None,
        timeout_s: float,
    ) -> ShardedServer:
        """An instance in each shard, once all of them are up. Raises what a factory raises,
        ConfigError for one that cannot be sent, PeerLostError where a shard stays down,
        DeadlineExceeded; then there is none anywhere."""
        deadline = runtime.monotonic() + timeout_s
        server = ShardedServer(next(self._numbers), name, factory, bounds)
        self._servers[server.number] = server
        try:
            # one after the other: their ids are in order of the shards
            for index in range(self.group.size):
                wanted = server_id if server_id < 0 else server_id + index
                server.server_ids[index] = self._first_instance(
                    server, index, wanted, deadline, timeout_s
                )
        except BaseException:
            self.remove(server, 0.0)  # or some would go on serving, and nobody could take them back
            raise
        return server

    def _first_instance(
        self, server: ShardedServer, index: int, wanted: int, deadline: float, timeout_s: float
    ) -> int:
        while True:
            try:
                self.group.wait_up(max(0.0, deadline - runtime.monotonic()))
                given, _ = self._submit(server, index, wanted, again=False).result(
                    max(0.0, deadline - runtime.monotonic())
                )
            except PeerLostError:
                if runtime.monotonic() >= deadline:
                    raise
                # raises where it stays down
                self.group.wait_up(max(0.0, deadline - runtime.monotonic()))
            except TimeoutError as error:
                where = f"of {server.name!r} in shard {index}"
                raise errors.DeadlineExceeded(
                    f"no server {where} within {timeout_s} s: {error}"
                ) from None
            except LocalProtocolError as error:
                raise errors.ConfigError(
                    f"the factory {server.factory!r} cannot be sent to a shard: {error}"
                ) from error
            else:
                return int(given)

    def _submit(self, server: ShardedServer, index: int, server_id: int, again: bool) -> Future:
        # In a partial, which goes by value where the factory has to: a lambda, a closure.
        made = partial(
            serve_in_shard,
            server.number,
            server.name,
            server.factory,
            server_id,
            server.bounds,
            again,
        )
        return self.group.submit_to(index, made)

    def shard_changed(self, index: int, state: str, text: str) -> None:
        """What the group says of a shard."""
        servers = [server for server in list(self._servers.values()) if index in server.server_ids]
        if state == "up":
            for server in servers:
                server_id = server.server_ids[index]
                try:
                    self._submit(server, index, server_id, again=True).when_done(
                        partial(self._served, server, index)
                    )
                except ShardError as error:  # it died again, and will be told of again
                    logger.warning(
                        "server %d of %r is not back in shard %d: %s",
                        server_id,
                        server.name,
                        index,
                        error,
                    )
        elif state == "gone" and servers:
            gone = ", ".join(f"{server.server_ids[index]} of {server.name!r}" for server in servers)
            logger.error("%s, and with it the servers %s", text, gone)

    def _served(self, server: ShardedServer, index: int, done: Future) -> None:
        error, server_id = done.error(), server.server_ids[index]
        if error is None:
            logger.warning(
                "server %d of %r is back in shard %d, with a new instance",
                server_id,
                server.name,
                index,
            )
        elif server.number in self._servers and not self.group.closed:
            logger.error(
                "server %d of %r is not back in shard %d: %s", server_id, server.name, index, error
            )

    def remove(self, server: ShardedServer, drain_s: float) -> None:
        """Take it back in all shards; what has begun goes on for up to `drain_s` seconds."""
        self._servers.pop(server.number, None)
        told = []
        for index in range(self.group.size):
            try:
                told.append(
                    self.group.submit_to(index, stop_serving_in_shard, server.number, drain_s)
                )
            except PeerLostError:  # what is gone serves no more, and keeps no other from being told
                continue
        for one in told:
            error = one.error(drain_s + TIMEOUT_S)
            if error is not None and not isinstance(error, PeerLostError):
                raise error

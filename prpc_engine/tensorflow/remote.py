"""Sessions at a master in another process: tf.compat.v1.Session("prpc://host:port") in a process
that is no task, and knows one address of the cluster.

    what                              where it runs
    an op with a device               at that task
    an op without one, a variable     at the master, the task whose address the target is
      without one
    control flow of values, stacks,   in the client, as in the session's own task otherwise
      TensorArrays

The client cuts steps and calls the tasks itself, as a worker does (star.py): nothing goes by the
master that is not its own. What it opened ends with it, as with a worker that dies.

One way to a cluster serves all sessions of the process, and is kept.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

from tensorflow.core.protobuf import config_pb2
from tensorflow.python.framework import errors_impl as tf_errors

from prpc_engine import errors as engine_errors
from prpc_engine.cluster.config import ServerConfig
from prpc_engine.cluster.visitor import Visitor
from prpc_engine.settings.address import Address
from prpc_engine.settings.cluster_spec import Task
from prpc_engine.tensorflow.runtime import Runtime
from prpc_engine.tensorflow.server import GRPC, SCHEMES, reset_tasks
from prpc_engine.tensorflow.stalls import watch
from shard import Task as ControlTask
from shard import control_loop

CLIENT = Task("prpc-client", 0)  # no job may be called so

_guard = threading.Lock()  # of the next one: any thread makes a session
_masters: dict[Address, RemoteMaster] = {}


class RemoteMaster:
    """A cluster whose master is in another process: as a TaskServer to a session.

    address     of the master's control port
    patience_s  how long it is waited for, in seconds; None: as NETWORK_MAX_CONNECTION_TIMEOUT says

    Kept by master_at(). Raises as a Visitor does.
    """

    task = CLIENT
    processes = 1  # of the client

    def __init__(self, address: Address, patience_s: float | None) -> None:
        self.engine = Visitor(address, ServerConfig(), patience_s)
        self.target = f"prpc://{address}"
        self.master = self.engine.task
        self.tasks = frozenset(self.engine.description.cluster.addresses)
        self.config = config_pb2.ConfigProto()
        self.runtime = Runtime(self.config)
        self._planes: weakref.WeakSet[Any] = weakref.WeakSet()
        self._entering = threading.Lock()  # of one; nobody may go through them meanwhile
        self._watching: ControlTask | None = None  # the steps of those, from the first one on

    def enter(self, plane: Any) -> None:
        """Of a new session."""
        with self._entering:
            self._planes.add(plane)
            if self._watching is None:
                self._watching = control_loop().spawn(watch(self._entered))

    def _entered(self) -> list[Any]:
        with self._entering:
            return list(self._planes)

    def reset(self, containers: Sequence[str]) -> None:
        """As TaskServer.reset(), of the sessions of this process."""
        for plane in self._entered():
            plane.close(tf_errors.AbortedError, "the session was ended: its target was reset")
        reset_tasks(self.engine, self.tasks, containers)

    def close(self) -> None:
        """End its sessions, and hang up."""
        for plane in self._entered():
            plane.close()
        if self._watching is not None:
            self._watching.cancel()
        self.engine.close()
        self.runtime.close()


def master_at(target: object, timeout_s: float | None) -> RemoteMaster | None:
    """Of a session's target, with the scheme prpc://, or grpc:// where a server of ours is there;
    None for any other. Raises as a Visitor does.

    timeout_s  how long the master is waited for, in seconds; None: as
               NETWORK_MAX_CONNECTION_TIMEOUT says
    """
    text = target.decode(errors="replace") if isinstance(target, bytes) else str(target or "")
    scheme, found, place = text.partition("://")
    if not found or scheme not in (*SCHEMES, GRPC):
        return None
    if scheme == GRPC:
        try:
            address = Address.parse(place)
            Visitor(address, ServerConfig(), patience_s=0.0).close()
        except (engine_errors.RpcError, engine_errors.ConfigError):
            return None  # TensorFlow's own code says what is wrong with it
    else:
        address = Address.parse(place)
    with _guard:
        known = _masters.get(address)
    if known is not None and known.engine.is_current():
        return known
    made = RemoteMaster(address, timeout_s)  # which may wait: others need not
    with _guard:
        now = _masters.get(address)
        if now is None or now is known:
            _masters[address] = now = made
        else:
            known = made  # another thread was first
    if known is not None:
        known.close()
    assert now is not None
    return now


def close_all() -> None:
    """Hang up on all clusters."""
    with _guard:
        masters = list(_masters.values())
        _masters.clear()
    for each in masters:
        each.close()

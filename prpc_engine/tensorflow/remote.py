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
from collections.abc import Sequence

from tensorflow.core.protobuf import config_pb2

from prpc_engine import errors as engine_errors
from prpc_engine.cluster.config import ServerConfig
from prpc_engine.cluster.visitor import Visitor
from prpc_engine.settings.address import Address
from prpc_engine.settings.cluster_spec import Task
from prpc_engine.tensorflow.open_sessions import OpenSessions
from prpc_engine.tensorflow.runtime import Runtime
from prpc_engine.tensorflow.server import GRPC, SCHEMES, reset_tasks

LOOK_S = 1.0  # how long _is_ours() waits for a server that does not answer
CLIENT = Task("prpc-client", 0)  # no job may be called so

_guard = threading.Lock()  # of the next one: any thread makes a session
_masters: dict[Address, RemoteMaster] = {}


class RemoteMaster:
    """A cluster whose master is in another process: as a TaskServer to a session.

    address     of the master's control port
    timeout_s   how long it is waited for now, in seconds; None: as NETWORK_MAX_CONNECTION_TIMEOUT
                says, which is how long tasks are waited for later, too

    Kept by master_at(). Raises as a Visitor does.
    """

    task = CLIENT
    processes = 1  # of the client

    def __init__(self, address: Address, timeout_s: float | None) -> None:
        self.engine = Visitor(address, ServerConfig(), timeout_s)
        self.target = f"prpc://{address}"
        self.master = self.engine.task
        self.tasks = frozenset(self.engine.description.cluster.addresses)
        self.config = config_pb2.ConfigProto()
        self.runtime = Runtime(self.config)
        self.sessions = OpenSessions()

    def reset(self, containers: Sequence[str]) -> None:
        """As TaskServer.reset(), of the sessions of this process."""
        self.sessions.reset()
        reset_tasks(self.engine, self.tasks, containers)

    def close(self) -> None:
        """End its sessions, and hang up."""
        for plane in self.sessions.planes():
            plane.close()
        self.sessions.close()
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
    if scheme == GRPC and not _is_address(place):
        return None  # TensorFlow's own code says what is wrong with it
    address = Address.parse(place)
    with _guard:
        known = _masters.get(address)
    if known is not None and known.engine.is_current():
        return known
    if scheme == GRPC and not _is_ours(address):
        return None
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


def _is_address(text: str) -> bool:
    try:
        Address.parse(text)
    except engine_errors.ConfigError:
        return False
    return True


def _is_ours(address: Address) -> bool:
    """Whether a server of ours answers there, within LOOK_S, as it may listen and not serve yet.
    Raises AuthenticationFailed: one does, which has another secret.
    """
    try:
        Visitor(address, ServerConfig(), LOOK_S).close()
    except engine_errors.AuthenticationFailed:
        raise
    except engine_errors.RpcError:  # a stock server, or none: TensorFlow's own client goes on
        return False
    return True


def close_all() -> None:
    """Hang up on all clusters."""
    with _guard:
        masters = list(_masters.values())
        _masters.clear()
    for each in masters:
        each.close()

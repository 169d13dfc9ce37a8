"""A task of TensorFlow's over this engine: tf.distribute.Server(..., protocol="prpc") becomes one.

It is a prpc_engine.Server, with its control and data address, its .endpoint_map and NETWORK_*
variables, and has the verbs of stages.py besides. What belongs to the task lives in one runtime:
what its own sessions run here, and what those of others do.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Sequence
from typing import Any

from tensorflow.python.framework import errors_impl as tf_errors

from prpc_engine.cluster.config import ServerConfig
from prpc_engine.cluster.names import device
from prpc_engine.cluster.server import Server
from prpc_engine.rpc.peer import Peer
from prpc_engine.settings.cluster_spec import Task
from prpc_engine.settings.network import DEFAULT
from prpc_engine.tensorflow import errors, proto
from prpc_engine.tensorflow.programs import Programs
from prpc_engine.tensorflow.runtime import Runtime
from prpc_engine.tensorflow.stages import RESET, Stages

PROTOCOLS = ("prpc", "grpc++", "star_server")  # the last two are GRPC++'s names of the same

RESET_TIMEOUT_S = 60.0  # for a task to drop its containers

logger = logging.getLogger("prpc")
_guard = threading.Lock()  # of the next one: any thread of the application makes a server
_by_target: dict[str, TaskServer] = {}


class TaskServer:
    """Makes this process one task of a TensorFlow cluster, whose sessions run over this engine.

    definition  the ServerDef: cluster, job, task, and the ConfigProto of sessions

    It listens from start() on; close() by its owner. Raises as prpc_engine.Server does.
    """

    def __init__(self, definition: Any) -> None:
        self.definition = definition
        cluster = {job.name: dict(job.tasks) for job in definition.cluster.job}
        self.task = Task(definition.job_name, definition.task_index)
        self.config = definition.default_session_config
        self.runtime = Runtime(self.config)
        self.stages = Stages(self.runtime, self._forget)
        self._planes: weakref.WeakSet[Any] = weakref.WeakSet()  # of the sessions at this target
        self._entering = threading.Lock()  # of one; nobody may go through them meanwhile
        config = ServerConfig(tensor_fuse=proto.tensor_fuse(self.config), shards=0)
        self.programs = Programs(self.stages, lambda: self.engine)
        verbs = {**self.stages.verbs, **self.programs.verbs}
        self.engine = Server(
            cluster, self.task.job, self.task.index, config=config, start=False, methods=verbs
        )
        cores, origin = self.engine.settings.cores, self.engine.settings.origins["cores"]
        if cores > 1 and not origin.startswith(DEFAULT):
            logger.warning(
                "%s: a server of TensorFlow has no shards: its variables live in the task's own "
                "process, where each request ends",
                origin,
            )
        self.engine.on_peer_lost = self._peer_lost
        self.tasks = frozenset(self.engine.server_def.cluster.addresses)

    def start(self) -> None:
        """Listen. Raises AddressInUse."""
        self.engine.start()
        with _guard:
            _by_target[_address(self.engine.target)] = self

    def enter(self, plane: Any) -> None:
        """Of a new session at this target."""
        with self._entering:
            self._planes.add(plane)

    def _entered(self) -> list[Any]:
        with self._entering:
            return list(self._planes)

    def _peer_lost(self, peer: Peer) -> None:
        self.stages.peer_lost(peer)
        self.programs.peer_lost(peer)

    @property
    def target(self) -> str:
        """For sessions of this process: "prpc://host:port"."""
        return self.engine.target

    def join(self) -> None:
        """Serve from this thread until close()."""
        self.engine.join()

    def reset(self, containers: Sequence[str]) -> None:
        """End all sessions at this target with AbortedError, and drop what is in these containers
        of all tasks; "" is the one that nothing else names. Raises RpcError and errors of
        TensorFlow."""
        for plane in self._entered():
            plane.close(tf_errors.AbortedError, "the session was ended: its target was reset")
        calls = [
            self.engine.ask(
                device(task), RESET, "a reset", lambda _: (list(containers),), RESET_TIMEOUT_S
            )
            for task in sorted(self.tasks)
        ]
        for call in calls:
            code, *text = call.result()
            if code:
                raise errors.read(code, *text)

    def _forget(self, handles: Sequence[int], is_all: bool) -> None:
        """Of stages that are gone: what was made of them."""
        self.programs.forget(handles)
        if is_all:
            for plane in self._entered():
                plane.forget()

    def close(self) -> None:
        """Hang up, and give up what runs here."""
        with _guard:
            address = _address(self.engine.target)
            if _by_target.get(address) is self:  # another one may have got the port
                del _by_target[address]
        self.engine.stop()
        self.programs.close()
        self.stages.close()


def server_of(target: object) -> TaskServer | None:
    """The server of this process that a session's target names, with or without its scheme; None
    for any other target.
    """
    text = target.decode(errors="replace") if isinstance(target, bytes) else str(target or "")
    return _by_target.get(_address(text))


def _address(target: str) -> str:
    return target.rpartition("://")[2]

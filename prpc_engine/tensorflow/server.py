"""A task of TensorFlow's over this engine: tf.distribute.Server(..., protocol="prpc") becomes one.

It is a prpc_engine.Server, with its control and data address, its .endpoint_map and NETWORK_*
variables, and has the verbs of stages.py besides. What belongs to the task lives in one runtime:
what its own sessions run here, and what those of others do.

A ps with NETWORK_PS_CORE_NUMBER=N is N processes, each with a runtime, a reactor, connections and a
slab: this one and its shards (shard_process.py).

    verb   arguments                        answer                   what it does
    deal   [[keys, bytes], ...] of handles  [0, control ports of     says which process has what:
           that are to be in one process    the shards, numbers];    deal.py
                                            [code, text]
    reset  containers                       [0]; [code, text]        as of stages.py, and of all
                                                                     shards

    a shard ends                            the task ends: who asks it gets TaskLost, and join()
                                            raises AbortedError; what it had is gone, as of a
                                            process that dies
    this process ends, however              its shards end
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from tensorflow.python.framework import errors_impl as tf_errors

from prpc_engine.cluster.config import ServerConfig
from prpc_engine.cluster.names import device
from prpc_engine.cluster.server import Server
from prpc_engine.rpc.deferred import Deferred
from prpc_engine.rpc.peer import Peer
from prpc_engine.settings.cluster_spec import PS, ClusterSpec, Task
from prpc_engine.settings.network import DEFAULT, NetworkSettings
from prpc_engine.tensorflow import errors, proto
from prpc_engine.tensorflow.deal import Deal, HandleGroup, TaskShard, device_of
from prpc_engine.tensorflow.open_sessions import OpenSessions, end_sessions
from prpc_engine.tensorflow.place import Misplaced
from prpc_engine.tensorflow.programs import Programs
from prpc_engine.tensorflow.runtime import Runtime
from prpc_engine.tensorflow.shard_process import ShardProcesses, divided
from prpc_engine.tensorflow.stages import RESET, Stages, end_stages
from shard import Future, gather, runtime, usable_cores

PROTOCOLS = ("prpc", "grpc++", "star_server")  # the last two are GRPC++'s names of the same
EXIT_S = 2.0  # at the end of the process, for what runs
SCHEMES, GRPC = ("prpc", "grpc++"), "grpc"  # of targets
LOOPBACKS = ("localhost", "127.0.0.1", "[::1]", "::1")  # one host by several names

DEAL = "tf.deal"
RESET_TIMEOUT_S = 60.0  # for a task to drop its containers

logger = logging.getLogger("prpc")
_guard = threading.Lock()  # of the next one: any thread of the application makes a server
_by_target: dict[str, TaskServer] = {}


class TaskServer:
    """Makes this process one task of a TensorFlow cluster, whose sessions run over this engine.

    definition  the ServerDef: cluster, job, task, and the ConfigProto of sessions

    It listens from start() on, once its shards do; close() by its owner. Raises as
    prpc_engine.Server does, and RpcError when a shard does not start.
    """

    def __init__(self, definition: Any) -> None:
        self.definition = definition
        cluster = {job.name: dict(job.tasks) for job in definition.cluster.job}
        self.task = Task(definition.job_name, definition.task_index)
        self.config = definition.default_session_config
        # of which this one is the first
        self.processes = _count_of_processes(ClusterSpec(cluster), self.task)
        if self.processes > 1:
            self.config = divided(self.config, self.processes)
        self.runtime = Runtime(self.config)
        self.stages = Stages(
            self.runtime, self._forget, lambda incarnation: self.engine.is_connected(incarnation)
        )
        self.sessions = OpenSessions()
        config = ServerConfig(tensor_fuse=proto.tensor_fuse(self.config), shards=0)
        self.programs = Programs(self.stages, lambda: self.engine)
        self._deal = Deal(self.processes)
        self._shards: ShardProcesses | None = None
        self._lost = ""  # a shard has ended, and how
        verbs = {
            **self.stages.verbs,
            **self.programs.verbs,
            DEAL: self._deal_out,
            RESET: self._reset_all,
        }
        self.engine = Server(
            cluster, self.task.job, self.task.index, config=config, start=False, methods=verbs
        )
        self.engine.on_peer_lost = self._peer_lost
        self.tasks = frozenset(self.engine.server_def.cluster.addresses)

    def start(self) -> None:
        """Listen. Raises AddressInUse; RpcError when a shard does not start."""
        names = self._names_of_shards()
        if names and self._shards is None:
            places = [self.engine.place_beside(name) for name in names]
            self._shards = ShardProcesses(places, self.config, self._shard_lost)
        try:
            self.engine.start()
            for name, port in zip(names, self._ports, strict=True):
                self.engine.meet(name, device(self.task), port)
        except BaseException:  # Ctrl-C, too
            self._end_shards()
            raise
        with _guard:
            _by_target[_address(self.engine.target)] = self

    # -- shards ------------------------------------------------------------------------------------

    def _names_of_shards(self) -> list[str]:
        job, index = self.task.job, self.task.index
        return [device_of(TaskShard(job, index, shard)) for shard in range(1, self.processes)]

    @property
    def _ports(self) -> list[int]:
        return [] if self._shards is None else self._shards.ports

    @property
    def pids_of_shards(self) -> list[int]:
        """Of the processes beside this one."""
        return [] if self._shards is None else self._shards.pids

    def _deal_out(self, packed: Sequence[Any]) -> list[Any]:
        try:
            return [0, self._ports, self._deal.assign([HandleGroup(*one) for one in packed])]
        except Misplaced as error:
            return [tf_errors.INVALID_ARGUMENT, str(error)]

    def _reset_all(self, containers: list[str]) -> Deferred:
        answer = Deferred()
        resets: list[Future] = [self.stages.reset(containers)]
        for name in self._names_of_shards():
            resets.append(
                self.engine.ask(name, RESET, "a reset", lambda _: (containers,), RESET_TIMEOUT_S)
            )

        def answered(done: Future) -> None:
            error = done.error()
            if error is not None:
                answer.fail(error)
            else:
                answer.reply(next((said for said in done.result() if said[0]), [0]))

        gather(resets).when_done(answered)
        return answer

    def _shard_lost(self, name: str, how: str) -> None:
        """In a thread that may block."""
        self._lost = (
            f"{name} {how}: what it had of {device(self.task)} is lost, and the task ends; "
            "start it again"
        )
        logger.error("%s", self._lost)
        self.engine.stop()

    def _end_shards(self) -> None:
        shards, self._shards = self._shards, None
        if shards is not None:
            shards.close()

    def _peer_lost(self, peer: Peer) -> None:
        self.stages.peer_lost(peer)
        self.programs.peer_lost(peer)

    @property
    def master(self) -> Task:
        """Where sessions at this target run what has no device."""
        return self.task

    @property
    def target(self) -> str:
        """For sessions of this process: "prpc://host:port"."""
        return self.engine.target

    def join(self) -> None:
        """Serve from this thread until close(). Raises AbortedError when a shard has ended."""
        self.engine.join()
        if self._lost:
            raise tf_errors.AbortedError(None, None, self._lost)

    def reset(self, containers: Sequence[str]) -> None:
        """End all sessions at this target with AbortedError, and drop what is in these containers
        of all tasks; "" is the one that nothing else names. Raises RpcError and errors of
        TensorFlow."""
        self.sessions.reset()
        reset_tasks(self.engine, self.tasks, containers)

    def _forget(self, handles: Sequence[int], is_all: bool) -> None:
        """Of stages that are gone: what was made of them."""
        self.programs.forget(handles)
        if is_all:
            for plane in self.sessions.planes():
                plane.forget()

    def close(self) -> None:
        """Hang up, and give up what runs here."""
        with _guard:
            address = _address(self.engine.target)
            if _by_target.get(address) is self:  # another one may have got the port
                del _by_target[address]
        self.engine.stop()
        self.sessions.close()
        self._end_shards()
        self.programs.close()
        self.stages.close()


def _count_of_processes(cluster: ClusterSpec, task: Task) -> int:
    """How many a task is, where a variable says so; else one. Raises ConfigError."""
    settings = NetworkSettings.for_task(cluster, task.job, os.environ)
    cores, origin = settings.cores, settings.origins["cores"]
    if cores == 1 or origin.startswith(DEFAULT):
        return 1
    if task.job != PS:
        logger.warning(
            "%s: a server of TensorFlow has shards at a ps only: what a worker runs, and its "
            "sessions, are in one process",
            origin,
        )
        return 1
    usable = len(usable_cores())
    if cores > usable:
        logger.warning("%s: processes, one for each usable core: %d", origin, usable)
    return min(cores, usable)


class Asks(Protocol):
    """Who asks the tasks of a cluster: a Server, which is one of them, or a Visitor."""

    def ask(
        self,
        task: str,
        method: str,
        what: str,
        arguments: Callable[[int], tuple[Any, ...]],
        timeout_s: float,
        is_patient: bool = ...,
    ) -> Future:
        """The future of what a task answers."""

    def meet(self, name: str, task: str, port: int) -> None:
        """From now on ask() knows a process beside that task."""


def reset_tasks(engine: Asks, tasks: Iterable[Task], containers: Sequence[str]) -> None:
    """Drop what is in these containers of all the tasks. Raises RpcError and errors of
    TensorFlow.
    """
    calls = [
        engine.ask(device(task), RESET, "a reset", lambda _: (list(containers),), RESET_TIMEOUT_S)
        for task in sorted(tasks)
    ]
    for call in calls:
        code, *text = call.result()
        if code:
            raise errors.read(code, *text)


def server_of(target: object) -> TaskServer | None:
    """The server of this process that a session's target names, with or without its scheme; None
    for any other target.
    """
    text = target.decode(errors="replace") if isinstance(target, bytes) else str(target or "")
    return _by_target.get(_address(text))


def _address(target: str) -> str:
    host, _, port = target.rpartition("://")[2].rpartition(":")
    return f"{'localhost' if host in LOOPBACKS else host}:{port}"


@runtime.at_exit
def _leave_tensorflow() -> None:
    """At the end of the process, before the interpreter is finalized. Python ends a thread that
    returns from TensorFlow's C++ after that by unwinding its stack, which C++ takes for an uncaught
    exception: the process would abort.
    """
    until = time.monotonic() + EXIT_S
    end_sessions(until)
    end_stages(until)

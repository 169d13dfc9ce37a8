"""mpi4py over the MPICH of its wheel: pickled objects by send() and recv(), arrays by Send() and
Recv() into memory that is already warm. MPI polls while it waits, and cannot be asked not to.

MPI starts its processes itself: the client spawns the server, for which libmpi starts the wheel's
`mpiexec` aside, which sleeps while messages go. (Two processes that were started apart cannot
connect with MPICH 5.0: each is rank 0 of a world of the same name.) All else is as it comes.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..child import END_S_MAX, NotOffered, pin
from ..harness import Place
from .face import ITEM, Job, Peer

# Not by `import`: mypy would want its types where it is not installed. This initializes MPI, and
# only after it did may a process spawn others.
try:
    MPI: Any = importlib.import_module("mpi4py.MPI")
except RuntimeError as error:  # mpi4py brings no MPI of its own
    raise NotOffered(f"pip install mpich: {error}") from error

SERVER = 0  # the only process of the other group, seen from either side
STOP_TAG = 1  # of an empty message


def serve(cores: list[int], kind: str, nbytes: int) -> None:
    """Answer until told to stop. Runs in the process that the client spawned."""
    pin(cores)
    client = MPI.Comm.Get_parent()
    client.send(os.getpid(), SERVER)
    if kind == "echo":
        while (payload := client.recv(source=SERVER)) is not None:
            client.send(payload, SERVER)
    else:
        memory = np.ones(nbytes // ITEM.itemsize, ITEM)
        status = MPI.Status()
        while True:
            client.Recv(memory, SERVER, MPI.ANY_TAG, status)
            if status.tag == STOP_TAG:
                break
            client.Send(memory[:1], SERVER)
    client.Disconnect()


@dataclass(frozen=True, slots=True)
class Spawned:
    """The process that MPI started."""

    pid: int


class Connected(Peer):
    """The client's side."""

    def __init__(self, place: Place, job: Job) -> None:
        super().__init__(place, job)
        # When a client dies, mpiexec kills the client's whole process group: that must not be the
        # one of the process that compares.
        os.setpgid(0, 0)
        # libmpi looks for mpiexec there, and the spawned interpreter for this package.
        os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
        arguments = ["-m", __name__, json.dumps([place.server_cores, job.kind, job.nbytes])]
        self._server = MPI.COMM_SELF.Spawn(sys.executable, arguments, maxprocs=1)
        self.server = Spawned(self._server.recv(source=SERVER))
        # It is no child of this process, and stays a zombie for as long as MPI's launcher likes.
        self._ended = os.pidfd_open(self.server.pid)
        self.exits.callback(os.close, self._ended)
        self.exits.callback(self._stop)
        self._answer = np.empty(1, ITEM)

    def _stop(self) -> None:
        if self.job.kind == "echo":
            self._server.send(None, SERVER)
        else:
            self._server.Send(np.empty(0, ITEM), SERVER, STOP_TAG)
        self._server.Disconnect()
        MPI.Finalize()  # one client a process
        select.select([self._ended], [], [], END_S_MAX)

    def round_trip(self, payload: bytes) -> bytes:
        self._server.send(payload, SERVER)
        answer: bytes = self._server.recv(source=SERVER)
        return answer

    def send_array(self, array: NDArray[np.float32]) -> float:
        self._server.Send(array, SERVER)
        self._server.Recv(self._answer, SERVER)
        return float(self._answer[0])

    def round_trips(self, payload: bytes, count: int, window: int) -> int:
        send, receive = self._server.send, self._server.recv
        echoed = 0
        for sent in range(count + window):
            if sent < count:
                send(payload, SERVER)  # small: it goes before anybody receives it
            if window <= sent:
                echoed += len(receive(source=SERVER))
        return echoed


if __name__ == "__main__":
    serve(*json.loads(sys.argv[1]))

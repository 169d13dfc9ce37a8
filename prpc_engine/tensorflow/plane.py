"""How the tasks of a step get each other's values: a plane is made for a session, and runs its
steps.

PRPC_TF_PLANE    plane                                                                 file
star, the rule   subgraphs of other tasks are called as one op each, level by level    star.py
sendrecv         every task runs its part, and they ask each other for values          sendrecv.py

A session at a master in another process (remote.py) has the plane star in any case.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from prpc_engine.errors import ConfigError
from prpc_engine.tensorflow.nodes import Edge
from prpc_engine.tensorflow.remote import RemoteMaster
from prpc_engine.tensorflow.sendrecv import SendRecvPlane
from prpc_engine.tensorflow.server import TaskServer
from prpc_engine.tensorflow.star import StarPlane
from prpc_engine.tensorflow.tracing import Trace

VARIABLE = "PRPC_TF_PLANE"


class Plane(Protocol):
    """Runs the steps of one session over the tasks of its cluster. There are two: star.py and
    sendrecv.py.
    """

    @property
    def tasks(self) -> frozenset[Any]:
        """Of the cluster."""

    def run(
        self,
        targets: Sequence[Any],
        fetches: Sequence[Any],
        feeds: dict[Any, Any],
        options: Any,
        metadata: Any,
    ) -> list[Any]:
        """The values of the fetches. Raises errors of TensorFlow."""

    def traced(self, options: Any) -> AbstractContextManager[Trace]:
        """The step that runs in this thread meanwhile is traced by these RunOptions."""

    def connected(self, connections: tuple[tuple[Edge, Edge], ...]) -> AbstractContextManager[None]:
        """In the step that runs in this thread meanwhile, the second edge of each pair stands in
        the place of the first.
        """

    def forget(self) -> None:
        """What is kept from step to step is made anew: the tasks have lost it."""

    def close(self, kind: Any = ..., text: str = ...) -> None:
        """The session is closed, or ended with an error of that class: what it runs is given up;
        again: does nothing.
        """


PLANES: dict[str, Callable[[TaskServer, Any], Plane]] = {
    "star": StarPlane,
    "sendrecv": SendRecvPlane,
}


def plane_for(server: TaskServer | RemoteMaster, session: Any) -> Plane:
    """Of that session. Raises ConfigError."""
    name = os.environ.get(VARIABLE, "star")
    if name not in PLANES:
        raise ConfigError(f"{VARIABLE}={name!r}: {', '.join(PLANES)} are allowed")
    plane: Plane
    if isinstance(server, RemoteMaster):  # no task sends values to a client
        plane = StarPlane(server, session)
    else:
        plane = PLANES[name](server, session)
    server.sessions.add(plane)
    return plane

"""The ways to the tasks of a cluster, and to processes beside them: each made when it is asked for
first, and kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from prpc_engine.cluster.endpoint import Endpoint
from prpc_engine.cluster.link import Errand, Link, LinkStatistics
from prpc_engine.cluster.names import Names, device
from prpc_engine.settings.address import Address
from prpc_engine.settings.cluster_spec import Task
from prpc_engine.settings.config import WAIT_S_MAX, check_seconds
from shard import runtime


class Links:
    """The links of one process. Thread-safe.

    names       of the cluster
    data        data addresses by task, by rule "file" or "offset"; none by rule "exchange"
    at          where this process is reached itself
    own         its number, if it is a task
    patience_s  how long a link waits for its task to come up, in seconds
    on_failure  called after an attempt that failed, in a thread that may block

    Owned by a Server or a Visitor, which closes it. Methods raise what `check` does, and
    ConfigError for a name that is not there.
    """

    def __init__(
        self,
        names: Names,
        data: Mapping[Task, Address],
        at: Endpoint,
        own: int | None,
        patience_s: float,
        on_failure: Callable[[], None],
        check: Callable[[], None],
    ) -> None:
        self._names, self._data, self._at, self._own = names, data, at, own
        self._patience_s, self._on_failure, self._check = patience_s, on_failure, check
        self._guard = runtime.Lock()  # of the next two: any thread asks a task first
        self._by_number: dict[int, Link] = {}
        self._beside: dict[str, tuple[Address, Link]] = {}  # by name: see meet()

    def ask(
        self,
        name: str,
        method: str,
        what: str,
        arguments: Callable[[int], tuple[Any, ...]],
        timeout_s: float,
        is_patient: bool,
    ) -> Errand:
        """Ask the task of that device, or what meet() was told of: as Server.ask()."""
        self._check()
        check_seconds("timeout_s", timeout_s, WAIT_S_MAX)
        beside = self._beside.get(name)
        link = self.to(self._names.number(name)) if beside is None else beside[1]
        return link.submit(method, what, arguments, timeout_s, is_patient)

    def to(self, number: int) -> Link:
        """To the task of that number."""
        link = self._by_number.get(number)
        if link is None:
            task = self._names.tasks[number]
            with self._guard:
                self._check()  # with the guard: close() closes those that there are
                link = self._by_number.get(number)
                if link is None:
                    link = self._made(device(task), self._control_of(number), self._data.get(task))
                    self._by_number[number] = link
        return link

    def meet(self, name: str, task: str, port: int) -> None:
        """From now on ask() knows `name` too, which is a process beside that task: its control
        port, at the task's host. Again, with another port: it was started again.
        """
        address = replace(self._control_of(self._names.number(task)), port=port)
        with self._guard:
            self._check()
            before = self._beside.get(name)
            if before is not None and before[0] == address:
                return
            self._beside[name] = address, self._made(name, address, None)
        if before is not None:
            before[1].close()

    def _control_of(self, number: int) -> Address:
        if number == self._own:
            return self._at.address
        return self._names.cluster.addresses[self._names.tasks[number]]

    def _made(self, name: str, control: Address, data: Address | None) -> Link:
        at, patience_s = self._at, self._patience_s
        return Link(name, control, data, at.me, at.control, at.data, patience_s, self._on_failure)

    def all(self) -> list[Link]:
        """That there are now."""
        return [
            *list(self._by_number.values()),
            *(link for _, link in list(self._beside.values())),
        ]

    def statistics(self) -> dict[str, LinkStatistics]:
        """By name."""
        return {link.task: link.statistics() for link in self.all()}

    def close(self) -> None:
        """What waits fails; `check` raises from now on, so that there are no more."""
        with self._guard:
            links = self.all()
        for link in links:
            link.close()

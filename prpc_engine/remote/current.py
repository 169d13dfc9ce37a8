"""What an RRef needs of the worker that this process is, from init_rpc() to shutdown(): one at a
time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from prpc_engine import errors
from prpc_engine.remote.future import Future
from prpc_engine.remote.references import ForkId, ValueId
from shard import runtime


class WorkerInfo(NamedTuple):
    """A worker of the group: its name, and its rank (torch calls that id)."""

    name: str
    id: int


class ValueAddress(NamedTuple):
    """Where a value is: the rank and incarnation of its owner, and its id there."""

    owner: int
    incarnation: int
    value_id: ValueId


class Home(Protocol):
    """The values and references of this worker (values.py)."""

    def own(self, value: Any) -> tuple[ValueAddress, ForkId]:
        """A value of this worker's own."""

    def is_own(self, address: ValueAddress) -> bool:
        """Whether the value is here."""

    def owner(self, address: ValueAddress) -> WorkerInfo:
        """Who has it."""

    def describe(self, address: ValueAddress) -> str:
        """For texts."""

    def pass_on(self, rref: Any) -> list[int]:
        """What stands for an RRef in a message."""

    def receive(self, address: ValueAddress, fork_id: ForkId) -> Any:
        """The RRef that another worker passed on."""

    def drop_soon(self, address: ValueAddress, fork_id: ForkId) -> None:
        """An RRef is gone."""

    def fetch(self, rref: Any, timeout: float | None) -> Any:
        """A copy of the value."""

    def call_method(
        self,
        rref: Any,
        name: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        timeout: float | None,
    ) -> Any:
        """What a method of the value returns."""

    def submit_method(
        self,
        rref: Any,
        name: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        timeout: float | None,
    ) -> Future:
        """The future of that."""

    def create_by_method(
        self,
        rref: Any,
        name: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        timeout: float | None,
    ) -> Any:
        """An RRef to that."""


_home: Home | None = None  # None in a simulation, as group.py's worker


class NoWorker(errors.Closed, RuntimeError):
    """This process is no worker: init_rpc() was not called, or shutdown() was."""


def home() -> Home:
    """Raises NoWorker."""
    found: Home | None = _home or simulated("remote home")
    if found is None:
        raise no_worker()
    return found


def set_home(values: Home | None) -> None:
    """From now on it is that one, or none."""
    global _home
    if runtime.shares_process:
        runtime.put("remote home", values)
    else:
        _home = values


def simulated(key: str) -> Any:
    """What the process of a simulation that asks has put there; None: nothing, or it is real."""
    return runtime.own(key, _nothing) if runtime.shares_process else None


def _nothing() -> None:
    """Has not been put yet."""


def no_worker() -> NoWorker:
    """The error."""
    return NoWorker("this process is no worker of a group: call init_rpc() first")

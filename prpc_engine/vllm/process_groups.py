"""Groups of processes that make a queue together: what they tell each other, by torch.distributed
or by the store of vLLM's StatelessProcessGroup. torch is imported only for a group of its own.

Processes are on one host where they have one boot and one network between them: there they reach
each other at the loopback, whatever else they share.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from prpc_engine import errors
from prpc_engine.vllm.handle import Handle


class ProcessGroup(Protocol):
    """What a queue needs of a group; ranks are those within it."""

    rank: int
    world_size: int

    def broadcast(self, value: Any, source: int) -> Any:
        """What the process of rank `source` passes, in each."""

    def gather(self, value: Any, reader: int) -> list[Any]:
        """What each passes, by ranks, in the process of rank `reader`; else []."""

    def rank_of(self, global_rank: int) -> int:
        """The rank within the group of one that torch knows by that."""


class TorchGroup:
    """Of torch.distributed."""

    def __init__(self, distributed: Any, group: Any) -> None:
        self._distributed, self._group = distributed, group
        self.rank: int = distributed.get_rank(group)
        self.world_size: int = distributed.get_world_size(group)
        self._global: list[int] = distributed.get_process_group_ranks(group)

    def broadcast(self, value: Any, source: int) -> Any:
        """See ProcessGroup."""
        values = [value]
        self._distributed.broadcast_object_list(values, src=self._global[source], group=self._group)
        return values[0]

    def gather(self, value: Any, reader: int) -> list[Any]:
        """See ProcessGroup."""
        found: list[Any] | None = [None] * self.world_size if self.rank == reader else None
        self._distributed.gather_object(value, found, dst=self._global[reader], group=self._group)
        return found or []

    def rank_of(self, global_rank: int) -> int:
        """See ProcessGroup. Raises ConfigError where it is not in the group."""
        if global_rank not in self._global:
            raise errors.ConfigError(
                f"rank {global_rank} is not in the group, which has {self._global}"
            )
        return self._global.index(global_rank)


class StoreGroup:
    """Of an object with rank, world_size and broadcast_obj()."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.rank: int = group.rank
        self.world_size: int = group.world_size

    def broadcast(self, value: Any, source: int) -> Any:
        """See ProcessGroup."""
        found = self._group.broadcast_obj(value if self.rank == source else None, source)
        return value if self.rank == source else found

    def gather(self, value: Any, reader: int) -> list[Any]:
        """See ProcessGroup."""
        found = [self.broadcast(value, source) for source in range(self.world_size)]
        return found if self.rank == reader else []

    def rank_of(self, global_rank: int) -> int:
        """See ProcessGroup: such a group has no others. Raises ConfigError where it is not."""
        if global_rank not in range(self.world_size):
            raise errors.ConfigError(
                f"rank {global_rank!r:.100} is not in the group, which has 0 to "
                f"{self.world_size - 1}"
            )
        return global_rank


def group_of(group: Any) -> ProcessGroup:
    """What it offers, by one face. Raises ConfigError for what is no group."""
    if all(hasattr(group, name) for name in ("rank", "world_size", "broadcast_obj")):
        return StoreGroup(group)
    try:
        distributed: Any = importlib.import_module("torch.distributed")
    except ImportError:
        distributed = None
    if distributed is None or not isinstance(group, distributed.ProcessGroup):
        raise errors.ConfigError(
            f"pg={group!r:.100}: a process group of torch.distributed is expected, or an object "
            "with rank, world_size and broadcast_obj()"
        )
    return TorchGroup(distributed, group)


def hosts_of(group: ProcessGroup) -> list[str]:
    """Of each process, by rank, what those of its host have in common."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    own = f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    return [str(group.broadcast(own, source)) for source in range(group.world_size)]


def shared(group: ProcessGroup, handle: Handle | None, writer: int) -> Handle:
    """The writer's handle, in each process. Raises ConfigError where it could make none."""
    found = group.broadcast(handle, writer)
    if not isinstance(found, Handle):
        raise errors.ConfigError(f"rank {writer} could make no queue: {found}")
    return found


@contextmanager
def told_of_failure(group: ProcessGroup, writer: int) -> Iterator[None]:
    """The others wait for a handle: where the writer fails inside, they are told why."""
    try:
        yield
    except Exception as error:
        group.broadcast(errors.text_of(error), writer)
        raise

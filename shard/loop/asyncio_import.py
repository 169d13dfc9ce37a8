"""A step of a task that imports asyncio itself runs in the guest loop from there on.

A step enters the reactor's asyncio loop (guest_loop.py) where asyncio is there before it begins.
One in which asyncio is imported for the first time in the process would go on without a running
loop: `asyncio.sleep()` on the line after it fails. To look for that after every await of every
task would cost those that never use asyncio; so the import tells of itself, once in a process.

    asyncio is imported by     enters the loop then
    a step, however deep       that step, by the frames beneath the import
    a plain function that a    nobody: it may run a loop of its own (call_outside_asyncio())
     step calls
    a callback in a turn, or   nobody: the next step enters as it begins
     any other thread

Where a thread outside imports it while a step comes to its own import, and waits for the other one,
nothing tells that step: it has a loop from its next await of this engine on.
"""

from __future__ import annotations

import logging
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from shard.loop.future import call_outside_asyncio
from shard.loop.task import Task

# Whose frames turn a reactor: what they call beneath the import is no part of a step further down.
_TURNS = frozenset({"shard.loop.reactor", "shard.loop.driver"})

logger = logging.getLogger("shard")


def watch() -> None:
    """Have the import of asyncio tell of itself, unless it is over. Any number of times."""
    if "asyncio" not in sys.modules and not any(type(one) is _Finder for one in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """The first of sys.meta_path: wraps the loader of asyncio. It stays there: taken out, it would
    have an import of another thread, which goes through the list, skip the one behind it.
    """

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """None for all other modules."""
        if name != "asyncio":
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec: ModuleSpec | None = finder.find_spec(name, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader)  # type: ignore[assignment]
                return spec
        return None


class _Loader:
    """asyncio's, and what follows its import."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the loader does."""
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: Any) -> None:
        """As the loader does; then the step in which this happens enters the loop."""
        module.__loader__ = module.__spec__.loader = self._loader  # as if nobody had looked
        self._loader.exec_module(module)
        task = _task_of_this_step()
        if task is not None:
            try:
                task.asyncio_came()
            except Exception:  # no descriptors: asyncio is imported all the same
                logger.exception("a task that imports asyncio has no loop of it")

    def __getattr__(self, name: str) -> Any:
        """What else it can: for who looks for the module without importing it."""
        return getattr(self._loader, name)


def _task_of_this_step() -> Task | None:
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is Task.step.__code__:
            task: Task = frame.f_locals["self"]
            return task
        if (
            frame.f_code is call_outside_asyncio.__code__
            or frame.f_globals.get("__name__") in _TURNS
        ):
            return None
        frame = frame.f_back  # type: ignore[assignment]
    return None

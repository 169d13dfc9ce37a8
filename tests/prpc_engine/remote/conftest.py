"""A group whose rank 0 is the test itself."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prpc_engine import remote as rpc
from tests.program import Program

THERE = "tests.prpc_engine.remote.worker_there"


class Group:
    """Programs beside the test, by name. They end with the test."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self.init_method = f"file://{folder / 'meet'}"
        self.programs: dict[str, Program] = {}
        self._stack = stack

    def start(
        self, name: str, rank: int | None, size: int | None, method: str = "", **options: Any
    ) -> Program:
        """A worker of that name; not waited for."""
        program = Program(
            THERE,
            name,
            "-" if rank is None else str(rank),
            "-" if size is None else str(size),
            method or self.init_method,
            *([json.dumps(options)] if options else []),
        )
        self.programs[name] = self._stack.enter_context(program)
        return program

    def join(self, *names: str, size: int | None = 0, **options: Any) -> None:
        """The test as "here", and these others. Size 0: so many as there are."""
        size = len(names) + 1 if size == 0 else size
        for number, name in enumerate(names):
            self.start(name, number + 1, size, **options)
        rpc.init_rpc("here", 0, size, self.init_method, rpc.Options(**options))
        for name in names:
            assert self.programs[name].read_line() == "up"


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    with contextlib.ExitStack() as stack:
        yield Group(tmp_path, stack)
        rpc.shutdown(graceful=False)


@pytest.fixture
def pair(group: Group) -> Group:
    """The test, and worker "there"."""
    group.join("there")
    return group


@pytest.fixture
def three(group: Group) -> Group:
    """The test, "there" and "elsewhere"."""
    group.join("there", "elsewhere")
    return group

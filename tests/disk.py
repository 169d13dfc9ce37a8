"""What reached the disk, and when: the calls of this process on files, in their order, with the
paths that they were about.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

WRITES, SYNCS = ("write", "pwrite", "ftruncate"), ("fsync", "fdatasync")


class Disk:
    """Events are (call, path): of a rename, the path that is there afterwards."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Path]] = []
        self._guard = threading.Lock()

    def note(self, call: str, path: Path) -> None:
        """One more."""
        with self._guard:
            self.events.append((call, path))

    def is_synced(self, path: Path, before: int | None = None) -> bool:
        """Whether a file was synced after it was last written; of the first `before` events."""
        state = False
        for call, there in self.events[:before]:
            if there == path:
                state = call in SYNCS
        return state

    def renames(self) -> Iterator[tuple[int, Path]]:
        """Which event each was, and where to."""
        return (
            (number, path) for number, (call, path) in enumerate(self.events) if call == "rename"
        )

    def synced_after(self, number: int, path: Path) -> bool:
        """Whether that file or folder was synced after that event."""
        return any(call in SYNCS and there == path for call, there in self.events[number + 1 :])


@contextmanager
def watched_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    """os.write, pwrite, fsync, fdatasync and rename of this process are noted. Files that are
    written through a buffer are noted by their fsync alone."""
    disk = Disk()

    def noting(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(fd: int, *args: Any) -> Any:
            path = Path(os.readlink(f"/proc/self/fd/{fd}"))
            done = real(fd, *args)
            disk.note(name, path)
            return done

        return call

    def rename(source: Any, target: Any, *, real: Callable[..., Any] = os.rename) -> None:
        real(source, target)
        disk.note("rename", Path(target))

    with monkeypatch.context() as patch:
        for name in (*WRITES, *SYNCS):
            patch.setattr(os, name, noting(name, getattr(os, name)))
        patch.setattr(os, "rename", rename)
        yield disk

"""What a save asks of the file system, one call each, so that a test can make any of them fail.

A name counts when its folder has been synced, its content when the file has; callers order those
calls.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from prpc_engine import durable
from prpc_engine.errors import ConfigError
from shard import runtime

FILE_MODE = 0o600


def checked_folder(folder: object, root: str | None) -> Path:
    """`folder` as a path: absolute, and below `root` when there is one, links followed. ConfigError
    says what is allowed.
    """
    if not isinstance(folder, str) or "\0" in folder or not os.path.isabs(folder):
        raise ConfigError(
            f"checkpoint folder {folder!r}: an absolute path on the servers' disks is allowed"
        )
    real = Path(os.path.realpath(folder))
    if root is not None and not real.is_relative_to(os.path.realpath(root)):
        raise ConfigError(
            f"checkpoint folder {folder!r} is not below {root!r}, "
            "where this server's checkpoint_root confines it"
        )
    return real


class Files:
    """The file operations of checkpoints, on the real file system. Tests put others in their place
    that fail or lose what was not synced. Every method raises OSError.
    """

    def make_folder(self, path: Path) -> None:
        """With those above it, whose names are on the disk when this returns; one that is there is
        as good.
        """
        durable.make_folder(path)

    def create(self, path: Path) -> int:
        """A descriptor of a new, empty file; the caller closes it."""
        return os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE
        )

    def write_at(self, fd: int, data: memoryview, offset: int) -> None:
        """All of `data` (bytes, contiguous)."""
        while data:
            written = os.pwrite(fd, data, offset)
            data = data[written:]
            offset += written

    def sync(self, fd: int) -> None:
        """What was written is on the disk when this returns."""
        runtime.fsync(fd)

    def close(self, fd: int) -> None:
        """The descriptor is free."""
        os.close(fd)

    def rename(self, path: Path, to: Path) -> None:
        """At once; an empty or absent folder may be at `to`."""
        os.rename(path, to)

    def sync_folder(self, path: Path) -> None:
        """The names in it are on the disk when this returns."""
        durable.sync_folder(path)

    def names(self, path: Path) -> list[str]:
        """Of what is in the folder."""
        return os.listdir(path)

    def remove_tree(self, path: Path) -> None:
        """A folder with all in it; another process may be removing it as well."""
        while path.exists():
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(path)

    def written_at(self, path: Path) -> float:
        """When the file, or what is in the folder, was changed last, by the file system's clock, in
        seconds.
        """
        return max(
            float(each.lstat().st_mtime)
            for each in (path, *(path.iterdir() if path.is_dir() else ()))
        )

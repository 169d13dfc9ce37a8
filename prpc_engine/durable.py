"""Folders whose names outlive a crash of their host.

A folder is on the disk when the one that it is in has been synced. Who finds it there cannot know
whether whoever made it came so far: a process that was killed in between leaves a folder that the
next crash takes away, with all that was written to it meanwhile. So both sync the names of all
folders on the way that this user may have made.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from shard import runtime

FOLDER_MODE = 0o700


def make_folder(folder: Path) -> None:
    """With those above it, for this user alone whatever the umask; one that is there is as good.
    Their names are on the disk when this returns. Raises OSError.
    """
    path = folder.absolute()
    # one by one: mkdir(parents=True) makes those above for whom the umask lets in
    for each in reversed([path, *path.parents]):
        with contextlib.suppress(FileExistsError):
            each.mkdir(FOLDER_MODE)
    while path != path.parent and path.stat().st_uid == os.geteuid():
        with contextlib.suppress(PermissionError):  # one that may be written and not read
            sync_folder(path.parent)
        path = path.parent


def sync_folder(folder: Path) -> None:
    """The names in it are on the disk when this returns. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        runtime.fsync(fd)
    finally:
        os.close(fd)

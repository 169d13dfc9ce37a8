"""The disk of a simulated host: a real folder, of which a crash of the host keeps what was synced.

    what                             after a crash (a kill of a process loses nothing)
    content, synced (fsync,          as it was when the sync began, or later
     fdatasync)
    content written since            lost, or there up to some byte, or there; of what is behind
                                     that byte a part may be zeros
    names, the folder synced         as they were
    names made, removed or changed   each change happened or did not; a rename within its folder as
     since                           a whole, from one to another as two changes
    a sync under way                 as if it had not begun

A file is an inode: its descriptor is held here from its first sync on, so that its number is not
used again for another file meanwhile.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from prpc_engine.simulation.errors import SimulationError

# A sync takes so many seconds; one in so many up to SLOW_S_MAX.
SYNC_S_MIN, SYNC_S_MAX = 50e-6, 3e-3
SLOW_CHANCE, SLOW_S_MAX = 0.02, 0.1
LOST_SHARE, WHOLE_SHARE, ZEROS_SHARE = 0.4, 0.2, 0.3  # of what becomes of unsynced content
KEPT_SHARE = 0.5  # of changes of names that were not synced
FILE_MODE, FOLDER_MODE = 0o600, 0o700

Tree = dict[str, "bytes | Tree"]


@dataclass(eq=False)
class Inode:
    """A file or a folder, as a crash leaves it at least."""

    fd: int
    is_folder: bool
    content: bytes = b""
    names: dict[str, int] = field(default_factory=dict)  # of a folder: numbers of inodes
    sync: int = 0  # the number of the sync that this is of


@dataclass(frozen=True)
class DiskSync:
    """One that has begun: what is durable once it has ended."""

    inode: Inode
    number: int
    content: bytes
    names: dict[str, int]


class Disk:
    """One folder with all below it, files and folders. Made by Simulation.disk(), which closes it.
    Raises OSError.

    is_full  syncs fail with ENOSPC
    """

    def __init__(self, folder: Path, chance: Random) -> None:
        self.folder = Path(os.path.realpath(folder))
        self.is_full = False
        self._draw = chance.random
        self._inodes: dict[int, Inode] = {}
        self._syncs = 0
        self._root = -1
        try:
            self._take_as_durable()
        except BaseException:
            self.close()
            raise

    def has(self, path: str) -> bool:
        """Whether that path is on it."""
        return path == str(self.folder) or path.startswith(f"{self.folder}{os.sep}")

    # -- what processes ask ------------------------------------------------------------------------

    def sync_s(self) -> float:
        """How long the next sync takes."""
        if self._draw() < SLOW_CHANCE:
            return SYNC_S_MAX + (SLOW_S_MAX - SYNC_S_MAX) * self._draw()
        return SYNC_S_MIN + (SYNC_S_MAX - SYNC_S_MIN) * self._draw() ** 2

    def begin_sync(self, fd: int) -> DiskSync:
        """What is there now is durable after end_sync(). Raises OSError."""
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        inode = self._inode(fd)
        self._syncs += 1
        if inode.is_folder:
            return DiskSync(inode, self._syncs, b"", self._names(inode.fd))
        return DiskSync(inode, self._syncs, _read(inode.fd), {})

    def end_sync(self, sync: DiskSync) -> None:
        """It has reached the disk; one that began later may have done so before."""
        inode = sync.inode
        if sync.number > inode.sync:
            inode.sync, inode.content, inode.names = sync.number, sync.content, sync.names
            if inode.is_folder:
                self._forget_removed()

    def _forget_removed(self) -> None:
        """Of files that are removed for good a descriptor is of no more use."""
        durable = {number for inode in self._inodes.values() for number in inode.names.values()}
        for number, inode in list(self._inodes.items()):
            if number not in durable and not os.fstat(inode.fd).st_nlink:
                os.close(self._inodes.pop(number).fd)

    def _inode(self, fd: int) -> Inode:
        """That of an open file or folder."""
        found = os.fstat(fd)
        inode = self._inodes.get(found.st_ino)
        if inode is None:
            held = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
            inode = Inode(held, stat.S_ISDIR(found.st_mode))
            self._inodes[found.st_ino] = inode
        return inode

    def _names(self, folder_fd: int) -> dict[str, int]:
        """What is in a folder now."""
        names = {}
        for name in sorted(os.listdir(folder_fd)):
            found = os.stat(name, dir_fd=folder_fd, follow_symlinks=False)
            mode = found.st_mode
            is_file = stat.S_ISREG(mode) and found.st_nlink <= 1  # with more it has another name
            if not (is_file or stat.S_ISDIR(mode)):  # to open a pipe would wait
                raise SimulationError(
                    f"{name!r:.100} on the disk of {str(self.folder)!r:.200} is no file and no "
                    "folder: links, pipes and sockets are not simulated"
                )
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder_fd)
            try:
                self._inode(fd)
                names[name] = os.fstat(fd).st_ino
            finally:
                os.close(fd)
        return names

    # -- a crash -----------------------------------------------------------------------------------

    def crash(self) -> list[str]:
        """Keep what was synced, and by chance more; what was lost, for the timeline. No process has
        anything of it open any more.
        """
        losses: list[str] = []
        tree = self._folder_after(self._inodes[self._root], "", losses)
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        _write(self.folder, tree)
        self._take_as_durable()
        return losses

    def _take_as_durable(self) -> None:
        """All that is there."""
        self.close()
        root = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._root = os.fstat(root).st_ino
            waiting = [self._inode(root)]
        finally:
            os.close(root)
        while waiting:
            inode = waiting.pop()
            if inode.is_folder:
                inode.names = self._names(inode.fd)
                waiting += [self._inodes[number] for number in inode.names.values()]
            else:
                inode.content = _read(inode.fd)

    def _folder_after(self, folder: Inode, path: str, losses: list[str]) -> Tree:
        durable, now = folder.names, self._names(folder.fd)
        after = dict(durable)
        for change in _changes(durable, now):
            is_kept = self._draw() < KEPT_SHARE
            if is_kept:
                for name in change:
                    after.pop(name, None)
                    if name in now:
                        after[name] = now[name]
            else:
                losses.append(f"{path or '.'}: not {_described(change, durable, now)}")
        tree: Tree = {}
        for name in sorted(after):
            inode, below = self._inodes[after[name]], f"{path}/{name}".lstrip("/")
            if inode.is_folder:
                tree[name] = self._folder_after(inode, below, losses)
            else:
                tree[name] = self._content_after(inode, below, losses)
        return tree

    def _content_after(self, file: Inode, path: str, losses: list[str]) -> bytes:
        durable, now = file.content, _read(file.fd)
        if now == durable:
            return durable
        what = self._draw()
        if what < WHOLE_SHARE:
            return now
        if what < WHOLE_SHARE + LOST_SHARE:
            after = durable
        else:
            same = next(
                (
                    at
                    for at, pair in enumerate(zip(durable, now, strict=False))
                    if pair[0] != pair[1]
                ),
                min(len(durable), len(now)),
            )
            cut = same + int(self._draw() * (len(now) - same))
            behind = durable[cut:]
            if self._draw() < ZEROS_SHARE and not behind:
                behind = bytes(int(self._draw() * (len(now) - cut)))
            after = now[:cut] + behind
        losses.append(f"{path}: {len(after)} bytes, {len(durable)} synced of {len(now)}")
        return after

    def close(self) -> None:
        """Let go of all descriptors."""
        for inode in self._inodes.values():
            os.close(inode.fd)
        self._inodes.clear()


def _changes(durable: dict[str, int], now: dict[str, int]) -> list[list[str]]:
    """Names that are not what they were; those of one rename together."""
    changed = sorted(
        name for name in durable.keys() | now.keys() if durable.get(name) != now.get(name)
    )
    group = {name: name for name in changed}
    by_inode: defaultdict[int, list[str]] = defaultdict(list)
    for name in changed:
        for names in (durable, now):
            if name in names:
                by_inode[names[name]].append(name)
    for together in by_inode.values():
        for name in together[1:]:
            one, other = group[together[0]], group[name]
            group = {each: one if of == other else of for each, of in group.items()}
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for name in changed:
        groups[group[name]].append(name)
    return sorted(groups.values())


def _described(change: list[str], durable: dict[str, int], now: dict[str, int]) -> str:
    made = [name for name in change if name in now]
    gone = [name for name in change if name not in now]
    if made and gone:
        return f"{' '.join(gone)} renamed to {' '.join(made)}"
    what = "removed" if gone else "replaced" if made[0] in durable else "made"
    return f"{' '.join(change)} {what}"


def _read(fd: int) -> bytes:
    return os.pread(fd, os.fstat(fd).st_size, 0)


def _write(folder: Path, tree: Tree) -> None:
    for name, what in tree.items():
        path = folder / name
        if isinstance(what, bytes):
            path.touch(FILE_MODE)
            path.write_bytes(what)
        else:
            path.mkdir(FOLDER_MODE)
            _write(path, what)

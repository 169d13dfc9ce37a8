"""The secret of a node that was given none: one for all processes of a user on a host, made when it
is first needed.

    folder  PRPC_HOME, else ~/.prpc of the user's entry in the password database (HOME does not
            matter: all processes of a user must find the same one), else, where that cannot be
            written, prpc-<uid> in the folder for temporary files; mode 0700
    file    "secret" in it, 64 hex digits, mode 0600

It is written under another name and linked into place: of processes that begin together one wins,
and all read what that one wrote. A folder or file of another user, or one that others may open, is
refused, as ssh refuses a key.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import secrets
import stat
from pathlib import Path

from prpc_engine.errors import ConfigError
from prpc_engine.temporary import temporary_folder

HOME_VARIABLE = "PRPC_HOME"
SECRET_BYTES = 32  # of randomness
FILE_BYTES_MAX = 4096
_REMEDY = "set PRPC_SECRET_FILE to a file that only this job can read"


class UserSecret(bytes):
    """It proves who the user is, on this host alone: listening to other hosts takes a secret of the
    job.
    """

    def __repr__(self) -> str:
        return "UserSecret(...)"  # no text shows it

    __str__ = __repr__


class NoSecret(bytes):
    """The absence of a secret, asked for by name."""

    def __repr__(self) -> str:
        return "NO_SECRET"


NO_SECRET = NoSecret()


def folder_of_user() -> Path:
    """Where this user's secret is, or will be."""
    given = os.environ.get(HOME_VARIABLE)
    if given:
        return Path(given)
    with contextlib.suppress(KeyError):  # a container may run under a number that has no name
        home = Path(pwd.getpwuid(os.geteuid()).pw_dir)
        folder = home / ".prpc"
        if folder.is_dir() or os.access(home, os.W_OK):
            return folder
    return temporary_folder() / f"prpc-{os.geteuid()}"


def user_secret() -> UserSecret:
    """Read it, or make it. Raises ConfigError where it is not safe, or cannot be made."""
    folder = folder_of_user()
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(0o700)
        _check(folder, os.lstat(folder), stat.S_ISDIR, 0o700)
        path = folder / "secret"
        if not os.path.lexists(path):
            _make(folder, path)
        return UserSecret(_read(path))
    except OSError as error:
        raise ConfigError(
            f"this user's secret in {folder} cannot be made or read: {error.strerror}; {_REMEDY}"
        ) from error


def _make(folder: Path, path: Path) -> None:
    unfinished = folder / f".{secrets.token_hex(8)}"
    descriptor = os.open(
        unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
    )
    try:
        os.fchmod(descriptor, 0o600)  # whatever the umask takes away
        content = secrets.token_hex(SECRET_BYTES).encode() + b"\n"
        # a disk that is full takes a part, which would be refused for good
        if os.write(descriptor, content) < len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(descriptor)
        with contextlib.suppress(FileExistsError):  # another process was first
            os.link(unfinished, path)
    finally:
        os.close(descriptor)
        os.unlink(unfinished)


def _read(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check(path, os.fstat(descriptor), stat.S_ISREG, 0o600)
        secret = os.read(descriptor, FILE_BYTES_MAX).strip()
    finally:
        os.close(descriptor)
    if len(secret) < 2 * SECRET_BYTES:
        raise ConfigError(
            f"this user's secret {path} has {len(secret)} characters, "
            f"{2 * SECRET_BYTES} expected: remove the file"
        )
    return secret


def _check(path: Path, status: os.stat_result, is_kind: object, mode: int) -> None:
    assert callable(is_kind)
    if not is_kind(status.st_mode):
        raise ConfigError(
            f"{path}, for this user's secret, is a link or of another kind: remove it, or {_REMEDY}"
        )
    if status.st_uid != os.geteuid():
        raise ConfigError(
            f"{path}, for this user's secret, belongs to user {status.st_uid}, "
            f"not {os.geteuid()}: {_REMEDY}"
        )
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(
            f"{path}, for this user's secret, has mode {stat.S_IMODE(status.st_mode):04o}, "
            "so that others may open it: "
            f"chmod {mode:o}, and remove a secret that somebody may have read; or {_REMEDY}"
        )

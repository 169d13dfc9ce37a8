"""What to say where a process, or its host, has no file descriptor left."""

from __future__ import annotations

import errno
import resource


def shortage_of(error: BaseException) -> OSError | None:
    """The error, or one that it was raised from, that is for want of descriptors."""
    seen: list[BaseException] = []
    looked_at: BaseException | None = error
    # an error that was raised again further up may be in its own chain
    while looked_at is not None and not any(looked_at is each for each in seen):
        if isinstance(looked_at, OSError) and looked_at.errno in (errno.EMFILE, errno.ENFILE):
            return looked_at
        seen.append(looked_at)
        looked_at = looked_at.__cause__ or looked_at.__context__
    return None


def shortage_in(what: str, error: BaseException) -> str | None:
    """The text of an error for `what`, that could not be made because of that one; None: it was not
    for want of descriptors.
    """
    shortage = shortage_of(error)
    if shortage is None:
        return None
    if shortage.errno == errno.ENFILE:
        return (
            f"this host has no file descriptors left for {what} (fs.file-max, `sysctl fs.file-nr`):"
            f" {shortage}"
        )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"this process has no file descriptors left for {what}: {soft} may be open "
        f"(RLIMIT_NOFILE, at most {hard}): raise the limit (`ulimit -n`, LimitNOFILE= of systemd, "
        "docker run --ulimit), or close what it does not need"
    )

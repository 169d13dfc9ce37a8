"""The folder for temporary files:
as `tempfile` finds it, and with an answer where that finds none.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def temporary_folder() -> Path:
    """tempfile.gettempdir(), else TMPDIR, else /tmp.

    gettempdir() raises FileNotFoundError where no folder takes a file with bytes in it: under
    `ulimit -f 0`, with full disks, in a read-only container. A folder of empty files, such as
    locks, can do without; whoever needs more gets an error of its own.
    """
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:
        return Path(os.environ.get("TMPDIR") or "/tmp")

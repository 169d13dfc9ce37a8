"""Which interpreters this package runs on: those where one thread runs Python at a time.

What has no lock of its own relies on it: a deque's popleft(), a dict's pop() and the deletion of an
attribute are steps that no other thread comes into (future.py, slab.py, mesh.py). On a
free-threaded build nothing of that has been tested.
"""

from __future__ import annotations

import sys


def _require_gil() -> None:
    is_enabled = getattr(sys, "_is_gil_enabled", None)  # from Python 3.13 on
    if "t" in getattr(sys, "abiflags", "") or (is_enabled is not None and not is_enabled()):
        raise ImportError(
            f"this package does not run on a free-threaded Python yet ({sys.executable}, "
            f"{sys.version.split()[0]}): nothing of "
            "it has been tested without the GIL; use the usual build of Python 3.10 or newer"
        )


# at import: whoever runs on another one should hear of it before anything goes wrong
_require_gil()

"""Python imports this as it starts, where `python -m tests.races.run` has put its folder on the
path: threads then sleep before statements of shard/ and prpc_engine/, at random.

A line in some thousand is late by up to two milliseconds: other threads and processes take their
turns in between. That is where hand-overs go wrong which nobody sees otherwise. Every process of a
test gets it, forked ones by their parent.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from types import FrameType
from typing import Any

SEED = os.environ.get("RACES_SEED", "")
ONE_IN = 3000  # statements
SLEEP_S_MAX = 0.002
# Of a spin each round is a statement, and a sleep in a loop that looks 10^5 times a second says
# nothing new.
_LEFT_OUT = ("/shard/memory/ring.py", "/shard/memory/memory_order.py")
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_OURS = (os.path.join(_ROOT, "shard", ""), os.path.join(_ROOT, "prpc_engine", ""))
_chance = random.Random(f"{SEED} {' '.join(sys.argv[:1])}")
_countdown = _chance.randrange(1, 2 * ONE_IN)


def _line(frame: FrameType, event: str, arg: Any) -> Any:
    global _countdown
    if event == "line":
        _countdown -= 1
        if _countdown <= 0:
            _countdown = _chance.randrange(1, 2 * ONE_IN)
            time.sleep(_chance.random() * SLEEP_S_MAX)
    return _line


def _call(frame: FrameType, event: str, arg: Any) -> Any:
    path = frame.f_code.co_filename
    return _line if path.startswith(_OURS) and not path.endswith(_LEFT_OUT) else None


if SEED:
    threading.settrace(_call)
    sys.settrace(_call)

"""A publisher in a process of its own, as `python -m`: publisher MASTER TOPIC MODE [ITEMS JSON], of
which JSON has arguments of its RpcService. It says "up", then publishes its pid and arrays of so
many elements, all of which are the item's number, until its input ends.
"""

from __future__ import annotations

import json
import os
import sys
import threading

import numpy as np

import prpc_engine
from prpc_engine import errors, topics

ITEMS = 20_000  # of an array: 80 KB, which is lent


def main() -> None:
    master, topic, mode, *more = sys.argv[1:]
    items, arguments = (int(more[0]), json.loads(more[1])) if more else (ITEMS, {})
    ends = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ends.set()), daemon=True).start()
    with (
        prpc_engine.RpcService(master, **arguments) as service,
        topics.Publisher(service, topic, "latest" if mode == "latest" else "queue") as publisher,
    ):
        print("up", flush=True)
        number = 0
        while not ends.is_set():
            number += 1
            try:
                publisher.publish([os.getpid(), np.full(items, number, np.float32)], timeout_s=0.5)
            except errors.Backpressure:
                number -= 1


if __name__ == "__main__":
    main()

"""A reader in a process of its own, as `python -m`: reader MASTER TOPIC [JSON], which has arguments
of its RpcService. It says "up", then of each item its version, its value's sum, and what was
skipped; a line "hold" has it receive no more until the next line, and to "held" it says how many
items it holds for others, and how often its memory is lent.
"""

from __future__ import annotations

import json
import sys
import threading

import numpy as np

import prpc_engine
from prpc_engine import errors, topics


def main() -> None:
    master, topic, *settings = sys.argv[1:]
    go_on, ends = threading.Event(), threading.Event()
    go_on.set()

    def listen() -> None:
        for line in sys.stdin:
            if line.strip() == "held":
                leases = service.statistics().slab.leases
                print("held", len(service.held_values.names), leases, flush=True)
            else:
                go_on.clear() if line.strip() == "hold" else go_on.set()
        ends.set()
        go_on.set()

    arguments = json.loads(settings[0]) if settings else {}
    with (
        prpc_engine.RpcService(master, **arguments) as service,
        topics.Subscriber(service, topic) as reader,
    ):
        threading.Thread(target=listen, daemon=True).start()
        print("up", flush=True)
        while not ends.is_set():
            go_on.wait()
            try:
                item = reader.receive(timeout_s=0.1)
            except errors.DeadlineExceeded:
                continue
            except topics.TakenOff:
                print("taken off", flush=True)
                continue
            value = item.value
            if isinstance(value, dict):
                value = value["w"]
            elif isinstance(value, list):
                value = value[1]
            print(item.version, float(np.sum(value)), item.skipped, flush=True)


if __name__ == "__main__":
    main()

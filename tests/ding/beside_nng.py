"""The queue beside DI-engine's own over nng, in the same run: two processes, one event there and an
empty one back, then as many as one can publish.

    python -m tests.ding.beside_nng [ipc|tcp]    where DI-engine is installed
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from typing import Any

SIZES = ((64, 2000), (20 << 10, 1000), (1_310_720, 60), (10 << 20, 15), (40 << 20, 7))
EVENTS = 20_000
SETTLE_S = 2.0  # for what a queue that drops events has not dropped
PORT = 50800


def _queue(name: str) -> Any:
    if name == "prpc":
        from prpc_engine.ding import PrpcMQ

        return PrpcMQ
    from ding.framework.message_queue.nng import NNGMQ

    return NNGMQ


def _made(name: str, places: list[str], number: int) -> Any:
    mq = _queue(name)(listen_to=places[number], attach_to=places[:number])
    mq.listen()
    return mq


def ask(name: str, places: list[str]) -> None:
    """The side that measures."""
    mq = _made(name, places, 0)
    mq.subscribe("pong")
    child = subprocess.Popen([sys.executable, "-m", "tests.ding.beside_nng", name, *places])
    mq.recv()  # it is there
    times = []
    for size, rounds in SIZES:
        data, took = os.urandom(size), []
        for _ in range(rounds + 3):
            began = time.perf_counter()
            mq.publish("ping", data)
            mq.recv()
            took.append(time.perf_counter() - began)
        took = sorted(took[3:])
        times.append(f"{size} B {took[len(took) // 2] * 1e3:.3f} ms")
    began = time.perf_counter()
    for _ in range(EVENTS):
        mq.publish("count", b"y" * 64)
    rate = EVENTS / (time.perf_counter() - began)
    time.sleep(SETTLE_S)
    mq.publish("end", b"")
    came = bytes(mq.recv()[1]).decode()
    print(
        f"{name}: {', '.join(times)}; {rate:.0f} published/s, of {EVENTS} came {came}", flush=True
    )
    mq.publish("quit", b"")
    child.wait(30)
    mq.stop()


def answer(name: str, places: list[str]) -> None:
    """The other side."""
    mq = _made(name, places, 1)
    for topic in ("ping", "count", "end", "quit"):
        mq.subscribe(topic)
    time.sleep(0.5)  # nng drops what it is told before it is connected
    mq.publish("pong", b"")
    came, first, last = 0, 0.0, 0.0
    while True:
        topic, _ = mq.recv()
        if topic == "ping":
            mq.publish("pong", b"")
        elif topic == "count":
            last = time.perf_counter()
            first = first or last
            came += 1
        elif topic == "end":
            mq.publish("pong", f"{came} at {came / (last - first):.0f}/s".encode())
        else:
            break
    mq.stop()


def main(*arguments: str) -> None:
    """Both queues by turns, or the other side of one."""
    if len(arguments) > 1:
        answer(arguments[0], list(arguments[1:]))
        return
    protocol = arguments[0] if arguments else "ipc"
    for name in ("prpc", "nng"):
        with tempfile.TemporaryDirectory() as folder:
            places = [f"ipc://{folder}/{number}.ipc" for number in range(2)]
            if protocol == "tcp":
                places = [f"tcp://127.0.0.1:{PORT + number}" for number in range(2)]
            ask(name, places)


if __name__ == "__main__":
    main(*sys.argv[1:])

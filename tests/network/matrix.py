"""Random faults on one connection after another, as many as wanted: 0 hangs, 0 wrong bytes, every
loss named.

    python -m tests.network.matrix [--cases 2000] [--seed N]  one JSON line, and exit code 1 when it
                                                              does not hold

    fault                                                           on connections
    reset, half-close or stall at a byte of either direction        plain and checked
    one bit inverted in the handshake of either direction           plain and checked
    one bit inverted anywhere, bytes repeated, bytes of an earlier  checked: on plain ones such
      connection inserted                                           bytes may be any other message
    pieces of 1 byte and more, the least socket buffers             plain and checked, alone or
                                                                    with the above

The same seed makes the same cases; how the kernel cuts their bytes is its own affair.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import secrets
import sys
import threading
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from tests.network.caller import HANDSHAKE_BYTES, Caller
from tests.network.echo_server import EchoServer
from tests.network.faults import Action, Fault, Pace, Plan
from tests.network.proxy import Proxy
from tests.network.tally import OUTCOMES, TALLY, Tally

CUTS = [Action.RESET, Action.FINISH, Action.STALL]
CHANGES = [Action.FLIP, Action.REPEAT, Action.INSERT]
RELEASE_EACH_S = 0.005  # what stalls waits that long at most
EARLIER_BYTES_MAX = 2000  # of an earlier connection


class Chance:
    """What happens in one case."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def is_checked(self) -> bool:
        return self._random.random() < 0.5

    def lanes(self) -> int:
        return self._random.choice([0, 0, 1])

    def messages(self, is_slow: bool) -> list[tuple[bytes, list[NDArray[np.uint8]]]]:
        """No two of a case are the same."""
        chance = self._random
        sizes = [
            chance.choice([0, 7, 3_000, 3_000 if is_slow else 300_000])
            for _ in range(chance.randrange(3))
        ]
        return [
            (
                bytes([number]) + chance.randbytes(chance.randrange(200)),
                [np.frombuffer(chance.randbytes(n), np.uint8) for n in sizes],
            )
            for number in range(3)
        ]

    def plan(self, is_checked: bool, earlier: bytes) -> Plan:
        chance = self._random
        direction = chance.choice(["to_server", "to_client"])
        handshake = HANDSHAKE_BYTES[direction]
        at = chance.choice(
            [
                chance.randrange(handshake),
                handshake + chance.randrange(300),
                handshake + chance.randrange(200_000),
            ]
        )
        action = chance.choice([None, *CUTS, *(CHANGES if is_checked or at < handshake else ())])
        faults = []
        if action is Action.REPEAT or action is Action.INSERT:
            faults = [Fault(action, at, count=chance.randint(1, max(1, at)), extra=earlier)]
        elif action is not None:
            faults = [Fault(action, at, bit=chance.randrange(8))]
        pace = (
            Pace(chance.choice([1, 100, 10_000]))
            if at < handshake + 300 and chance.random() < 0.3
            else None
        )
        buffers = 1 if chance.random() < 0.1 else 0
        there, back = (faults, []) if direction == "to_server" else ([], faults)
        return Plan(there, back, pace, buffers)


@contextlib.contextmanager
def stalls_that_end(proxy: Proxy) -> Iterator[None]:
    over = threading.Event()

    def release() -> None:
        while not over.wait(RELEASE_EACH_S):
            proxy.release()

    thread = threading.Thread(target=release)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def run(cases: int, seed: int) -> Tally:
    """All cases, one after the other; counted in TALLY."""
    chance = Chance(seed)
    with contextlib.ExitStack() as stack:
        echo = stack.enter_context(EchoServer(handshake_s=1.0))
        proxy = stack.enter_context(Proxy(echo.where, seed))
        callers = {
            (checked, lanes): stack.enter_context(Caller(lanes, checked=checked))
            for checked in (False, True)
            for lanes in (0, 1)
        }
        stack.enter_context(stalls_that_end(proxy))
        earlier = b"\x00"
        for _ in range(cases):
            checked = chance.is_checked()
            plan = chance.plan(checked, earlier)
            proxy.plans.append(plan)
            messages = chance.messages(is_slow=plan.pace is not None or plan.buffer_bytes > 0)
            try:
                callers[checked, chance.lanes()].ask(f"tcp://{proxy.address}", *messages)
            except AssertionError:  # it is in the tally
                print(f"{'checked' if checked else 'plain'}: {plan}", file=sys.stderr)
            earlier = (
                bytes(proxy.passages[-1].to_server.course.recorded[-EARLIER_BYTES_MAX:]) or earlier
            )
            proxy.passages.clear()
            proxy.plans.clear()
    return TALLY


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.network.matrix",
        description=" ".join((__doc__ or "").partition("\n\n")[0].split()),
    )
    parser.add_argument(
        "--cases", type=int, default=2000, help="connections (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=secrets.randbits(32), help="repeats the cases of another run"
    )
    arguments = parser.parse_args()
    tally = run(arguments.cases, arguments.seed)
    print(
        json.dumps(
            {"seed": arguments.seed, **{outcome: tally.counts[outcome] for outcome in OUTCOMES}}
        )
    )
    return 0 if tally.holds() else 1


if __name__ == "__main__":
    raise SystemExit(main())

"""Exceptions that another thread throws into one that calls, at random instants: nothing is lost,
nothing hangs, and nothing is left behind.
"""

from __future__ import annotations

import json
import os

import pytest

from prpc_engine import Master
from tests.program import Program

THROWS = int(os.environ.get("PRPC_TEST_INTERRUPTS") or 50)  # into each verb
VERBS = {"shm": ("call", "own", "array", "submit", "stream", "push"), "tcp": ("call", "array")}


@pytest.mark.parametrize("transport", VERBS)
def test_connections_calls_and_tables_stay_whole(
    transport: str, master: Master, seed: int, subtests: pytest.Subtests
) -> None:
    with Program("tests.prpc_engine.interrupted", "serve", master.address) as server:
        assert server.read_line() == "ready"
        for verb in VERBS[transport]:
            with (
                subtests.test(verb=verb),
                Program(
                    *("tests.prpc_engine.thrown", master.address, verb, "ctypes", transport),
                    *(str(THROWS), str(seed)),
                ) as caller,
            ):
                caller.patience_s += THROWS / 50  # some 5 ms each, on a machine with other work
                came = json.loads(caller.read_line())
                assert came.get("hit", 0) + came.get("late", 0) == THROWS, came
                assert came["errors"] == {}
                assert set(came["beside"]) == {"calls"}, came
                assert came["left"] == []
                assert came["lost"] == 0
                least = came["done"] if verb == "push" else 0
                most = came["done"] + came.get("hit", 0) if verb == "push" else 0
                assert all(least <= one <= most for one in came["grown"]), came

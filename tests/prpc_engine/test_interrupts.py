"""Signal handlers that raise, at random instants of calls: nothing is lost, and nothing hangs."""

from __future__ import annotations

import json
import os

import pytest

from prpc_engine import Master
from tests.program import Program

HITS = int(os.environ.get("PRPC_TEST_INTERRUPTS") or 50)  # of each verb


@pytest.mark.parametrize("number", ["SIGINT", "SIGALRM"])
def test_connections_calls_and_tables_stay_whole(
    number: str, master: Master, seed: int, subtests: pytest.Subtests
) -> None:
    with Program("tests.prpc_engine.interrupted", "serve", master.address) as server:
        assert server.read_line() == "ready"
        for verb in ("call", "own", "array", "submit", "stream", "push"):
            with (
                subtests.test(verb=verb),
                Program(
                    *("tests.prpc_engine.interrupted", "call", master.address),
                    *(verb, number, str(HITS), str(seed)),
                ) as caller,
            ):
                caller.patience_s += HITS / 50  # some 5 ms each, on a machine with other work
                came = json.loads(caller.read_line())
                assert came["hit"] == HITS
                least = came["done"] if verb == "push" else 0
                most = came["done"] + came["hit"] if verb == "push" else 0
                assert all(least <= one <= most for one in came["grown"])
                assert len(set(came["grown"])) == 1


def test_calls_that_signal_handlers_make_in_the_middle_of_others_are_answered(
    master: Master, seed: int, subtests: pytest.Subtests
) -> None:
    with Program("tests.prpc_engine.interrupted", "serve", master.address) as server:
        assert server.read_line() == "ready"
        for verb in ("call", "own", "array", "submit", "stream", "push"):
            with (
                subtests.test(verb=verb),
                Program(
                    *("tests.prpc_engine.interrupted", "nested", master.address),
                    *(verb, str(HITS), str(seed)),
                ) as caller,
            ):
                caller.patience_s += HITS / 50
                ended = json.loads(caller.read_line())
                assert list(ended) == ["right"]
                assert ended["right"] >= HITS  # one more may come between two uses

import random

import numpy as np
import pytest

from prpc_engine.idempotency_window import FORGOTTEN, NEW, SEEN
from prpc_engine.kv.consistency.ledger import WINDOW, Ledger, LedgerNode

ONE, OTHER = 2**63 + 5, 7


def test_a_push_is_new_once() -> None:
    ledger = Ledger()
    for sequence in (1, 2, 3):
        assert ledger.find(ONE, sequence) == NEW
        ledger.note(ONE, sequence)
        assert ledger.find(ONE, sequence) == SEEN
    assert ledger.find(OTHER, 1) == NEW
    assert ledger.highest(ONE) == 3
    assert ledger.highest(OTHER) == 0


def test_pushes_may_come_in_any_order_and_with_gaps(seed: int) -> None:
    chooser = random.Random(seed)
    ledger = Ledger()
    applied = chooser.sample(range(1, WINDOW), 500)
    for sequence in applied:
        assert ledger.find(ONE, sequence) == NEW
        ledger.note(ONE, sequence)
    for sequence in range(1, WINDOW):
        assert ledger.find(ONE, sequence) == (SEEN if sequence in applied else NEW)


def test_what_fell_out_of_the_window_is_neither_new_nor_applied() -> None:
    ledger = Ledger()
    ledger.note(ONE, 1)
    ledger.note(ONE, 3)
    ledger.note(ONE, 3 + WINDOW)
    assert ledger.find(ONE, 3) == FORGOTTEN
    assert ledger.find(ONE, 2) == FORGOTTEN
    assert ledger.find(ONE, 4) == NEW


def test_the_client_that_was_quiet_for_longest_is_forgotten_first() -> None:
    ledger = Ledger(clients_max=2)
    ledger.note(1, 1)
    ledger.note(2, 1)
    ledger.note(1, 2)
    ledger.note(3, 1)
    assert [ledger.find(client, 1) for client in (1, 2, 3)] == [SEEN, NEW, SEEN]
    assert ledger.senders_forgotten == 1
    assert len(ledger) == 2


def test_a_ledger_comes_back_from_its_arrays(seed: int) -> None:
    chooser = random.Random(seed)
    ledger = Ledger()
    for client in (ONE, OTHER):
        for sequence in chooser.sample(range(1, 2 * WINDOW), 3000):
            if ledger.find(client, sequence) == NEW:
                ledger.note(client, sequence)
    other = Ledger()
    other.load(ledger.arrays())
    for client in (ONE, OTHER, 1):
        for sequence in range(1, 2 * WINDOW):
            assert other.find(client, sequence) == ledger.find(client, sequence), (client, sequence)
    again = other.arrays()
    for name, array in ledger.arrays().items():
        np.testing.assert_array_equal(again[name], array)


def test_the_arrays_in_checkpoints_and_replicas_are_read_and_written_as_ever() -> None:
    """By hand: of ONE pushes 1, 2, 3, 5 and 9 were applied; of OTHER all up to 5000, and 5002."""
    saved = {
        "client": np.array([ONE, OTHER], np.uint64),
        "floor": np.array([3, 5000], np.int64),
        "highest": np.array([9, 5002], np.int64),
        "above": np.array([[0xFF] * 511 + [0b1000_1011], [0xFF] * 511 + [0b1011_1111]], np.uint8),
    }
    ledger = Ledger()
    ledger.load(saved)
    assert [n for n in range(1, 11) if ledger.find(ONE, n) is SEEN] == [1, 2, 3, 5, 9]
    lowest = 5002 - WINDOW
    assert [ledger.find(OTHER, n) for n in (lowest, lowest + 1, 5000, 5001, 5002, 5003)] == [
        FORGOTTEN,
        SEEN,
        SEEN,
        NEW,
        SEEN,
        NEW,
    ]
    for name, array in ledger.arrays().items():
        assert array.dtype == saved[name].dtype
        np.testing.assert_array_equal(array, saved[name])


@pytest.mark.parametrize("first_is_further", [True, False])
def test_ledgers_that_come_together_know_what_either_knew(first_is_further: bool) -> None:
    near, far = Ledger(), Ledger()
    for sequence in (1, 2, 5):
        near.note(ONE, sequence)
    for sequence in (1, 3, 9):
        far.note(ONE, sequence)
    first, second = (far, near) if first_is_further else (near, far)
    first.load(second.arrays())
    assert [sequence for sequence in range(1, 12) if first.find(ONE, sequence) == SEEN] == [
        1,
        2,
        3,
        5,
        9,
    ]
    assert first.highest(ONE) == 9


def test_each_clients_node_is_asked_for_once_and_is_nobody_in_a_copy() -> None:
    nodes = iter([LedgerNode(11, "eleven"), LedgerNode(12, "twelve")])
    ledger = Ledger(pusher=lambda: next(nodes))
    for client, sequence in ((1, 1), (2, 1), (1, 2), (1, 3)):
        ledger.note(client, sequence)
    assert list(ledger.pushes()) == [(2, (12, "twelve"), 1), (1, (11, "eleven"), 3)]
    copy = Ledger()
    copy.load(ledger.arrays())
    copy.note(1, 4)
    assert list(copy.pushes()) == [(2, None, 1), (1, None, 4)]

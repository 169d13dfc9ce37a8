"""The screen of `prpc top`: what fits, in which order, and what keys change."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Sequence

import pytest

from prpc_engine import Master, cli
from prpc_engine.cli.top_table import ClassRow, Row
from prpc_engine.cli.top_view import COLUMNS, View, arranged, blocks, first_row, fitting, pressed
from tests.prpc_engine.cli.test_commands import ROOT, TIMEOUT_S

BUSY = ClassRow(99.0, 10.0, 0)
ROWS = [
    Row("rank 0", 1, served_per_s=5.0, waits_for={"rank 1": 2, "rank 2": 2}),
    Row("rank 1", 2, served_per_s=None, waits_for={"rank 0": 3}),
    Row("rank 2", 3, served_per_s=7.0),
    Row("rank 3", error="NotSent: nobody listens"),
]


def after(keys: Sequence[str], rows: int = 100, page: int = 10) -> View:
    view = View()
    for key in keys:
        view = pressed(view, key, rows, page)
    return view


def names(view: View) -> str:
    return "".join(row.who.removeprefix("rank ") for row in arranged(ROWS, view))


def test_rows_are_in_the_order_of_ranks_until_a_key_sorts_them() -> None:
    assert names(View()) == "0123"
    assert names(after(["r"])) == "3210"


def test_a_column_sorts_its_largest_first_and_what_has_no_value_last() -> None:
    assert names(View("served_per_s")) == "2013"
    assert names(View("served_per_s", reverse=True)) == "0213"
    assert names(View("who")) == "0123", "names begin with the first"


def test_waiting_sorts_by_the_number_of_calls() -> None:
    assert names(View("waits_for")) == "0123"
    assert names(View("waits_for", reverse=True)) == "2103"


def test_classes_sort_by_what_waits_in_them() -> None:
    waiting = [
        Row(str(number), classes={"BULK": ClassRow(None, None, number), "other": BUSY})
        for number in range(3)
    ]
    assert [row.who for row in arranged(waiting, View("classes"))] == ["2", "1", "0"]


def test_s_goes_through_all_columns_and_back_to_ranks() -> None:
    seen = [after(["s"] * count).sorted_by for count in range(len(COLUMNS) + 2)]
    assert seen == ["", *COLUMNS, ""]
    assert after(["S"]).sorted_by == COLUMNS[-1]
    assert after(["s", "S"]) == View()


@pytest.mark.parametrize(
    ("keys", "row"),
    [
        (["down"], 1),
        (["up"], 0),
        (["j", "j", "k"], 1),
        (["page down", "page down"], 20),
        (["end"], 90),
        (["end", "down"], 90),
        (["end", "page up"], 80),
        (["end", "home"], 0),
        (["end", "s"], 0),
    ],
)
def test_rows_move_within_those_there_are(keys: list[str], row: int) -> None:
    assert after(keys).row == row


def test_a_screen_that_holds_all_rows_does_not_move() -> None:
    assert after(["end", "down", "page down"], rows=3).row == 0
    assert first_row(50, rows=3, page=10) == 0, "rows that were there are gone"


def test_columns_move_behind_the_first_and_stop_at_the_last() -> None:
    assert after(["left"]).column == 1
    assert after(["right", "l", "h"]).column == 2
    assert after(["right"] * 99).column == len(COLUMNS) - 1


def test_any_other_key_changes_nothing() -> None:
    assert after(["x", "\x1b", "\x00", "é"]) == View()


def test_columns_are_shown_whole_as_many_as_fit() -> None:
    widths = [6, 5, 5, 5]
    assert fitting(widths, 1, room=22) == [0, 1, 2]
    assert fitting(widths, 1, room=21) == [0, 1]
    assert fitting(widths, 3, room=22) == [0, 3]
    assert fitting(widths, 1, room=1) == [0, 1], "two, however narrow"


@pytest.mark.parametrize("room", [1, 10, 22, 1000])
def test_tables_below_each_other_have_every_column_once(room: int) -> None:
    found = blocks([6, 5, 5, 5, 30], room)
    assert [column for block in found for column in block[1:]] == [1, 2, 3, 4]
    assert all(block[0] == 0 for block in found)


# -- at a terminal ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [("q", cli.OK, b""), ("SIGTERM", cli.INTERRUPTED, b"prpc: interrupted\n")],
)
def test_top_sorts_by_a_key_and_leaves_the_terminal_as_it_was(
    end: str, code: int, said: bytes
) -> None:
    ours, its = pty.openpty()
    try:
        fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("4H", 24, 40, 0, 0))
        before = termios.tcgetattr(its)
        with Master() as master:
            command = [sys.executable, "-m", "prpc_engine.cli", "top", master.address]
            with subprocess.Popen(
                ["setsid", "-c", *command, "--interval", "0.1"],
                stdin=its, stdout=its, stderr=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm"},
            ) as top:  # fmt: skip
                try:
                    read_until(ours, b"by rank")
                    os.write(ours, b"\x1b[Cs")
                    read_until(ours, b"by who")
                    if end == "q":
                        os.write(ours, b"q")
                    else:
                        top.terminate()
                    read_until(ours, b"\x1b[?1049l")  # the screen as it was before
                    _, errors = top.communicate(timeout=TIMEOUT_S)
                finally:
                    top.kill()
        assert (top.returncode, errors) == (code, said)
        assert termios.tcgetattr(its) == before
    finally:
        os.close(ours)
        os.close(its)


def test_a_terminal_that_cannot_be_drawn_on_gets_tables() -> None:
    ours, its = pty.openpty()
    try:
        with Master() as master:
            command = [sys.executable, "-m", "prpc_engine.cli", "top", master.address]
            with subprocess.Popen(
                [*command, "--interval", "0.1"],
                stdin=its, stdout=its, stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "dumb"},
            ) as top:  # fmt: skip
                try:
                    read_until(ours, b"served/s")
                finally:
                    top.kill()
    finally:
        os.close(ours)
        os.close(its)


def read_until(terminal: int, text: bytes) -> None:
    shown = b""
    while text not in shown:
        shown += os.read(terminal, 65536)

"""Which rows and columns of `prpc top` are on the screen, and what a key changes. No I/O here.

key                    does
s, S                   sorts by the next or the previous column; behind the last: by rank again
r                      turns that order round
up, down, k, j         moves by a row
page up, page down     moves by a screen
home, end              moves to the first or the last row
left, right, h, l      moves by a column; `who` stays
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from prpc_engine.cli.top_table import HEADINGS, Row

COLUMNS = tuple(name for name, _ in HEADINGS)
GAP = 3  # characters between two columns
HELP = "q quit  s sort  r reverse  arrows move"
_ORDERS = ("", *COLUMNS)  # "": by rank


@dataclass(frozen=True)
class View:
    """What the user has chosen."""

    sorted_by: str = ""  # a column; "" is the order of ranks
    reverse: bool = False  # largest first is the order of a column
    row: int = 0  # the first on the screen
    column: int = 1  # the first behind `who`, as an index into COLUMNS


def pressed(view: View, key: str, rows: int, page: int) -> View:
    """The view after a key; the same where the key means nothing.

    `rows`: how many there are; `page`: how many of them fit on the screen.
    """
    if key in ("s", "S"):
        order = _ORDERS.index(view.sorted_by) + (1 if key == "s" else -1)
        return replace(view, sorted_by=_ORDERS[order % len(_ORDERS)], row=0)
    if key == "r":
        return replace(view, reverse=not view.reverse)
    steps = {"up": -1, "k": -1, "down": 1, "j": 1, "page up": -page, "page down": page}
    steps |= {"home": -rows, "end": rows}
    if key in steps:
        return replace(view, row=first_row(view.row + steps[key], rows, page))
    if key in ("left", "h", "right", "l"):
        column = view.column + (1 if key in ("right", "l") else -1)
        return replace(view, column=min(max(1, column), len(COLUMNS) - 1))
    return view


def first_row(row: int, rows: int, page: int) -> int:
    """`row`, or the nearest one at which the screen has no empty end."""
    return max(0, min(row, rows - page))


def arranged(rows: Iterable[Row], view: View) -> list[Row]:
    """All rows in the order of the view; those without a value for it last."""
    if not view.sorted_by:
        return list(rows)[:: -1 if view.reverse else 1]
    known: list[tuple[Any, Row]] = []
    unknown: list[Row] = []
    for row in rows:
        value = getattr(row, view.sorted_by)
        if view.sorted_by == "waits_for":
            value = sum(value.values())
        elif view.sorted_by == "classes":
            value = sum(one.waiting for one in value.values())
        if value is None or row.error:
            unknown.append(row)
        else:
            known.append((value, row))
    of_text = view.sorted_by == "who"  # a, b, c is the usual order of those
    known.sort(key=lambda pair: pair[0], reverse=view.reverse == of_text)
    return [row for _, row in known] + unknown


def fitting(widths: Sequence[int], first: int, room: int) -> list[int]:
    """The columns that fit beside each other: `who`, then from `first` on; two at least.

    `widths`: of each of COLUMNS; `room`: of the screen, in characters.
    """
    shown = [0]
    used = widths[0]
    for column in range(max(1, first), len(widths)):
        used += GAP + widths[column]
        if used > room and len(shown) > 1:
            break
        shown.append(column)
    return shown


def blocks(widths: Sequence[int], room: int) -> list[list[int]]:
    """All columns, as many tables as it takes, each as wide as the room."""
    found: list[list[int]] = []
    first = 1
    while first < len(widths):
        found.append(fitting(widths, first, room))
        first = found[-1][-1] + 1
    return found

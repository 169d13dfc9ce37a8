"""What `prpc top` draws: a screen that follows keys, or tables one after the other."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

from prpc_engine.cli.console import make_console
from prpc_engine.cli.keys import Keys
from prpc_engine.cli.top_table import HEADINGS, Row, cells
from prpc_engine.cli.top_view import HELP, View, arranged, blocks, first_row, fitting, pressed
from shard import escaped

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

FRAME_LINES = 5  # of a screen that are no rows: heading and line above it and below, the help
EDGES = 2  # characters beside a table
ERRORS_MAX = 3  # lines of them on a screen


def has_screen() -> bool:
    """Whether standard output is a terminal that can be drawn on: TERM=dumb shows nothing then."""
    console = make_console()
    return console.is_terminal and not console.is_dumb_terminal


class Tables:
    """One table after the other: for files, pipes and a single look."""

    def __init__(self) -> None:
        self._console = make_console()

    def __enter__(self) -> Tables:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def wait(self, seconds: float) -> bool:
        """Until the next look; True: there is to be one."""
        time.sleep(seconds)
        return True

    def show(self, found: Sequence[Row]) -> None:
        """Print it; where it is wider than the terminal, as tables below each other."""
        texts = _texts(found)
        for columns in blocks(_widths(texts), self._console.width - EDGES):
            self._console.print(_table(texts, columns))
        for line in _errors(found):
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class Screen:
    """The whole terminal while the block runs; the rows of the last look, as the keys want them.

    SIGTERM is KeyboardInterrupt meanwhile, so that it leaves the terminal as it was.
    """

    def __init__(self) -> None:
        from rich.live import Live

        self._console = make_console()
        self._live = Live(console=self._console, auto_refresh=False, screen=True)
        self._keys = Keys()
        self._view = View()
        self._found: Sequence[Row] = ()

    def __enter__(self) -> Screen:
        self._on_term = signal.signal(signal.SIGTERM, _interrupt)
        self._keys.__enter__()
        self._live.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._live.__exit__(kind, error, traceback)
        finally:
            self._keys.__exit__(kind, error, traceback)
            signal.signal(signal.SIGTERM, self._on_term)

    def wait(self, seconds: float) -> bool:
        """Follow keys until the next look; False: the user has enough."""
        until = time.monotonic() + seconds
        while key := self._keys.wait(max(0.0, until - time.monotonic())):
            if key == "q":
                return False
            self._view = pressed(self._view, key, len(self._found), self._page())
            self._draw()
        return True

    def show(self, found: Sequence[Row]) -> None:
        """Draw these from now on."""
        self._found = found
        self._draw()

    def _page(self) -> int:
        errors = min(ERRORS_MAX, len(_errors(self._found)))
        return max(1, self._console.height - FRAME_LINES - errors)

    def _draw(self) -> None:
        if self._found:  # the first look has nothing to compare with
            self._live.update(self._drawn(), refresh=True)

    def _drawn(self) -> Group:
        from rich.console import Group
        from rich.text import Text

        page = self._page()
        ordered = arranged(self._found, self._view)
        first = first_row(self._view.row, len(ordered), page)
        texts = _texts(ordered)
        columns = fitting(_widths(texts), self._view.column, self._console.width - EDGES)
        errors = _errors(self._found)
        if len(errors) > ERRORS_MAX:
            errors[ERRORS_MAX - 1 :] = [f"{len(errors) - ERRORS_MAX + 1} more are silent"]
        last = min(first + page, len(ordered))
        order = dict(HEADINGS).get(self._view.sorted_by, "rank")
        order += ", reversed" if self._view.reverse else ""
        state = f"rows {first + 1}-{last} of {len(ordered)} by {order}  "
        lines = [*errors, state + HELP]
        return Group(
            _table(texts[first:last], columns),
            *(Text(line, no_wrap=True, overflow="ellipsis") for line in lines),
        )


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _texts(found: Sequence[Row]) -> list[list[str]]:
    return [[escaped(cell) for cell in cells(row)] for row in found]  # names are those of members


def _errors(found: Sequence[Row]) -> list[str]:
    return [escaped(f"{row.who}: {row.error}") for row in found if row.error]


def _widths(texts: Sequence[Sequence[str]]) -> list[int]:
    return [
        max(len(heading), *(len(row[column]) for row in texts), 0)
        for column, (_, heading) in enumerate(HEADINGS)
    ]


def _table(texts: Sequence[Sequence[str]], columns: Sequence[int]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        name, heading = HEADINGS[column]
        table.add_column(
            heading,
            justify="left" if name in ("who", "waits_for") else "right",
            no_wrap=True,
            overflow="ellipsis",
        )
    for row in texts:
        table.add_row(*(Text(row[column]) for column in columns))
    return table

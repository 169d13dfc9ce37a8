"""Where tables are printed: as wide as the terminal is; in a file or a pipe, as wide as they need
to be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

FILE_WIDTH = 1000  # of lines that nobody folds: what looks through them finds a cell as a whole


def make_console() -> Console:
    """Of standard output."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console.width = FILE_WIDTH
    return console

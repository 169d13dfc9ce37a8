"""Where tables are printed: as wide as the terminal is; in a file or a pipe, as wide as they need
to be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

FILE_WIDTH = 1000  # of lines that nobody folds: what looks through them finds a cell as a whole


def make_console(*, stderr: bool = False) -> Console:
    """Of standard output, or of standard error. Printing raises BrokenPipeError when the reader
    has gone: rich would end the process with 1, and main() has a code for that.
    """
    from rich.console import Console

    class OurConsole(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    console = OurConsole(stderr=stderr)
    if not console.is_terminal:
        console.width = FILE_WIDTH
    return console

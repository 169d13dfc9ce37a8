"""What ends a queue, by name. Each is caught as an error of this package and, where vLLM raises
one, as the RuntimeError that programs written for it expect.

    raised at   error        when                                       who has to act
    the writer  ReaderLost   a reader died, hung up or was dropped      end the job, or restart it
    a reader    WriterLost   the writer died, or has shut down          the same
    either      QueueClosed  shutdown() was called at this end          nobody: the program ends
    either      WrongEnd     enqueue() at a reader, dequeue() at the    fix the caller
                             writer

A deadline that passes is errors.DeadlineExceeded, a TimeoutError.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from prpc_engine import errors


class ReaderLost(errors.NotSent, RuntimeError):
    """A reader of the queue is gone without shutdown(); nothing was enqueued. A RuntimeError, too.

    `rank`: the reader's, or None where all have shut down; `pid`: of its process.
    """

    def __init__(self, text: str, rank: int | None = None, pid: int = 0) -> None:
        super().__init__(text)
        self.rank, self.pid = rank, pid

    def __reduce__(self) -> tuple[Any, ...]:
        """For copy and pickle, which would call it with the text alone."""
        return type(self), (*self.args, self.rank, self.pid)


class WriterLost(errors.RpcError, RuntimeError):
    """The writer of the queue is gone, and all that came from it was dequeued. A RuntimeError, too.

    `pid`: of its process; `has_shut_down`: it said so; else it died or its connection broke.
    """

    def __init__(self, text: str, pid: int = 0, has_shut_down: bool = False) -> None:
        super().__init__(text)
        self.pid, self.has_shut_down = pid, has_shut_down

    def __reduce__(self) -> tuple[Any, ...]:
        """As above."""
        return partial(type(self), pid=self.pid, has_shut_down=self.has_shut_down), self.args


class QueueClosed(errors.Closed, RuntimeError):
    """shutdown() was called at this end of the queue. A RuntimeError, too."""


class WrongEnd(errors.RpcError, RuntimeError):
    """That method is not for this end of the queue. A RuntimeError, too."""

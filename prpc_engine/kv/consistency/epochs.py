"""Epochs of the tables of plain servers: which beginning of a table a request is meant for, and
which one a server holds.

    epoch  a whole number that the master keeps for each table (catalog.py); it grows when the table
           begins again: made anew, restored from a checkpoint, or reset. 0: of a table that no
           master knows
    life   a random number of one server process: the tables that it held are gone when another
           process is in its place

A worker asks for a table by its name and epoch in one text, under which the server finds it in a
dict: so a request for what is there pays nothing for the check, and one for something else finds
nothing. What is answered then:

    the server holds of that name  answers   the worker then
    nothing                        RowsLost  raises it, until somebody restores or resets the table
    an older epoch                 Behind    asks again until its deadline: a restore or a reset is
                                             under way; RowsLost then: its worker has died, say
    a newer epoch                  Outdated  takes the new epoch, and raises EpochChanged
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from prpc_engine.errors import Rejected, RemoteError, RpcError

# what a server has: its life, and of each table the epoch; 0: of one without
Standing = tuple[int, Mapping[str, int]]
_ASKED = re.compile(r"(.*)@([0-9a-f]{16})", re.DOTALL)
_OUTDATED = re.compile(
    r"table asked for as (.*) began again as epoch ([0-9a-f]{16}), step (-?\d+)", re.DOTALL
)


class RowsLost(Rejected):
    """A server process began without the rows of a table that were on the one before it, or a
    restore or a reset was cut short, and until the deadline did not reach this server: nothing was
    read or changed there.

    Restore a checkpoint (TableWorker.restore) to go on from it, or accept the loss
    (TableWorker.reset): the table begins empty.
    """


class Behind(RpcError):
    """The server holds an older epoch of the table than the one asked for. Of servers; a worker
    asks again.
    """


class Outdated(RpcError):
    """The server holds a newer epoch of the table than the one asked for. Of servers; a worker
    raises EpochChanged.
    """


def asked_as(table: str, epoch: int) -> str:
    """What requests call that epoch of the table."""
    return f"{table}@{epoch:016x}" if epoch else table


def parsed(asked: str) -> tuple[str, int]:
    """(table, epoch) of what a request asked for; epoch 0 where it named none."""
    match = _ASKED.fullmatch(asked)
    return (match[1], int(match[2], 16)) if match else (asked, 0)


def outdated(asked: str, epoch: int, step: int) -> Outdated:
    """The answer to a request for an epoch that is over. step: of the checkpoint that the new one
    began with; -1: it is empty.
    """
    return Outdated(f"table asked for as {asked} began again as epoch {epoch:016x}, step {step}")


def read_outdated(message: str) -> tuple[str, int, int]:
    """(table, new epoch, step) of what outdated() said."""
    match = _OUTDATED.fullmatch(message)
    if match is None:
        raise ValueError(f"no message of Outdated: {message!r}")
    return parsed(match[1])[0], int(match[2], 16), int(match[3])


def is_remote(error: BaseException, kind: type[Exception]) -> bool:
    """Whether a server raised that."""
    return isinstance(error, RemoteError) and error.type_name.rpartition(".")[2] == kind.__name__

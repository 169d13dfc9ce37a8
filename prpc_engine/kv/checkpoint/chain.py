"""How checkpoints lie over one another: a full one, above it what changed since the one below. No
disk in this file.

    newest  base=second.crc32  tables: changed rows and removed keys of sparse ones; dense ones, and
                               what is new, in full
    second  base=full.crc32    the same
    full    base=None          tables: all in full

A base is named by its folder's name and by the CRC-32 of its manifest, so another that came to have
that name is none. Each part goes back to the same part below it: a chain is written by one set of
servers without a restart, else the next one is full.
"""

from __future__ import annotations

from collections.abc import Sequence

from prpc_engine.errors import ConfigError
from prpc_engine.kv.checkpoint.manifest import Base, CheckpointError, Manifest, TableFile

FULL_EVERY_MAX = 1000  # a restore reads every link


def check_full_every(full_every: object) -> int:
    """`full_every`, or ConfigError."""
    if (
        isinstance(full_every, int)
        and not isinstance(full_every, bool)
        and 1 <= full_every <= FULL_EVERY_MAX
    ):
        return full_every
    raise ConfigError(
        f"full_every={full_every!r}: every how many saves one is full, 1 to {FULL_EVERY_MAX}; 1: "
        "all are"
    )


def base_for(ends: Sequence[Base | None], newest: Base | None, full_every: int) -> Base | None:
    """What the next checkpoint is laid over; None: it is full.

    ends: which checkpoint each server knows the changes since. newest: of the folder. Both agree
    unless a server was restarted, took part in no commit, or saved elsewhere.
    """
    if newest is None or any(end != newest for end in ends) or newest.links + 1 >= full_every:
        return None
    return newest


def check_link(upper: Manifest, lower: Manifest, lower_crc32: int) -> None:
    """Whether `lower` is what `upper` was laid over; raises CheckpointError."""
    base = upper.base
    assert base is not None
    if lower_crc32 != base.crc32:
        raise CheckpointError(
            f"its base {base.name} is another than the one it was laid over: "
            f"that had the checksum {base.crc32:08x}"
        )
    if base.links != lower.links:
        raise CheckpointError(
            f"its base {base.name} has another place in its chain than number {base.links}"
        )


def layers(chain: Sequence[Manifest]) -> list[list[tuple[int, TableFile]]]:
    """Of each part's table what has to be laid over what: (number in `chain`, file), the lowest
    first.

    chain: the newest first, each the base of the one before. Raises CheckpointError when changes
    have nothing under them.
    """
    found = []
    for part in chain[0].parts:
        for table in part.tables:
            pile = [(0, table)]
            while pile[-1][1].removed is not None:
                number = pile[-1][0] + 1
                below = (
                    _file_of(chain[number], part.part, table.spec) if number < len(chain) else None
                )
                if below is None:
                    raise CheckpointError(
                        f"{table.file} has changes of table {table.spec.get('table')!r}, "
                        "its base has none of it"
                    )
                pile.append((number, below))
            found.append(pile[::-1])
    return found


def _file_of(manifest: Manifest, part: int, spec: object) -> TableFile | None:
    tables = manifest.parts[part].tables if part < len(manifest.parts) else ()
    return next((table for table in tables if table.spec == spec), None)

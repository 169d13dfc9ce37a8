"""The tables that one worker knows, and their epochs: how they are created, restored, reset, and
found to have begun again.

    create    the master knows the table        its epoch is asked for; a server without it is said
                                                to have lost it
              it does not, but servers hold it  the master came back without its journal: it is told
              neither                           the table is new: the master is told first, with the
                                                lives of the servers now
              as before, with no server left    the rows are lost, however many servers there are
                                                now
              another one, with no server left  is forgotten, and this one is new
              another one, and servers hold it  ConfigError
    restore,  servers begin a new epoch, each   then the master is told. Should this worker die
      reset   with its part of the table        before, whoever creates the table next is told by a
                                                server, and tells the master

Elastic tables, and those without a master, have no epochs: the placement says of elastic ones who
holds what, and from which restore (placement.py), and the master is told which there are
(schema.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from prpc_engine.errors import BadArguments, ConfigError, DeadlineExceeded, RemoteError
from prpc_engine.kv.checkpoint.manifest import Busy, CheckpointError
from prpc_engine.kv.client.partition_client import PartitionRequest
from prpc_engine.kv.client.session import EpochChanged, Session
from prpc_engine.kv.consistency.cache import RowCache
from prpc_engine.kv.consistency.epochs import (
    Outdated,
    RowsLost,
    Standing,
    asked_as,
    is_remote,
    read_outdated,
)
from prpc_engine.kv.schema.beginnings import (
    Beginning,
    Beginnings,
    as_read,
    left_s,
    next_epoch,
)
from prpc_engine.kv.schema.layout import Dense, Sparse, layout_of, sliced
from prpc_engine.kv.schema.schema import Schemas
from prpc_engine.kv.schema.table_spec import DenseSpec, TableSpec
from shard import runtime

# of a spec: what differs between partitions
PARTITIONED = ("partition", "partitions", "begin", "end")
# while another worker's restore has changed servers, and not told the master yet
HEAL_PAUSE_S = 0.05
Ask = Callable[..., PartitionRequest]  # (partition, method, timeout_s, *arguments)
Specs = Mapping[int, TableSpec]  # of one table, by partition
# of each table: the epoch, the step of the checkpoint it began with
Epochs = dict[str, tuple[int, int]]
logger = logging.getLogger("prpc")


class Catalog:
    """A catalog creates, resets and keeps the tables that one worker knows, with their epochs.

    Owned by one worker. name: of the service, for texts. partitions: how many there are. ask: sends
    a request to one partition. known: to the master: Beginnings of plain tables, Schemas of elastic
    ones; None: there is no master.
    create() raises ConfigError where the table is there with another spec; verbs raise what servers
    and the master client do. What each of them asks and tells: the table at the file's head.
    """

    def __init__(
        self,
        name: str,
        partitions: int,
        session: Session,
        ask: Ask,
        known: Beginnings | Schemas | None,
    ) -> None:
        self.layouts: dict[str, Dense | Sparse] = {}
        self._name, self._partitions, self._session, self._ask = name, partitions, session, ask
        self._beginnings = known if isinstance(known, Beginnings) else None
        self._schemas = known if isinstance(known, Schemas) else None
        self._specs: dict[str, Specs] = {}
        self._coming: Epochs = {}  # of a restore

    def create(self, specs: Specs, timeout_s: float, cache: RowCache | None = None) -> None:
        """Make the table, or find it. Raises ConfigError."""
        until = runtime.monotonic() + timeout_s
        beginning: Beginning | None = None
        self._note(specs, until, False)
        while True:
            try:
                if self._beginnings is not None:
                    beginning = self._begun(self._beginnings, specs, beginning, until)
                made = self._made(
                    specs, beginning, left_s(until) if beginning is not None else timeout_s
                )
                break
            except RemoteError as error:
                if is_remote(error, ConfigError):
                    raise ConfigError(f"{self._name!r} refused: {error.remote_message}") from error
                if not is_remote(error, Outdated):
                    raise
                if left_s(until) <= HEAL_PAUSE_S:
                    raise DeadlineExceeded(
                        f"table {_table(specs)!r} of {self._name!r} began again on some of its "
                        f"servers, and not on all within {timeout_s:g} s: reset() or restore() "
                        "ends that"
                    ) from error
            runtime.sleep(HEAL_PAUSE_S)
        self._note(specs, until, True)
        lost = [index for index, is_new in zip(specs, made, strict=True) if is_new is None]
        table = _table(specs)
        if lost:
            logger.warning(
                "table %r of %r: partitions %s have lost their rows; "
                "verbs raise RowsLost until restore() or reset()",
                table,
                self._name,
                _told(lost),
            )
        self._take(table, specs, beginning.epoch if beginning is not None else 0, cache)

    def create_dense(self, whole: DenseSpec, is_cut: bool, timeout_s: float) -> None:
        """create(): cut over the partitions or not, except where the table is there, of this spec,
        and lies otherwise: as after a restore of what another number of partitions saved."""
        wanted, other = (sliced(whole, self._partitions, cut) for cut in (is_cut, not is_cut))
        until = runtime.monotonic() + timeout_s
        is_other = self._is_there(whole.table, other, timeout_s)
        self.create(other if is_other else wanted, left_s(until))

    def _is_there(self, table: str, specs: Specs, timeout_s: float) -> bool:
        if self._schemas is not None:
            return self._schemas.find(table, timeout_s) == specs
        if self._beginnings is not None:
            found = self._beginnings.read(table, timeout_s)
            return (
                found is not None
                and found[0].lives.keys() == specs.keys()
                and found[0].spec == _whole(specs)
            )
        return self._specs.get(table) == specs

    def _made(
        self, specs: Specs, beginning: Beginning | None, timeout_s: float
    ) -> list[bool | None]:
        extra = [
            (beginning.epoch, beginning.lives.get(index, 0)) if beginning is not None else ()
            for index in specs
        ]
        parts = [
            self._ask(index, "create_table", timeout_s, spec.to_dict(), *more)
            for (index, spec), more in zip(specs.items(), extra, strict=True)
        ]
        return [part.result() for part in parts]

    def _begun(
        self, beginnings: Beginnings, specs: Specs, before: Beginning | None, until: float
    ) -> Beginning:
        """How the table began, which the master is told where it does not know. before: what a
        server said is over.
        """
        table, whole = _table(specs), _whole(specs)
        while True:
            found = beginnings.read(table, left_s(until))
            known, version = found if found is not None else (None, None)
            is_this = (
                known is not None and known.spec == whole and known.lives.keys() == specs.keys()
            )
            if known is not None and is_this and known != before:
                return known
            standing = self._standing(specs, until)
            held = _newest([tables for _, tables in standing.values()], table)
            if known is not None and is_this and held <= known.epoch:
                return known
            if known is not None and held and known.spec != whole:
                raise ConfigError(
                    f"table {table!r} of {self._name!r} is there with another spec: "
                    f"asked for {whole}, there is {known.spec}; "
                    "every worker must use the same spec"
                )
            if known is not None and held and known.lives.keys() != specs.keys():
                raise ConfigError(
                    f"table {table!r} of {self._name!r} is on partitions {sorted(known.lives)}, "
                    f"not {sorted(specs)}; "
                    "every worker must use the same spec and expected_servers"
                )
            if held or (known is not None and known.spec == whole):
                begun = Beginning(
                    held or next_epoch(known.epoch if known is not None else 0),
                    -1,
                    whole,
                    dict.fromkeys(specs, 0),
                )
            else:
                lives = {index: life for index, (life, _) in standing.items()}
                begun = Beginning(
                    next_epoch(known.epoch if known is not None else 0), -1, whole, lives
                )
            if beginnings.try_put(table, begun, version, left_s(until)):
                return begun

    def _standing(
        self, specs: Iterable[int], until: float
    ) -> dict[int, tuple[int, dict[str, int]]]:
        """Of each partition: the life of its server, and the epochs that it holds."""
        parts = {index: self._ask(index, "standing", left_s(until)) for index in specs}
        return {index: part.result() for index, part in parts.items()}

    # What begins again

    def next_epochs(
        self, step: int, found: Mapping[int, Mapping[str, TableSpec]], timeout_s: float
    ) -> Epochs:
        """The epochs that tables begin with a restore of the checkpoint of that step."""
        if self._beginnings is None:
            return {}
        until = runtime.monotonic() + timeout_s
        # of a restore or a reset that was cut short servers have more than the master knows
        standing = [tables for _, tables in self._standing(found, until).values()]
        self._coming = {
            table: (
                self._next_epoch(self._beginnings, table, until, _newest(standing, table)),
                step,
            )
            for table in _by_table(found)
        }
        return self._coming

    def _next_epoch(self, beginnings: Beginnings, table: str, until: float, held: int = 0) -> int:
        """held: the newest that its servers have."""
        known = beginnings.read(table, left_s(until))
        layout = self.layouts.get(table)
        return next_epoch(
            max(
                known[0].epoch if known is not None else 0,
                layout.epoch if layout is not None else 0,
                held,
            )
        )

    def restored(
        self, found: Mapping[int, Mapping[str, TableSpec]], step: int, timeout_s: float
    ) -> None:
        """Servers have these tables from the checkpoint of that step now, under the epochs of the
        last next_epochs().
        """
        until = runtime.monotonic() + timeout_s
        for table, specs in _by_table(found).items():
            epoch, _ = self._coming.get(table, (0, step))
            self._take(table, specs, epoch, getattr(self.layouts.get(table), "cache", None))
            self._tell_master(table, specs, epoch, step, until)
            self._note(specs, until, True)
        for index in found:
            self._session.begin_again(index)

    def reset(self, tables: Iterable[str], timeout_s: float) -> None:
        """Begin these tables, or all that are known, anew and empty; the master is told.

        Raises ConfigError where tables have no epochs, BadArguments for a table that is not known,
        CheckpointError where a save holds pushes until the deadline, RowsLost when a server ends
        meanwhile, EpochChanged when another worker has begun a table anew meanwhile.
        """
        if self._beginnings is None:
            raise ConfigError(
                f"reset of tables of {self._name!r}: only TableServers that have a master lose "
                "rows in that way; elastic tables say so with EpochChanged and go on"
            )
        until = runtime.monotonic() + timeout_s
        names = list(tables) or sorted(self._specs)
        unknown = [table for table in names if table not in self._specs]
        if unknown:
            raise BadArguments(
                f"reset of {', '.join(unknown)}: this worker knows the tables "
                f"{', '.join(sorted(self._specs)) or 'none'}"
            )
        for table in names:
            cut_short = RowsLost(
                f"reset of table {table!r} of {self._name!r}: a server ended meanwhile, "
                "or another worker's reset did not reach all; reset again"
            )
            is_again = False
            while True:
                try:
                    if self._begin_anew(self._beginnings, table, until):
                        break
                except DeadlineExceeded as error:
                    if is_again:  # there was too little time left to try it again
                        raise cut_short from error
                    raise
                if left_s(until) <= HEAL_PAUSE_S:
                    raise cut_short
                runtime.sleep(HEAL_PAUSE_S)
                is_again = True

    def _begin_anew(self, beginnings: Beginnings, table: str, until: float) -> bool:
        """Begin the next epoch of that table on all of its servers. False when a server ended
        meanwhile, or holds pushes for a save, or another worker's reset came between and has not
        reached all: some servers hold an epoch that others do not, so the table cannot be used
        until a later one begins on all of them.
        """
        specs = self._specs[table]
        standing = self._standing(specs, until)
        held = _newest([tables for _, tables in standing.values()], table)
        epoch = self._next_epoch(beginnings, table, until, held)
        lives = {index: life for index, (life, _) in standing.items()}
        try:
            made = self._made(specs, Beginning(epoch, -1, {}, lives), left_s(until))
        except RemoteError as error:
            if is_remote(error, CheckpointError):
                if left_s(until) > HEAL_PAUSE_S:
                    return False
                raise CheckpointError(
                    f"reset of table {table!r} of {self._name!r}: {error.remote_message}"
                ) from error
            if not is_remote(error, Outdated):  # of two that reset it at a time one is later
                raise
            runtime.sleep(HEAL_PAUSE_S)  # the later one reaches the other servers about now
            if not self._has_begun(specs, read_outdated(error.remote_message)[1], until):
                return False
            raise self.began_again(error.remote_message) from error
        if None in made:
            return False
        self._take(table, specs, epoch, getattr(self.layouts.get(table), "cache", None))
        self._session.begin_anew(table, range(self._partitions))
        self._tell_master(table, specs, epoch, -1, until)
        return True

    def _has_begun(self, specs: Specs, epoch: int, until: float) -> bool:
        """Whether all servers of the table hold that epoch of it, or a later one."""
        table = _table(specs)
        standing = self._standing(specs, until)
        return all(tables.get(table, 0) >= epoch for _, tables in standing.values())

    def _tell_master(self, table: str, specs: Specs, epoch: int, step: int, until: float) -> None:
        if self._beginnings is None:
            return
        begun = Beginning(epoch, step, _whole(specs), dict.fromkeys(specs, 0))
        while True:
            known = self._beginnings.read(table, left_s(until))
            if known is not None and known[0].epoch >= epoch:
                return
            if self._beginnings.try_put(
                table, begun, known[1] if known is not None else None, left_s(until)
            ):
                return

    def _note(self, specs: Specs, until: float, is_agreed: bool) -> None:
        if self._schemas is not None:
            self._schemas.note(specs, until, is_agreed)

    def _take(self, table: str, specs: Specs, epoch: int, cache: RowCache | None) -> None:
        self._specs[table] = specs
        self.layouts[table] = replace(
            layout_of(specs, cache), epoch=epoch, asked=asked_as(table, epoch)
        )

    def began_again(self, message: str) -> EpochChanged:
        """A server has said that it holds a newer epoch: what the verb that asked for the old one
        raises.
        """
        table, epoch, step = read_outdated(message)
        layout = self.layouts.get(table)
        if layout is not None and epoch > layout.epoch:
            self.layouts[table] = replace(layout, epoch=epoch, asked=asked_as(table, epoch))
            self._session.begin_anew(table, range(self._partitions))
        began = (
            f"was restored from the checkpoint of step {step}"
            if step >= 0
            else "was reset, and began empty"
        )
        return EpochChanged(
            f"table {table!r} of {self._name!r} {began}, by another worker: "
            "what this verb asked for was not done, and "
            "acknowledged pushes since then are gone; train on from there",
            -1,
            step,
            -1,
        )

    @property
    def check_whole(self) -> Callable[[Sequence[Standing], float], None] | None:
        """What a save asks before it holds pushes; None: tables have no epochs."""
        return self._check_whole if self._beginnings is not None else None

    def _check_whole(self, standing: Sequence[Standing], timeout_s: float) -> None:
        """Raises Busy, RowsLost where servers, each of which has what `standing` says, do not all
        have the same beginning of a table, whether this worker knows it or not.
        """
        assert self._beginnings is not None
        until = runtime.monotonic() + timeout_s
        for table in sorted({name for _, tables in standing for name in tables}):
            held = {i: tables[table] for i, (_, tables) in enumerate(standing) if table in tables}
            if len(set(held.values())) > 1:
                raise Busy(
                    f"table {table!r} of {self._name!r} began again on partitions "
                    f"{_told(i for i, epoch in held.items() if epoch == max(held.values()))} only "
                    "(reset() or restore() ends that)"
                )
            if len(held) == len(standing) or table in self._specs:  # which asked_of() names
                continue
            found = self._beginnings.read(table, left_s(until))
            if found is None:
                raise Busy(
                    f"the master does not know where table {table!r} of {self._name!r} is, having "
                    "come back without its journal: servers tell it"
                )
            lives = found[0].lives  # those that may begin it empty are about to create it
            lost = [i for i in lives if i not in held and lives[i] != standing[i][0]]
            if lost:
                raise RowsLost(
                    f"partitions {_told(lost)} of table {table!r} of {self._name!r} are not on the "
                    "servers that are there now: restore() or reset() it before it is saved"
                )

    def asked_of(self, index: int) -> list[str]:
        """What requests call the tables, of those that this worker knows, that are to be in that
        partition.
        """
        return [
            self.layouts[table].asked
            for table, specs in self._specs.items()
            if index in specs and self.layouts[table].epoch
        ]


def _newest(standing: Iterable[Mapping[str, int]], table: str) -> int:
    """The newest epoch of the table that a server has; 0: none has any."""
    return max(tables.get(table, 0) for tables in standing)


def _told(partitions: Iterable[int]) -> str:
    return ", ".join(map(str, partitions))


def _table(specs: Specs) -> str:
    return next(iter(specs.values())).table


def _whole(specs: Specs) -> dict[str, Any]:
    return as_read(
        {
            key: value
            for key, value in next(iter(specs.values())).to_dict().items()
            if key not in PARTITIONED
        }
    )


def _by_table(found: Mapping[int, Mapping[str, TableSpec]]) -> dict[str, dict[int, TableSpec]]:
    tables: dict[str, dict[int, TableSpec]] = {}
    for index, specs in found.items():
        for table, spec in specs.items():
            tables.setdefault(table, {})[index] = spec
    return tables

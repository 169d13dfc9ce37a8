"""What a TableShard answers about checkpoints: one save, and one restore that has not been swapped
in, at a time.

    save  worker asks all                    this server
          standing                           which tables it has, where they have epochs: enter is
                                             told, and refuses when they have begun again meanwhile
          checkpoint_newest, of one server   what the folder's next checkpoint may lie over
                                             (chain.py), when not all are full
          checkpoint_enter                   pushes wait from now on, pulls go on; first of one
                                             server, where savers queue
          checkpoint_save, once all entered  its tables are cut; pushes that waited run, training
                                             goes on; the cut is written
          checkpoint_commit, of one server   once all have written: the checkpoint counts, unless
                                             one that was cut later does already
          checkpoint_committed               changes are counted from this one on, when not all are
                                             full
          checkpoint_release                 instead, when one failed: pushes that still wait run
          checkpoint_abort, of one server    and what was written is removed

    a push to several servers                             is in the checkpoint
    that was answered before save() was called            yes, on all of them
    that is sent after save() returned                    no, on none
    under way meanwhile                                   yes or no, on each server for itself
    that somebody sent knowing the answer of another one  only if that one is in: no effect without
                                                          its cause

    restore  checkpoint_find, of one server  the newest that is whole
             checkpoint_load                 new tables are filled beside the present ones, which
                                             serve on
             checkpoint_swap, once all have  the new ones take their place: pushes applied until
                                             then are lost
             checkpoint_forget               instead, when one failed: nothing has changed
             checkpoint_settled              again and again, until all say so: every replica has
                                             it, too

From enter to cut is one message to every server: pushes wait for some 0.1 to 1 ms. A worker that
dies between makes them wait for HOLD_S_MAX, and its save is off; what one has loaded and not
swapped in is dropped after LOADED_S_MAX.

Folders and ids come from whoever may call: a folder is checked against checkpoint_root, an id must
be 16 hexadecimal digits.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy.typing as npt

from prpc_engine.errors import ConfigError
from prpc_engine.kv.checkpoint.cut import TableCut
from prpc_engine.kv.checkpoint.files import Files, checked_folder
from prpc_engine.kv.checkpoint.gate import HeldTable, Waiting, release
from prpc_engine.kv.checkpoint.load import load_extras, load_tables, newest, newest_whole
from prpc_engine.kv.checkpoint.manifest import (
    FINAL_NAME,
    UNFINISHED_NAME,
    Base,
    Busy,
    CheckpointError,
    ServerPart,
    check_keep,
    check_step,
)
from prpc_engine.kv.checkpoint.read import ChainLink
from prpc_engine.kv.checkpoint.save import commit, discard, in_background, write_part
from prpc_engine.kv.consistency.epochs import Standing, asked_as
from prpc_engine.kv.schema.table_spec import TableSpec, from_dict
from prpc_engine.kv.table.changes import Changed, Changes
from prpc_engine.kv.table.table import DenseTable, SparseTable
from prpc_engine.rpc.peer import calling_peer
from shard import runtime

# A worker that is there needs one round to all servers between enter and cut; this is for one that
# is stopped or far away.
HOLD_S_MAX = 2.0
SAVES_MAX = 16  # that have cut and are not committed, as saves whose workers died are not
LOADED_S_MAX = 600.0  # a worker swaps once the slowest server has loaded
Array = npt.NDArray[Any]
logger = logging.getLogger("prpc")
# Of each sparse table: its changes, the epoch that ended with a cut, and the table's time then.
Epochs = dict[str, tuple[Changes, int, float]]
_Loaded = tuple[
    str, dict[str, TableSpec], dict[str, SparseTable | DenseTable], list[dict[str, Array]]
]


class CheckpointMethods:
    """The tables of one partition, and what makes and reads their checkpoints. TableShard adds the
    verbs.

    checkpoint_root: folders of checkpoints are below it, links followed; None: anywhere that this
    process may write. hold_s: for so many seconds pushes are held at most; None: HOLD_S_MAX.
    clock: gives seconds, to the tables.
    """

    def __init__(
        self,
        checkpoint_root: str | None = None,
        files: Files | None = None,
        hold_s: float | None = None,
        clock: Callable[[], float] = runtime.now,
    ) -> None:
        self.hold_s = HOLD_S_MAX if hold_s is None else hold_s
        self._clock = clock
        if checkpoint_root is not None:
            checked_folder(checkpoint_root, None)
        self._checkpoint_root = checkpoint_root
        self._files = files or Files()
        self._specs: dict[str, TableSpec] = {}
        self._sparse: dict[str, SparseTable | HeldTable[SparseTable]] = {}
        self._dense: dict[str, DenseTable | HeldTable[DenseTable]] = {}
        # of tables that have one: it, and the step of the checkpoint it began with
        self._epochs: dict[str, tuple[int, int]] = {}
        # by what requests call them (epochs.py)
        self._asked_sparse, self._asked_dense = self._sparse, self._dense
        self._save_id = ""  # of the save that holds pushes or writes
        self._waiting: Waiting | None = None  # pushes, while they are held
        self._committing = set[str]()  # the ids of the saves that this server commits
        # one after the other: each takes the number after the newest
        self._commits = runtime.Lock()
        # of saves that are not committed yet: the number of their cut, which grows
        self._cuts: OrderedDict[str, int] = OrderedDict()
        self._cut_last = self._committed_last = 0
        # of the save that is not committed yet: its id, its folder
        self._cut_at: tuple[str, Path, Epochs] | None = None
        # the checkpoint since which changes are known
        self._known: tuple[Path, Base, Epochs] | None = None
        self._loaded: _Loaded | None = None

    def _extras(self) -> dict[str, Array]:
        """Named arrays to save beside the tables, as they are now: called at the moment of the cut,
        and copied.

        Of numpy's own number types, with one axis or more; {}: none.
        """
        return {}

    def _take_extras(self, saved: Sequence[dict[str, Array]], are_all: bool) -> None:
        """Put back what _extras() gave, at the moment that the restored tables take their place.
        are_all: no other tables stay, of which what is known now still holds.

        saved: one dict, this partition's own, when as many partitions saved as there are now; else
        those of all of them, as keys have changed hands; empty when the checkpoint has none. Who
        gets several merges them by maximum: a ledger of pushes then says of each that *some*
        partition had applied that it was applied. So none counts twice; one that was under way at
        the cut, in on some partitions and not on others, stays so.
        """

    async def checkpoint_newest(self, folder: str) -> dict[str, Any] | None:
        """The folder's newest checkpoint, as a Base, and its name on the disk;
        whether its data are whole is not looked at.
        """
        path = checked_folder(folder, self._checkpoint_root)
        link = await in_background(newest, path)
        if link is None:
            return None
        try:
            # who gave it that name may have been killed before that was synced
            await in_background(self._files.sync_folder, path)
        except OSError as error:
            raise _unwritable(folder, error) from error
        base: dict[str, Any] = msgspec.to_builtins(
            Base(link.path.name, link.crc32, link.manifest.links)
        )
        return base

    def checkpoint_enter(
        self,
        save_id: str,
        folder: str,
        tables: Sequence[str] = (),
        standing: Sequence[Any] | None = None,
    ) -> dict[str, Any] | None:
        """Hold pushes, for HOLD_S_MAX at most: the checkpoint in `folder` since which changes are
        known, a Base.

        tables: what requests call those that must be here (epochs.py). standing: what was here when
        the worker looked. Busy: another save is under way, or something else is here now. RowsLost:
        one of the tables is not here, and a checkpoint would lack its rows.
        """
        path = checked_folder(folder, self._checkpoint_root)
        for asked in tables:
            if asked not in self._asked_sparse and asked not in self._asked_dense:
                raise self._absent("such", asked)
        if self._save_id:
            raise Busy("another save of these tables is under way")
        if standing is not None and tuple(standing) != self.standing():
            raise Busy("tables were created, restored or reset just now")
        _unfinished_name(save_id)
        self._save_id = save_id
        waiting = self._waiting = deque()
        self._sparse = {
            name: HeldTable(table, waiting) for name, table in self._bare_sparse().items()
        }
        self._dense = {
            name: HeldTable(table, waiting) for name, table in self._bare_dense().items()
        }
        self._name_tables()
        peer = calling_peer()
        if peer is not None:
            peer.reactor.call_later(self.hold_s, lambda: self._hold_is_over(waiting))
        known = self._known
        return msgspec.to_builtins(known[1]) if known is not None and known[0] == path else None

    async def checkpoint_save(
        self,
        save_id: str,
        folder: str,
        step: int,
        part: int,
        base: Mapping[str, Any] | None,
        tracked: bool,
    ) -> dict[str, Any]:
        """Cut the tables and write them; what was written, as plain values, once it is on the disk.

        base: of sparse tables only what changed since that checkpoint, which checkpoint_enter
        named. tracked: know what changes from now on.
        """
        if self._save_id != save_id or self._waiting is None:
            raise Busy(
                f"the cut came more than {self.hold_s} s after pushes were held, "
                "so they were let go"
            )
        cuts: list[tuple[TableSpec, TableCut]] = []
        try:
            path = checked_folder(folder, self._checkpoint_root)
            check_step(step)
            tables = self._bare_sparse() | self._bare_dense()
            known: Epochs = {}
            if base is not None:
                if self._known is None or self._known[:2] != (path, msgspec.convert(base, Base)):
                    raise Busy("another save of these tables counted since this one began")
                known = self._known[2]
            epochs: Epochs = {}
            for name, table in sorted(tables.items()):
                changed = (
                    _changed(name, table, known, epochs, tracked)
                    if isinstance(table, SparseTable)
                    else (None, None)
                )
                cuts.append((self._specs[name], TableCut(table, *changed)))
            self._cut_at = save_id, path, epochs
            self._cut_last += 1
            self._cuts[save_id] = self._cut_last
            if len(self._cuts) > SAVES_MAX:
                self._cuts.popitem(last=False)
            extras = {name: array.copy() for name, array in self._extras().items()}
            self._let_pushes_run()
            written = await write_part(
                self._files, path / _unfinished_name(save_id), part, cuts, extras
            )
            return _plain(written)
        except OSError as error:
            raise _unwritable(folder, error) from error
        finally:
            for _, cut in cuts:
                cut.close()
            self._let_pushes_run()
            self._save_id = ""

    async def checkpoint_commit(
        self,
        save_id: str,
        folder: str,
        step: int,
        parts: Sequence[Mapping[str, Any]],
        keep: int | None,
        base: Mapping[str, Any] | None,
    ) -> dict[str, Any]:
        """Make the parts that all servers have written a checkpoint: as a Base. Busy: one that was
        cut later is one already, and would be brought back no more.
        """
        path = checked_folder(folder, self._checkpoint_root)
        unfinished = path / _unfinished_name(save_id)
        try:
            found = [msgspec.convert(part, ServerPart, strict=False) for part in parts]
            over = None if base is None else msgspec.convert(base, Base)
            settings = check_step(step), found, check_keep(keep), over
            self._committing.add(save_id)
            cut = self._cuts.get(save_id, 0)
            return _plain(await in_background(self._commit, cut, path, unfinished, *settings))
        except msgspec.ValidationError as error:
            raise ConfigError(f"the parts of the checkpoint are malformed: {error}") from error
        except OSError as error:
            raise _unwritable(folder, error) from error
        finally:
            self._committing.discard(save_id)
            self._cuts.pop(save_id, None)

    def _commit(self, cut: int, *settings: Any) -> Base:
        with self._commits:
            if not cut:
                raise Busy("these tables were not cut here for this save, or long ago")
            if cut <= self._committed_last:
                raise Busy("another save, which cut these tables later, counts already")
            saved = commit(self._files, *settings)
            self._committed_last = cut
            return saved

    def checkpoint_committed(self, save_id: str, saved: Mapping[str, Any]) -> None:
        """The checkpoint that this server has cut last is on the disk as `saved`: the next one may
        lie over it.
        """
        if self._cut_at is None or self._cut_at[0] != save_id:
            raise CheckpointError("the tables have been cut or restored again since then")
        _, path, epochs = self._cut_at
        self._known = path, msgspec.convert(saved, Base), epochs
        for changes, epoch, _ in epochs.values():
            changes.forget(epoch)

    async def checkpoint_abort(self, save_id: str, folder: str) -> None:
        """Remove what a failed save has written."""
        unfinished = checked_folder(folder, self._checkpoint_root) / _unfinished_name(save_id)
        if save_id in self._committing:
            raise CheckpointError(
                f"{unfinished} is being committed: look in the folder what has become of it"
            )
        await in_background(discard, self._files, unfinished)

    def checkpoint_release(self, save_id: str) -> None:
        """Let the pushes run that a save holds which will not come to its cut."""
        if self._save_id == save_id and self._waiting is not None:
            self._hold_is_over(self._waiting)

    async def checkpoint_find(
        self, folder: str
    ) -> tuple[str, int, dict[str, list[dict[str, Any]]]]:
        """The newest checkpoint that is whole, and outlives a crash: its name, its step, and
        {table: the spec of each server that had of it}.
        """
        path = checked_folder(folder, self._checkpoint_root)
        found: ChainLink = await in_background(newest_whole, path)
        try:
            await in_background(self._files.sync_folder, path)  # as for checkpoint_newest
        except OSError as error:
            logger.warning(
                "%s cannot be synced (%s): if its host crashes, %s may be gone",
                folder,
                error.strerror or error,
                found.path.name,
            )
        # failpoint: checkpoint.found
        specs = found.manifest.specs()
        return (
            found.path.name,
            found.manifest.step,
            {name: [spec.to_dict() for spec in each] for name, each in specs.items()},
        )

    async def checkpoint_load(
        self, load_id: str, folder: str, name: str, specs: Mapping[str, Any], part: int, parts: int
    ) -> None:
        """Fill new tables of these specs from that checkpoint. ConfigError: a table is there with
        another spec.

        This is server number `part` of `parts`.
        """
        path = checked_folder(folder, self._checkpoint_root)
        peer = calling_peer()
        if not FINAL_NAME.fullmatch(name):
            raise ConfigError(f"checkpoint {name!r}: a name that checkpoint_find gave is allowed")
        wanted = {table: from_dict(spec) for table, spec in specs.items()}
        self._check_specs(wanted)
        tables = await in_background(load_tables, path / name, wanted, self._clock)
        self._loaded = (
            load_id,
            wanted,
            tables,
            await in_background(load_extras, path / name, part, parts),
        )
        if peer is not None:
            peer.reactor.call_later(LOADED_S_MAX, lambda: self.checkpoint_forget(load_id))

    def checkpoint_swap(
        self, load_id: str, epochs: Mapping[str, Sequence[int]] | None = None, step: int = -1
    ) -> None:
        """Put the loaded tables in the place of the present ones; other tables stay.

        epochs: [epoch, step of the checkpoint] of each table that begins an epoch with that. step:
        of the checkpoint; for elastic servers.
        """
        if self._loaded is None or self._loaded[0] != load_id:
            raise CheckpointError(
                "nothing is loaded, or another restore came between: restore again"
            )
        if self._waiting is not None:
            raise Busy("a save is about to cut these tables")
        _, specs, tables, extras = self._loaded
        self._check_specs(specs)  # again: some may have been created meanwhile
        for name, (epoch, _) in (epochs or {}).items():
            if self._epochs.get(name, (0, -1))[0] >= epoch:
                raise CheckpointError(
                    f"another restore or reset of table {name!r} came between: restore again"
                )
        replaced = [
            (name, table, self._epochs.get(name, (0, -1))[0])
            for name, table in (self._bare_sparse() | self._bare_dense()).items()
            if name in specs
        ]
        self._loaded = self._known = self._cut_at = None
        self._take_extras(extras, self._specs.keys() <= specs.keys())
        self._specs.update(specs)
        self._sparse.update(
            {name: table for name, table in tables.items() if isinstance(table, SparseTable)}
        )
        self._dense.update(
            {name: table for name, table in tables.items() if isinstance(table, DenseTable)}
        )
        self._epochs.update({name: (epoch, step) for name, (epoch, step) in (epochs or {}).items()})
        self._name_tables()
        for name, table, epoch in replaced:
            self._replaced(name, table, epoch)

    def _replaced(self, name: str, table: SparseTable | DenseTable, epoch: int) -> None:
        """Called with a table, and its epoch, once another one of its name is in its place."""

    def _check_specs(self, wanted: Mapping[str, TableSpec]) -> None:
        for table, spec in wanted.items():
            present = self._specs.get(table)
            if present is not None and present != spec:
                raise ConfigError(
                    f"table {table!r} is there with another spec than in the checkpoint: "
                    f"there is {present.to_dict()}, "
                    f"saved was {spec.to_dict()}; restore before creating it, "
                    "or create it as it was"
                )

    @abstractmethod
    def standing(self) -> Standing:
        """(life, {table that is here: its epoch}); see epochs.py."""

    @abstractmethod
    def _absent(self, kind: str, asked: str) -> Exception:
        """Why there is no table that requests call so."""

    def checkpoint_settled(self, load_id: str) -> bool | None:
        """Whether what checkpoint_swap() put in place is everywhere where it is to be; elastic
        servers ask the master and their replicas. None: it was lost again."""
        return True

    def checkpoint_forget(self, load_id: str) -> None:
        """Free what was loaded."""
        if self._loaded is not None and self._loaded[0] == load_id:
            self._loaded = None

    def _bare_sparse(self) -> dict[str, SparseTable]:
        return {
            name: each.table if isinstance(each, HeldTable) else each
            for name, each in self._sparse.items()
        }

    def _bare_dense(self) -> dict[str, DenseTable]:
        return {
            name: each.table if isinstance(each, HeldTable) else each
            for name, each in self._dense.items()
        }

    def _name_tables(self) -> None:
        """Let requests find the tables, after these or their epochs changed."""
        self._asked_sparse, self._asked_dense = self._sparse, self._dense
        if self._epochs:
            asked = {name: asked_as(name, epoch) for name, (epoch, _) in self._epochs.items()}
            self._asked_sparse = {
                asked.get(name, name): table for name, table in self._sparse.items()
            }
            self._asked_dense = {
                asked.get(name, name): table for name, table in self._dense.items()
            }

    def _hold_is_over(self, waiting: Waiting) -> None:
        if self._waiting is waiting:
            self._let_pushes_run()
            self._save_id = ""

    def _let_pushes_run(self) -> None:
        if self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            self._sparse, self._dense = dict(self._bare_sparse()), dict(self._bare_dense())
            self._name_tables()
            release(waiting)


def _changed(
    name: str, table: SparseTable, known: Epochs, epochs: Epochs, tracked: bool
) -> tuple[Changed | None, npt.NDArray[Any] | None]:
    """What to write of the table, None: all, and of which other rows the stamps; an epoch of its
    changes ends, and is noted, when they are tracked from now on."""
    changes, epoch, moment = known.get(name, (None, 0, 0))
    # else it is another table
    changed = changes.since(epoch) if changes is not None and changes is table.changes else None
    used = table.used_since(moment, changed.rows) if changed is not None else None
    table.track_changes(tracked)
    if table.changes is not None:
        epochs[name] = table.changes, table.changes.end_epoch(), table.scalars().get("moment", 0)
    return changed, used


def _unfinished_name(save_id: str) -> str:
    name = f"unfinished-{save_id}"
    if not UNFINISHED_NAME.fullmatch(name):
        raise ConfigError(f"save_id {save_id!r}: 16 hexadecimal digits are allowed")
    return name


def _plain(part: ServerPart | Base) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(part)
    return plain


def _unwritable(folder: str, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"no checkpoint in {folder} on this server: {error.strerror or error} "
        f"({error.filename or 'while writing'}); "
        "those before it are as they were; make room or mend the disk, and save again"
    )

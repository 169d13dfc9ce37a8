"""A worker's side of saving and restoring: which servers are asked what, in which order, and what
is undone when one fails.

The order is that of methods.py. Every round is bounded by the caller's timeout; of several failures
the first is raised, once all servers have answered, so that nothing is removed which one of them
still writes.

    a round failed because                             then
    a partition moved, is copied, is saved by another  the whole attempt is made again, until the
                                                       deadline
    another worker begins a table again, or creates    the same; where it has, a save goes on with
    one                                                the table as it is now
    a server of elastic tables was lost                the same: another server comes to hold its
                                                       partitions
    a server of other tables was lost                  the same, for lost_s: it may only have been
                                                       cut off or stopped for a while
    the server that commits was lost                   the same; first is looked whether the
                                                       checkpoint counts
    of anything else                                   the error is raised
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from prpc_engine.errors import (
    Closed,
    ConfigError,
    DeadlineExceeded,
    MaybeExecuted,
    NotSent,
    RemoteError,
    RpcError,
    Stopping,
    UnknownService,
)
from prpc_engine.kv.checkpoint.chain import base_for, check_full_every
from prpc_engine.kv.checkpoint.files import checked_folder
from prpc_engine.kv.checkpoint.manifest import (
    FORMAT,
    Base,
    Busy,
    CheckpointError,
    Manifest,
    ServerPart,
    TooLate,
    check_keep,
    check_step,
    encode,
    line_crc32,
)
from prpc_engine.kv.client.future import PartFuture
from prpc_engine.kv.client.partition_client import is_moved
from prpc_engine.kv.consistency.epochs import Behind, Outdated, RowsLost, Standing, is_remote
from prpc_engine.kv.schema.beginnings import left_s
from prpc_engine.kv.schema.table_spec import TableSpec, from_dict
from prpc_engine.rpc.backoff import Backoff
from shard import runtime

MOVED_PAUSE_S = 0.05  # a hand-over takes some tens of milliseconds
# a copy or a save takes seconds to minutes, and each attempt holds pushes for a round
BUSY_PAUSE = Backoff(first_s=MOVED_PAUSE_S, max_s=0.5, certain=0.5)
UNDO_TIMEOUT_S = 10.0  # for what is asked after a failure, perhaps of a server that has just died
BEFORE_IT = "the checkpoints before it are as they were"  # of a save
AGAIN = "restore again"
Folder = str | os.PathLike[str]
Layout = Callable[[dict[str, list[TableSpec]]], Mapping[int, Mapping[str, TableSpec]]]
Epochs = Mapping[str, tuple[int, int]]  # as of catalog.py
Value = TypeVar("Value")
logger = logging.getLogger("prpc")


class Submit(Protocol):
    """Calls a method of one server, or partition, that runs at most once, and returns its future.
    timeout_s is the deadline in seconds.
    """

    def __call__(
        self, server_id: int, method: str, timeout_s: float, /, *args: Any
    ) -> PartFuture: ...


class Rounds:
    """Rounds of calls to all servers, within `timeout_s` seconds in all. locate: finds out where
    partitions are now.

    asked_of: what requests call the tables that a server must have for its part of a checkpoint to
    be whole. check_whole: raises Busy or RowsLost where a checkpoint of what servers have would not
    be one beginning of each table; None: tables have no epochs. lost_s: for how many seconds
    servers that were lost are waited for, where that is less than what is left. restoring: is told
    the id of each restore before servers are. began_again: is called with the message of each
    Outdated error.
    """

    def __init__(
        self,
        submit: Submit,
        server_ids: Sequence[int],
        timeout_s: float,
        locate: Callable[[], object],
        asked_of: Callable[[int], list[str]] = lambda server_id: [],
        check_whole: Callable[[Sequence[Standing], float], object] | None = None,
        lost_s: float = 0.0,
        restoring: Callable[[str], object] = lambda load_id: None,
        began_again: Callable[[str], object] = lambda message: None,
    ) -> None:
        self._submit, self._locate, self._asked_of = submit, locate, asked_of
        self._server_ids, self._lost_s, self._restoring = server_ids, lost_s, restoring
        self._began_again, self._check_whole = began_again, check_whole
        self._timeout_s, self._until = timeout_s, runtime.monotonic() + timeout_s
        self._warned: set[tuple[str, int, type[Exception]]] = set()  # of what was not undone
        # of the commit that was not answered: the save's id, the manifest's CRC-32
        self._in_doubt: tuple[str, int] | None = None

    def save(self, folder: Folder, step: int, keep: int | None, full_every: int) -> None:
        """Have all servers write a checkpoint of that step; it is on the disk when this returns.

        keep: so many of the newest stay; None: all. full_every: one of so many is full. Raises
        ConfigError for an argument that is not allowed, CheckpointError, and of its kind TooLate at
        the deadline.
        """
        # before anything is written
        arguments = _text(folder), check_step(step), check_keep(keep), check_full_every(full_every)
        self._until_done(
            f"step {step} was not saved in {folder}", BEFORE_IT, lambda: self._save_now(*arguments)
        )

    def _save_now(self, folder: str, step: int, keep: int | None, full_every: int) -> None:
        """_save(), and again with the new epoch where another worker has reset or restored a table.
        Each try learns of one such table; the deadline bounds them.
        """
        while True:
            try:
                return self._save(folder, step, keep, full_every)
            except RemoteError as error:
                if not is_remote(error, Outdated) or runtime.monotonic() >= self._until:
                    raise
                self._began_again(error.remote_message)

    def _save(self, folder: str, step: int, keep: int | None, full_every: int) -> None:
        is_chained = full_every > 1
        newest = (
            _base(self._ask_first("checkpoint_newest", folder))
            if is_chained or self._in_doubt is not None
            else None
        )
        if self._in_doubt is not None and newest is not None and newest.crc32 == self._in_doubt[1]:
            save_id, saved = self._in_doubt[0], msgspec.to_builtins(newest)
        else:
            save_id = runtime.token_hex(8)
            saved = self._write(save_id, folder, step, keep, newest, full_every)
        if is_chained:
            try:
                self._ask_all("checkpoint_committed", save_id, saved)
            except (RpcError, TimeoutError) as error:
                logger.warning(
                    "the checkpoint %s is good, but the next one will be full: %s",
                    saved["name"],
                    str(error),
                )
        try:
            self._ask_all("checkpoint_durable", save_id)
        except (RpcError, TimeoutError) as error:
            logger.warning(
                "the checkpoint %s is good, but pushes that wait for it are answered after the "
                "next one: %s",
                saved["name"],
                str(error),
            )

    def _write(
        self,
        save_id: str,
        folder: str,
        step: int,
        keep: int | None,
        newest: Base | None,
        full_every: int,
    ) -> dict[str, Any]:
        """The checkpoint that counts then, as a Base."""
        is_chained = full_every > 1
        ends = self._enter(save_id, folder)
        parts: list[Any] = []
        over: Base | None = None
        try:
            over = base_for(ends, newest, full_every)
            base = msgspec.to_builtins(over) if over is not None else None
            arguments = [
                (save_id, folder, step, part, base, is_chained)
                for part in range(len(self._server_ids))
            ]
            parts = self._ask_each("checkpoint_save", arguments)
            saved: dict[str, Any] = self._ask_first(
                "checkpoint_commit", save_id, folder, step, parts, keep, base
            )
        except (RpcError, TimeoutError) as error:
            if parts and isinstance(error, MaybeExecuted | TimeoutError):
                self._in_doubt = save_id, _crc32_of(step, parts, over)
            self._undo_all("checkpoint_release", save_id)
            any(
                self._undo("checkpoint_abort", server_id, save_id, folder)
                for server_id in self._server_ids
            )
            raise
        return saved

    def _enter(self, save_id: str, folder: str) -> list[Base | None]:
        """Hold pushes everywhere: the checkpoint since which each server knows what changed. The
        first server is asked first, by all who save: so of two one goes on, and the other waits
        without holding anything. Tables are as they were looked at before, or a server is Busy."""
        standing: list[Any] = [()] * len(self._server_ids)
        if self._check_whole is not None:  # it may ask the master: before pushes are held
            standing = self._ask_all("standing")
            self._check_whole(standing, left_s(self._until))
            standing = [(each,) for each in standing]
        enter = [
            (save_id, folder, self._asked_of(server_id), *looked_at)
            for server_id, looked_at in zip(self._server_ids, standing, strict=True)
        ]
        ends = self._ask("checkpoint_enter", self._server_ids[:1], enter[:1])
        try:
            ends += self._ask("checkpoint_enter", self._server_ids[1:], enter[1:])
        except (RpcError, TimeoutError):
            self._undo_all("checkpoint_release", save_id)
            raise
        return [_base(end) for end in ends]

    def restore(
        self, folder: Folder, layout: Layout, next_epochs: Callable[[int], Epochs] = lambda step: {}
    ) -> int:
        """Have all servers load the newest whole checkpoint of `folder`; its step.

        layout: says what each server is to have of the tables saved. next_epochs: says which epochs
        they begin with that step. Raises CheckpointError, of its kind TooLate at the deadline, and
        what these two raise.
        """
        text = _text(folder)
        return self._until_done(
            f"{folder} was not restored", AGAIN, lambda: self._restore(text, layout, next_epochs)
        )

    def _restore(self, folder: str, layout: Layout, next_epochs: Callable[[int], Epochs]) -> int:
        found = self._ask_first("checkpoint_find", folder)
        while True:
            try:
                return self._load(folder, layout, next_epochs, *found)
            except Busy:
                raise
            except CheckpointError:
                refused, found = found[0], self._ask_first("checkpoint_find", folder)
                if found[0] == refused:
                    raise  # else a save has removed it meanwhile, and there is a newer one

    def _load(
        self,
        folder: str,
        layout: Layout,
        next_epochs: Callable[[int], Epochs],
        name: str,
        step: int,
        saved: dict[str, Any],
    ) -> int:
        specs = layout({table: [from_dict(spec) for spec in each] for table, each in saved.items()})
        load_id = runtime.token_hex(8)
        try:
            plain = [
                {table: spec.to_dict() for table, spec in specs[server_id].items()}
                for server_id in self._server_ids
            ]
            arguments = [
                (load_id, folder, name, each, part, len(plain)) for part, each in enumerate(plain)
            ]
            self._ask_each("checkpoint_load", arguments)
            self._restoring(load_id)
            self._ask_all("checkpoint_swap", load_id, dict(next_epochs(int(step))), int(step))
        except (RpcError, TimeoutError):
            self._undo_all("checkpoint_forget", load_id)
            raise
        self._settle(load_id)
        return int(step)

    def _settle(self, load_id: str) -> None:
        """Wait until the master knows of it, so that other workers are told, and replicas have what
        was restored: a server that is lost now takes nothing along. Busy: one was lost before."""
        while True:
            try:
                settled = self._ask_all("checkpoint_settled", load_id)
            except RemoteError as error:
                if not is_moved(error):
                    raise
                settled = [False]  # it serves under another epoch by now
            if None in settled:
                raise Busy("a server was lost as soon as its partitions had been restored")
            if all(settled):
                return
            if runtime.monotonic() + MOVED_PAUSE_S >= self._until:
                logger.warning(
                    "the checkpoint is restored, but not all replicas have all of it at the "
                    "deadline: if a server is lost before they have, its rows are lost, too"
                )
                return
            runtime.sleep(MOVED_PAUSE_S)
            self._find_partitions()

    def _until_done(self, failed: str, then: str, attempt: Callable[[], Value]) -> Value:
        """attempt(), again and again as the table at the head says. For errors: `failed` tells what
        was not done, `then` what holds then."""
        pauses, lost_until = 1, 0.0  # of growing length
        reason: RpcError
        while True:
            try:
                self._find_partitions()
                return attempt()
            except Busy as error:
                pauses, lost_until, reason = pauses + 1, 0.0, error
            except DeadlineExceeded as error:
                raise self._too_late(failed, then, error) from error
            except RpcError as error:
                if not _is_passing(error):
                    raise
                pauses, reason = 1, error
                if is_moved(error) or is_remote(error, Behind):
                    lost_until = 0.0
                elif not lost_until:
                    lost_until = runtime.monotonic() + self._lost_s
                    logger.warning(
                        "%s yet: a server was lost; trying again: %s",
                        failed,
                        _line(error),
                    )
            now = runtime.monotonic() + BUSY_PAUSE.bound_s(pauses)
            if now >= self._until:
                raise self._too_late(failed, then, reason) from reason
            if lost_until and now >= lost_until:
                raise CheckpointError(f"{self._told(failed)}: {_line(reason)}; {then}") from reason
            runtime.sleep(BUSY_PAUSE.delay_s(pauses, runtime.random()))

    def _find_partitions(self) -> None:
        try:
            self._locate()
        except Closed:
            raise
        except RpcError as error:  # the master is away: those known here may do
            logger.warning("the placement of partitions cannot be read now: %s", _line(error))

    def _told(self, failed: str) -> str:
        if self._in_doubt is None:
            return failed
        return (
            f"{failed}, as far as is known (its end was not answered: kv.checkpoint.latest() "
            "says whether it counts)"
        )

    def _too_late(self, failed: str, then: str, reason: Exception) -> TooLate:
        text = f"{_line(reason)}, and so it was until the deadline: allow a larger timeout_s"
        return TooLate(f"{self._told(failed)}: {text}; {then}")

    def _ask_first(self, method: str, *args: Any) -> Any:
        return self._ask(method, self._server_ids[:1], [args])[0]

    def _ask_all(self, method: str, *args: Any) -> list[Any]:
        return self._ask(method, self._server_ids, [args] * len(self._server_ids))

    def _ask_each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        return self._ask(method, self._server_ids, arguments)

    def _ask(
        self, method: str, server_ids: Sequence[int], arguments: Sequence[tuple[Any, ...]]
    ) -> list[Any]:
        timeout_s = left_s(self._until)
        asked, answers = list[PartFuture](), []
        failed: Exception | None = None
        refused: Exception | None = None
        for each, args in zip(server_ids, arguments, strict=True):
            try:
                asked.append(self._submit(each, method, timeout_s, *args))
            except RpcError as error:  # it is gone, say; those before it work
                refused = error
                break
        for part in asked:
            try:
                answers.append(part.result())
            except (RpcError, TimeoutError) as error:
                failed = failed or error
        failed = failed or refused
        if failed is not None:
            raise _named(failed) from failed
        return answers

    def _undo_all(self, method: str, *args: Any) -> None:
        """_undo() of all servers, at once: one that does not answer keeps none of the others
        waiting.
        """
        asked = [
            (server_id, self._begin_undo(method, server_id, *args))
            for server_id in self._server_ids
        ]
        for server_id, part in asked:
            if part is not None:
                self._undone(method, server_id, part)

    def _undo(self, method: str, server_id: int, *args: Any) -> bool:
        """Whether it did. The failure that led here is what the caller gets."""
        part = self._begin_undo(method, server_id, *args)
        return part is not None and self._undone(method, server_id, part)

    def _begin_undo(self, method: str, server_id: int, *args: Any) -> PartFuture | None:
        try:
            return self._submit(server_id, method, UNDO_TIMEOUT_S, *args)
        except RpcError as error:
            self._warn_of_undo(method, server_id, error)
            return None

    def _undone(self, method: str, server_id: int, part: PartFuture) -> bool:
        try:
            part.result()
        except (RpcError, TimeoutError) as error:
            self._warn_of_undo(method, server_id, error)
            return False
        return True

    def _warn_of_undo(self, method: str, server_id: int, error: Exception) -> None:
        """Once of each in these rounds, which may be many. What does not serve the partition, or
        not any more, has nothing to undo.
        """
        what = method, server_id, type(error)
        if what not in self._warned and not is_moved(error):
            self._warned.add(what)
            logger.warning(
                "%s of partition %d after a failure: %s", method, server_id, _line(error)
            )


def _line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _is_passing(error: Exception) -> bool:
    """Whether the same may succeed soon: a server was lost, serves what was asked for no more, or
    has not begun a table again yet, as others have.
    """
    return (
        isinstance(error, NotSent | MaybeExecuted | Stopping | UnknownService)
        or is_moved(error)
        or is_remote(error, Behind)
    )


def _crc32_of(step: int, parts: Sequence[Any], base: Base | None) -> int:
    """By which the manifest of these parts is known, as save.commit() makes it."""
    found = sorted(
        (msgspec.convert(part, ServerPart, strict=False) for part in parts),
        key=lambda part: part.part,
    )
    return line_crc32(encode(Manifest(FORMAT, step, tuple(found), base)))


def _text(folder: object) -> str:
    """Of a folder on the servers' disks. Raises ConfigError."""
    text = os.fspath(folder) if isinstance(folder, os.PathLike) else folder
    checked_folder(text, None)
    assert isinstance(text, str)
    return text


def _base(plain: Any) -> Base | None:
    return None if plain is None else msgspec.convert(plain, Base)


def _named(error: Exception) -> Exception:
    """What a server raised on purpose, as what it was there."""
    if isinstance(error, RemoteError):
        for kind in (Busy, CheckpointError, ConfigError, RowsLost):
            if error.type_name.rpartition(".")[2] == kind.__name__:
                return kind(error.remote_message)
    return error

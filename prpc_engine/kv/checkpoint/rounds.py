"""A worker's side of saving and restoring: which servers are asked what, in which order, and what is undone when one fails.

The order is that of methods.py. Every round is bounded by the caller's timeout; of several failures the first is raised, once
all servers have answered, so that nothing is removed which one of them still writes.
"""

from __future__ import annotations

import logging
import os
import random
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from prpc_engine.errors import ConfigError, MaybeExecuted, NotSent, RemoteError, RpcError
from prpc_engine.kv.checkpoint.chain import base_for, check_full_every
from prpc_engine.kv.checkpoint.files import checked_folder
from prpc_engine.kv.checkpoint.manifest import Base, Busy, CheckpointError, check_keep, check_step
from prpc_engine.kv.epochs import RowsLost
from prpc_engine.kv.future import PartFuture
from prpc_engine.kv.table_spec import TableSpec, from_dict

MOVED, MOVED_PAUSE_S = "Moved", 0.05  # what an elastic server raises (hosted.py); a hand-over takes some tens of milliseconds
BUSY_PAUSE_S_MAX = 0.5  # a copy or a save takes seconds to minutes, and each attempt holds pushes for a round
UNDO_TIMEOUT_S = 10.0  # for what is asked after a failure, perhaps of a server that has just died
Folder = str | os.PathLike[str]
Layout = Callable[[dict[str, list[TableSpec]]], Mapping[int, Mapping[str, TableSpec]]]
Epochs = Mapping[str, tuple[int, int]]  # as of catalog.py
Value = TypeVar("Value")
logger = logging.getLogger("prpc")


class Submit(Protocol):
    """Call a method of one server."""

    def __call__(self, server_id: int, method: str, timeout_s: float, /, *args: Any) -> PartFuture: ...


class Rounds:
    """Rounds of calls to all servers, within `timeout_s` seconds in all. locate: finds out where partitions are now.

    asked_of: what requests call the tables that a server must have for its part of a checkpoint to be whole.
    """

    def __init__(
        self,
        submit: Submit,
        server_ids: Sequence[int],
        timeout_s: float,
        locate: Callable[[], object],
        asked_of: Callable[[int], list[str]] = lambda server_id: [],
        is_elastic: bool = False,
    ) -> None:
        self._submit, self._locate, self._asked_of = submit, locate, asked_of
        self._server_ids, self._is_elastic = server_ids, is_elastic
        self._until = time.monotonic() + timeout_s

    def save(self, folder: Folder, step: int, keep: int | None, full_every: int) -> None:
        """See TableWorker.save()."""
        arguments = _text(folder), check_step(step), check_keep(keep), check_full_every(full_every)  # before anything is written
        self._while_partitions_move(lambda: self._save(*arguments))

    def _save(self, folder: str, step: int, keep: int | None, full_every: int) -> None:
        save_id = secrets.token_hex(8)
        is_chained = full_every > 1
        newest = _base(self._ask_first("checkpoint_newest", folder)) if is_chained else None
        ends = self._enter(save_id, folder)
        try:
            over = base_for(ends, newest, full_every)
            base = msgspec.to_builtins(over) if over is not None else None
            arguments = [(save_id, folder, step, part, base, is_chained) for part in range(len(self._server_ids))]
            parts = self._ask_each("checkpoint_save", arguments)
            saved = self._ask_first("checkpoint_commit", save_id, folder, step, parts, keep, base)
        except (RpcError, TimeoutError):
            self._release(save_id)
            any(self._undo("checkpoint_abort", server_id, save_id, folder) for server_id in self._server_ids)
            raise
        if is_chained:
            try:
                self._ask_all("checkpoint_committed", save_id, saved)
            except (RpcError, TimeoutError) as error:
                logger.warning("the checkpoint %s is good, but the next one will be full: %s", saved["name"], str(error))
        try:
            self._ask_all("checkpoint_durable", save_id)
        except (RpcError, TimeoutError) as error:
            logger.warning(
                "the checkpoint %s is good, but who waits for it is told after the next: %s", saved["name"], str(error)
            )

    def _enter(self, save_id: str, folder: str) -> list[Base | None]:
        """Hold pushes everywhere: the checkpoint since which each server knows what changed. The first server is asked first, by
        all who save: so of two one goes on, and the other waits without holding anything."""
        enter = [(save_id, folder, self._asked_of(server_id)) for server_id in self._server_ids]
        ends = self._ask("checkpoint_enter", self._server_ids[:1], enter[:1])
        try:
            ends += self._ask("checkpoint_enter", self._server_ids[1:], enter[1:])
        except (RpcError, TimeoutError):
            self._release(save_id)
            raise
        return [_base(end) for end in ends]

    def _release(self, save_id: str) -> None:
        for server_id in self._server_ids:
            self._undo("checkpoint_release", server_id, save_id)

    def restore(self, folder: Folder, layout: Layout, next_epochs: Callable[[int], Epochs] = lambda step: {}) -> int:
        """See TableWorker.restore(). `layout` says what each server is to have of the tables saved, next_epochs which epochs they
        begin with that step."""
        text = _text(folder)
        return self._while_partitions_move(lambda: self._restore(text, layout, next_epochs), again_after_loss=True)

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
        self, folder: str, layout: Layout, next_epochs: Callable[[int], Epochs], name: str, step: int, saved: dict[str, Any]
    ) -> int:
        specs = layout({table: [from_dict(spec) for spec in each] for table, each in saved.items()})
        load_id = secrets.token_hex(8)
        try:
            plain = [{table: spec.to_dict() for table, spec in specs[server_id].items()} for server_id in self._server_ids]
            arguments = [(load_id, folder, name, each, part, len(plain)) for part, each in enumerate(plain)]
            self._ask_each("checkpoint_load", arguments)
            self._ask_all("checkpoint_swap", load_id, dict(next_epochs(int(step))))
        except (RpcError, TimeoutError):
            for server_id in self._server_ids:
                self._undo("checkpoint_forget", server_id, load_id)
            raise
        self._settle(load_id)
        return int(step)

    def _settle(self, load_id: str) -> None:
        """Wait until replicas have what was restored: a server that is lost now takes nothing along."""
        while not all(self._ask_all("checkpoint_settled", load_id)):
            if time.monotonic() + MOVED_PAUSE_S >= self._until:
                logger.warning(
                    "the checkpoint is restored, but replicas have not got all of it by the deadline: a server that is lost "
                    "before they have takes rows along"
                )
                return
            time.sleep(MOVED_PAUSE_S)

    def _while_partitions_move(self, attempt: Callable[[], Value], again_after_loss: bool = False) -> Value:
        """attempt(), and again as long as a partition is not where it was asked for, as servers come, go and hand over; or is
        being copied, or saved by another worker. again_after_loss: of an attempt that may run twice, also when an elastic server
        is lost: its partitions are found elsewhere soon."""
        pause_s = MOVED_PAUSE_S
        while True:
            self._locate()
            try:
                return attempt()
            except Busy as error:
                pause_s = min(BUSY_PAUSE_S_MAX, 2 * pause_s)
                if time.monotonic() + pause_s >= self._until:
                    raise CheckpointError(f"{error}, and was until the deadline: allow a larger timeout_s") from error
            except (NotSent, MaybeExecuted) as error:
                pause_s = MOVED_PAUSE_S
                if not (again_after_loss and self._is_elastic) or time.monotonic() + pause_s >= self._until:
                    raise
                logger.warning("a server was lost while a checkpoint was restored, which begins again: %s", str(error))
            except RemoteError as error:
                pause_s = MOVED_PAUSE_S
                if error.type_name.rpartition(".")[2] != MOVED or time.monotonic() + pause_s >= self._until:
                    raise
            time.sleep(random.uniform(0.5, 1.0) * pause_s)

    def _ask_first(self, method: str, *args: Any) -> Any:
        return self._ask(method, self._server_ids[:1], [args])[0]

    def _ask_all(self, method: str, *args: Any) -> list[Any]:
        return self._ask(method, self._server_ids, [args] * len(self._server_ids))

    def _ask_each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        return self._ask(method, self._server_ids, arguments)

    def _ask(self, method: str, server_ids: Sequence[int], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        left_s = max(0.001, self._until - time.monotonic())
        asked, answers = list[PartFuture](), []
        failed: Exception | None = None
        refused: Exception | None = None
        for each, args in zip(server_ids, arguments, strict=True):
            try:
                asked.append(self._submit(each, method, left_s, *args))
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

    def _undo(self, method: str, server_id: int, *args: Any) -> bool:
        """Whether it did. The failure that led here is what the caller gets."""
        try:
            self._submit(server_id, method, UNDO_TIMEOUT_S, *args).result()
        except (RpcError, TimeoutError) as error:
            logger.warning("%s of server %d after a failure: %s", method, server_id, str(error).partition("\n")[0])
            return False
        return True


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

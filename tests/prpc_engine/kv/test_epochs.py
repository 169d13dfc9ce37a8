"""A server of plain tables that began without the rows due there says so; restore() and reset() end
it, and all are told.
"""

from __future__ import annotations

import contextlib
import itertools
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prpc_engine import Master, RpcService
from prpc_engine.errors import (
    BadArguments,
    ConfigError,
    DeadlineExceeded,
    MaybeExecuted,
    NoSuchNode,
    RpcError,
)
from prpc_engine.kv import (
    CheckpointError,
    Constant,
    EpochChanged,
    RowsLost,
    TableServer,
    TableShard,
    TableWorker,
)
from prpc_engine.kv.client.local import LocalService, run_to_end
from prpc_engine.kv.consistency.epochs import asked_as, outdated, parsed, read_outdated
from prpc_engine.kv.schema.beginnings import Beginning, Beginnings
from prpc_engine.kv.schema.layout import spread
from prpc_engine.kv.schema.schema import Schemas
from prpc_engine.kv.schema.table_spec import SparseSpec
from prpc_engine.master.client import MasterClient
from prpc_engine.master.watch import TreeEvent
from tests.faults.zygote import Life
from tests.ports import address_of, hold_port
from tests.prpc_engine.processes import PATIENCE_S, wait_until
from tests.prpc_engine.workloads.farm import Farm, end, kill

ADD = {"name": "add"}
KEYS = np.arange(64)
ONES = np.ones((64, 1), np.float32)
DENSE = np.ones(8, np.float32)


def serve(life: Life, master: str) -> None:
    """One server until SIGTERM."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    with RpcService(master, transports=["tcp"]) as service:
        TableServer(service)
        life.done = 1
        signal.sigwait({signal.SIGTERM})


class Job:
    """Two servers of tables, and workers that have created them."""

    def __init__(self, farm: Farm, master: str) -> None:
        self._farm, self.master = farm, master
        self.servers = [farm.start_ready(serve, master) for _ in range(2)]
        self.services: list[RpcService] = []

    def worker(self, create: bool = True) -> TableWorker:
        self.services.append(RpcService(self.master, transports=["tcp"]))
        worker = TableWorker(
            self.services[-1], expected_servers=2, timeout_s=PATIENCE_S, call_timeout_s=PATIENCE_S
        )
        if create:
            create_tables(worker)
        return worker

    def replace(self, index: int) -> None:
        """kill -9, and another process in its place."""
        kill(self.servers[index])
        with RpcService(self.master, transports=["tcp"]) as watcher:
            wait_until(
                lambda: len(watcher.master_client.tree_node_sub("/_rpc_/RpcService/kv")) == 1,
                "the end of a server",
            )
        self.servers[index] = self._farm.start_ready(serve, self.master)

    def close(self) -> None:
        for service in self.services:
            service.close()
        for server in self.servers:
            end(server)


def create_tables(worker: TableWorker) -> None:
    worker.create_sparse("clicks", 1, ADD)
    worker.create_dense("head", (8,), ADD, split_bytes_min=0)


@contextmanager
def job(farm: Farm, master: str) -> Iterator[Job]:
    running = Job(farm, master)
    try:
        yield running
    finally:
        running.close()


def settled(worker: TableWorker) -> None:
    """Until the worker reaches the server that came last."""

    def reached() -> bool:
        try:
            worker.statistics(timeout_s=PATIENCE_S)
        except RpcError:
            return False
        return True

    wait_until(reached, "the new server")


def train(worker: TableWorker) -> None:
    worker.push("clicks", KEYS, ONES)
    worker.push("head", DENSE)


@contextmanager
def trained(master: Master) -> Iterator[tuple[TableWorker, RpcService]]:
    """A worker of two servers, all in this process, that has trained; and its service."""
    with contextlib.ExitStack() as stack:
        first, second, ours = [stack.enter_context(RpcService(master.address)) for _ in range(3)]
        for number, service in enumerate((first, second)):
            TableServer(service, server_id=number)
        worker = TableWorker(ours, expected_servers=2)
        create_tables(worker)
        train(worker)
        yield worker, ours


@pytest.mark.slow
@pytest.mark.parametrize("is_created_anew", [False, True])
def test_a_server_in_the_place_of_a_killed_one_never_answers_zeros_and_takes_no_push(
    farm: Farm, master: Master, is_created_anew: bool
) -> None:
    with job(farm, master.address) as running:
        one, reader = running.worker(), running.worker()
        train(one)
        assert reader.pull("clicks", KEYS).min() == 1
        running.replace(1)
        workers = [one, reader, running.worker()] if is_created_anew else [one, reader]
        for worker in workers:
            settled(worker)
            for _ in range(2):
                with pytest.raises(
                    RowsLost,
                    match=r"partition \d of 'kv' \(server \d\).*'clicks'.*restore\(\).*reset\(\)",
                ):
                    worker.pull("clicks", KEYS)
            with pytest.raises(RowsLost):
                worker.push("clicks", KEYS, ONES)
            with pytest.raises(RowsLost):
                worker.push_pull("head", DENSE)
            with pytest.raises(RowsLost):
                worker.submit_pull("head").result()
        rows = [tables.get("clicks") for tables in one.statistics().values()]
        assert sorted(each.rows if each is not None else 0 for each in rows)[0] == 0


@pytest.mark.slow
def test_reset_begins_empty_and_every_worker_is_told_once(farm: Farm, master: Master) -> None:
    with job(farm, master.address) as running:
        one, reader, other = running.worker(), running.worker(), running.worker()
        train(one)
        reader.pull("clicks", KEYS)
        running.replace(0)
        for worker in (one, reader, other):
            settled(worker)
        one.reset()
        assert one.pull("clicks", KEYS).ravel().tolist() == [0] * len(KEYS)
        with pytest.raises(EpochChanged, match=r"'clicks'.*reset") as told:
            reader.pull("clicks", KEYS)
        assert (told.value.partition, told.value.step) == (-1, -1)
        with pytest.raises(EpochChanged):
            other.push("clicks", KEYS, ONES)
        for worker in (one, reader, other):
            # the refused push is in no server
            assert worker.pull("clicks", KEYS).ravel().tolist() == [0] * len(KEYS)
        with pytest.raises(EpochChanged, match="'head'"):
            reader.pull("head")
        train(one)
        assert reader.pull("clicks", KEYS).min() == reader.pull("head").min() == 1
        late = running.worker()
        assert late.pull("clicks", KEYS).min() == 1
        with pytest.raises(BadArguments, match="the tables clicks, head"):
            late.reset("nothing")


@pytest.mark.slow
def test_restore_brings_the_rows_back_and_every_worker_is_told_once(
    farm: Farm, master: Master, tmp_path: Path
) -> None:
    with job(farm, master.address) as running:
        one, reader = running.worker(), running.worker()
        train(one)
        one.save(str(tmp_path), step=7)
        train(one)
        assert reader.pull("clicks", KEYS).max() == 2
        running.replace(1)
        new = running.worker()
        for worker in (one, reader, new):
            settled(worker)
        with pytest.raises(RowsLost):
            one.save(str(tmp_path), step=8)
        assert new.restore(str(tmp_path)) == 7
        for worker in (new, reader, one):
            if worker is not new:
                with pytest.raises(
                    EpochChanged, match="restored from the checkpoint of step 7"
                ) as told:
                    worker.pull("clicks", KEYS)
                assert told.value.step == 7
                with pytest.raises(EpochChanged):
                    worker.pull("head")
            assert worker.pull("clicks", KEYS).ravel().tolist() == [1] * len(KEYS)
            assert worker.pull("head").tolist() == [1] * 8
        one.save(str(tmp_path), step=8)
        assert running.worker().pull("clicks", KEYS).min() == 1


@pytest.mark.slow
def test_a_whole_service_that_began_again_goes_on_with_a_checkpoint(
    farm: Farm, master: Master, tmp_path: Path
) -> None:
    with job(farm, master.address) as running:
        one = running.worker()
        train(one)
        one.save(str(tmp_path), step=7)
    with job(farm, master.address) as running:
        new = running.worker()
        with pytest.raises(RowsLost):
            new.pull("clicks", KEYS)
        assert new.restore(str(tmp_path)) == 7
        assert new.pull("clicks", KEYS).min() == running.worker().pull("head").min() == 1
    # another table takes a name of which nobody has anything
    with job(farm, master.address) as running:
        new = running.worker(create=False)
        new.create_sparse("clicks", 3, ADD)
        assert new.pull("clicks", KEYS).shape == (64, 3)
        with pytest.raises(ConfigError, match="another spec"):
            running.worker(create=False).create_sparse("clicks", 2, ADD)


@pytest.mark.slow
@pytest.mark.parametrize("has_journal", [False, True])
def test_what_is_due_is_known_after_the_master_began_again(
    farm: Farm, tmp_path: Path, has_journal: bool
) -> None:
    journal = str(tmp_path / "journal") if has_journal else None
    with hold_port() as held:
        address = address_of(held)
        first = Master(address, journal=journal)
        with job(farm, address) as running:
            one = running.worker()
            train(one)
            first.close()
            with (
                Master(address, journal=journal),
                RpcService(address, transports=["tcp"]) as service,
            ):
                tree = service.master_client
                wait_until(lambda: known_tables(tree) == ["clicks", "head"], "the servers to tell")
                wait_until(
                    lambda: len(tree.tree_node_sub("/_rpc_/RpcService/kv")) == 2,
                    "the servers to come back",
                )
                running.replace(0)
                settled(one)
                new = running.worker()
                with pytest.raises(RowsLost):
                    new.pull("clicks", KEYS)
                with pytest.raises(RowsLost):
                    new.pull("head")
                new.reset()
                assert new.pull("clicks", KEYS).max() == 0
                for each in running.services:
                    each.close()


def known_tables(tree: object) -> list[str]:
    try:
        return list(tree.tree_node_sub("/_epochs_/kv"))  # type: ignore[attr-defined]
    except RpcError:
        return []


@pytest.mark.slow
def test_a_restore_that_was_not_finished_is_found_by_who_creates_the_table_next(
    farm: Farm, master: Master
) -> None:
    with job(farm, master.address) as running:
        one = running.worker()
        train(one)
        whole = SparseSpec("clicks", 0, 2, ADD, Constant(), 1)  # type: ignore[arg-type]
        client = running.services[0].create_client("kv", 2, PATIENCE_S)
        life, epochs = client.submit_to(0, "standing").result()
        client.submit_to(
            0, "create_table", spread(whole, 2)[0].to_dict(), epochs["clicks"] + 1, life
        ).result()
        new = running.worker()
        with pytest.raises(RpcError, match="began again, but not on this server yet"):
            new.pull("clicks", KEYS, timeout_s=0.3)
        new.reset("clicks")
        assert new.pull("clicks", KEYS).max() == 0
        with pytest.raises(EpochChanged):
            one.pull("clicks", KEYS)
        assert one.pull("clicks", KEYS).max() == 0


@pytest.mark.slow
def test_two_workers_that_create_a_table_at_once_find_one_table(farm: Farm, master: Master) -> None:
    with job(farm, master.address) as running:
        workers = [running.worker(create=False) for _ in range(4)]
        threads = [threading.Thread(target=create_tables, args=(worker,)) for worker in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        for worker in workers:
            train(worker)
        assert {worker.pull("clicks", KEYS).max() for worker in workers} == {4.0}


def test_a_reset_that_a_servers_end_cut_short_is_made_again(
    master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    create, ended = TableShard.create_table, list[bool]()

    def created(self: TableShard, *arguments: Any) -> bool | None:
        made = create(self, *arguments)
        return None if ended and ended.pop() else made  # as of another process by now

    monkeypatch.setattr(TableShard, "create_table", created)
    with RpcService(master.address) as service, RpcService(master.address) as ours:
        TableServer(service)
        worker = TableWorker(ours)
        create_tables(worker)
        train(worker)
        ended.append(True)
        worker.reset("clicks")
        assert not ended
        assert not worker.pull("clicks", KEYS).any()
        ended.extend([True] * 10_000)
        with pytest.raises(RowsLost, match=r"reset of table 'clicks'.*ended meanwhile.*again"):
            worker.reset("clicks", timeout_s=1.0)


class Halting(TableShard):
    """It ends as it is reset, and another one in its place stands still until `go_on`."""

    def __init__(self) -> None:
        super().__init__()
        self.is_reset, self.go_on = False, threading.Event()

    def create_table(self, spec: dict[str, Any], epoch: int = 0, life: int = 0) -> bool | None:
        is_first = not self.tables
        made = super().create_table(spec, epoch, life)
        self.is_reset = not is_first
        return made if is_first else None

    def standing(self) -> tuple[int, Mapping[str, int]]:
        if self.is_reset:
            self.go_on.wait(PATIENCE_S)
        return super().standing()


def test_a_reset_that_was_cut_short_and_has_no_time_for_another_try_says_so(
    master: Master,
) -> None:
    with RpcService(master.address) as service, RpcService(master.address) as ours:
        shard = Halting()
        service.create_server("kv", shard, inline=True)
        worker = TableWorker(ours)
        worker.create_sparse("clicks", 1, ADD)
        try:
            with pytest.raises(RowsLost, match=r"reset of table 'clicks'.*ended meanwhile.*again"):
                worker.reset("clicks", timeout_s=0.5)
        finally:
            shard.go_on.set()


def test_a_reset_beside_one_that_did_not_reach_all_servers_ends_that(
    master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    create, others = TableShard.create_table, list[int]()

    def created(self: TableShard, spec: dict[str, Any], epoch: int, life: int) -> bool | None:
        if others and spec["partition"] == 1:  # another worker's, which is later, comes first
            create(self, spec, epoch + others.pop(), life)
        return create(self, spec, epoch, life)

    monkeypatch.setattr(TableShard, "create_table", created)
    with trained(master) as (worker, _):
        others.append(1)
        worker.reset("clicks")
        assert not others
        assert not worker.pull("clicks", KEYS).any()


def test_a_table_that_began_again_on_some_servers_only_is_lost_until_it_is_reset(
    master: Master,
) -> None:
    with trained(master) as (worker, ours):
        whole = SparseSpec("clicks", 0, 2, ADD, Constant(), 1)  # type: ignore[arg-type]
        client = ours.create_client("kv", 2, PATIENCE_S)
        life, epochs = client.submit_to(0, "standing").result()
        spec = spread(whole, 2)[0].to_dict()
        # all that a worker did which was killed as it reset or restored the table
        client.submit_to(0, "create_table", spec, epochs["clicks"] + 1, life).result()
        with pytest.raises(EpochChanged):
            worker.pull("clicks", KEYS)
        for verb in (worker.pull, worker.push, worker.push_pull):
            arrays = (KEYS,) if verb == worker.pull else (KEYS, ONES)
            # DeadlineExceeded: another try was under way just then
            late = (RowsLost, DeadlineExceeded)
            with pytest.raises(late, match=r"(?s)partition 1 .*not on this server yet.*reset\(\)"):
                verb("clicks", *arrays, timeout_s=0.3)
        worker.reset("clicks")
        assert not worker.pull("clicks", KEYS).any()


class HeldForASave(TableShard):
    """Its save is over once it has refused a reset, the first time."""

    def __init__(self) -> None:
        super().__init__()
        self.save_id, self.refusals = "0" * 16, 0

    def create_table(self, spec: dict[str, Any], epoch: int = 0, life: int = 0) -> bool | None:
        try:
            return super().create_table(spec, epoch, life)
        except CheckpointError:
            self.refusals += 1
            if self.refusals == 1:
                self.checkpoint_release(self.save_id)
            raise


def test_a_reset_waits_for_a_save_that_holds_pushes(master: Master, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        services = [stack.enter_context(RpcService(master.address)) for _ in range(3)]
        TableServer(services[0], server_id=0)
        held = HeldForASave()
        services[1].create_server("kv", held, server_id=1, inline=True)
        worker = TableWorker(services[2], expected_servers=2)
        create_tables(worker)
        train(worker)
        client = services[2].create_client("kv", 2, PATIENCE_S)
        client.submit_to(1, "checkpoint_enter", held.save_id, str(tmp_path)).result()
        worker.reset("clicks")
        assert held.refusals == 1
        assert not worker.pull("clicks", KEYS).any()
        client.submit_to(1, "checkpoint_enter", held.save_id, str(tmp_path)).result()
        with pytest.raises(CheckpointError, match=r"reset of table 'clicks'.*a save is about to"):
            worker.reset("clicks", timeout_s=0.04)


def test_a_restore_begins_later_than_all_that_its_servers_have(
    master: Master, tmp_path: Path
) -> None:
    with trained(master) as (worker, ours):
        worker.save(tmp_path, step=7)
        whole = SparseSpec("clicks", 0, 2, ADD, Constant(), 1)  # type: ignore[arg-type]
        client = ours.create_client("kv", 2, PATIENCE_S)
        # of a worker whose clock is an hour ahead, and which died as it reset the table
        life, epochs = client.submit_to(1, "standing").result()
        spec, ahead = spread(whole, 2)[1].to_dict(), 3600 * 10**9
        client.submit_to(1, "create_table", spec, epochs["clicks"] + ahead, life).result()
        assert worker.restore(tmp_path) == 7
        assert worker.pull("clicks", KEYS).min() == 1


def test_a_push_to_a_table_that_a_restore_leaves_alone_is_still_known(tmp_path: Path) -> None:
    service = LocalService()
    TableServer(service)
    worker, (shard,) = TableWorker(service), service.servers["kv"]
    assert isinstance(shard, TableShard)
    worker.create_sparse("saved", 1, ADD)
    worker.push("saved", KEYS, ONES)
    worker.save(tmp_path, step=1)
    worker.create_sparse("newer", 1, ADD)
    for _ in range(2):  # the first answer is lost
        shard.apply(77, 1, "push", "newer", KEYS, ONES)
        worker.restore(tmp_path)
    assert worker.pull("newer", KEYS).max() == 1


def test_an_epoch_of_a_table_is_made_by_the_server_that_it_was_given_to_alone() -> None:
    shard, other = TableShard(), TableShard()
    spec = spec_of("t")
    assert other.create_table(spec, 5, shard.life) is None
    assert shard.create_table(spec, 5, shard.life) is True
    assert shard.create_table(spec, 5, other.life) is False
    with pytest.raises(Exception, match="began again as epoch 0000000000000005"):
        shard.create_table(spec, 4, shard.life)
    shard.apply(1, 1, "push", asked_as("t", 5), KEYS, ONES)
    for asked in (4, 6):
        with pytest.raises(RpcError):
            shard.apply(1, 2, "push", asked_as("t", asked), KEYS, ONES)
    assert shard.pull(asked_as("t", 5), KEYS).max() == 1
    assert shard.standing() == (shard.life, {"t": 5})


def spec_of(table: str) -> dict[str, Any]:
    """Of a sparse one, whole on one server."""
    where = {"name": "sparse", "table": table, "partition": 0, "partitions": 1, "dim": 1}
    return {**where, "optimizer": ADD, "initializer": {"name": "constant"}}


def test_a_durable_push_fails_where_its_table_is_reset_before_it_is_saved(tmp_path: Path) -> None:
    shard = TableShard()
    for table in ("reset", "other"):
        shard.create_table(spec_of(table), 1, shard.life)
    over, other = (
        shard.apply_durable(1, number, "push", asked_as(table, 1), KEYS, ONES)
        for number, table in enumerate(("reset", "other"), start=1)
    )
    shard.create_table(spec_of("reset"), 2, shard.life)
    # its answer was lost, and it comes again
    again = shard.apply_durable(1, 1, "push", asked_as("reset", 1), KEYS, ONES)
    for each in (over, again):
        with pytest.raises(CheckpointError, match="'reset' began again before the push was in"):
            each.result()
    new = shard.apply_durable(1, 3, "push", asked_as("reset", 2), KEYS, ONES)
    save = "5a5e5a5e5a5e5a5e"
    shard.checkpoint_enter(save, str(tmp_path))
    run_to_end(shard.checkpoint_save(save, str(tmp_path), 1, 0, None, False))
    assert not (other.done() or new.done())
    shard.checkpoint_durable(save)
    assert other.result() == 1 and new.result() == 1


@pytest.mark.parametrize("table", ["t", "a@b", "a@0123456789abcdef", "line\nline"])
def test_what_a_request_asks_for_is_read_back(table: str) -> None:
    assert parsed(asked_as(table, 2**60)) == (table, 2**60)
    assert read_outdated(str(outdated(asked_as(table, 3), 9, -1))) == (table, 9, -1)


def test_tables_without_a_master_have_no_epochs() -> None:
    service = LocalService()
    TableServer(service)
    worker = TableWorker(service)
    worker.create_sparse("clicks", 1, ADD)
    with pytest.raises(ConfigError, match="have a master"):
        worker.reset()
    assert worker.pull("clicks", KEYS).max() == 0


def test_what_a_master_has_forgotten_is_told_until_it_has_heard_it() -> None:
    class Forgetful:
        """A master's tree that is away for the first request after it forgot."""

        def __init__(self) -> None:
            self.added: list[str] = []
            self.is_away = True

        def tree_watch(
            self,
            path: str,
            callback: Callable[[TreeEvent], object],
            existing: bool,
            timeout_s: float,
        ) -> int:
            self.tell = callback
            return 1

        def tree_node_add(self, path: str, value: str, timeout_s: float) -> None:
            if self.is_away:
                self.is_away = False
                raise DeadlineExceeded("the master is away")
            self.added.append(f"{path} {value}")

    tree = Forgetful()
    Beginnings(tree, "kv").remember()  # type: ignore[arg-type]
    for table in ("a", "b"):
        tree.tell(TreeEvent(f"/_epochs_/kv/{table}", table.upper(), 1, 1))
    for path in ("/_epochs_/kv/b", "/_epochs_/kv/a", "/_epochs_/kv", "/_epochs_/kv/unknown"):
        tree.tell(TreeEvent(path, None, 0, 2))
    assert sorted(tree.added) == ["/_epochs_/kv/a A", "/_epochs_/kv/b B"]


class Interrupted:
    """The tree of a master whose session is lost with the write of that number, which it does
    before that, or not."""

    def __init__(self, tree: MasterClient, at: int, is_done: bool) -> None:
        self._tree, self._at, self._is_done = tree, at, is_done
        self.tree_node_get = tree.tree_node_get

    def tree_node_add(self, path: str, value: str = "", timeout_s: float = PATIENCE_S) -> None:
        self._write(partial(self._tree.tree_node_add, path, value, timeout_s=timeout_s))

    def tree_node_set(self, path: str, value: str, version: int, timeout_s: float) -> None:
        self._write(partial(self._tree.tree_node_set, path, value, version, timeout_s=timeout_s))

    def _write(self, write: Callable[[], object]) -> None:
        self._at -= 1
        if self._is_done or self._at:
            write()
        if not self._at:
            raise MaybeExecuted("the session expired meanwhile")


@pytest.mark.parametrize("is_done", [False, True])
@pytest.mark.parametrize("at", [1, 2, 3, 4, 5])
def test_what_may_have_been_noted_when_a_session_was_lost_is_looked_at_again(
    master: Master, at: int, is_done: bool
) -> None:
    with RpcService(master.address) as service:
        tree: Any = Interrupted(service.master_client, at, is_done)
        schemas, until = Schemas(tree, "kv"), time.monotonic() + PATIENCE_S
        for dim in (1, 2):
            specs = spread(SparseSpec("t", 0, 2, ADD, Constant(), dim), 2)  # type: ignore[arg-type]
            schemas.note(specs, until, True)
            assert schemas.find("t", PATIENCE_S) == specs
        tree = Interrupted(service.master_client, at, is_done)
        beginnings = Beginnings(tree, "kv")
        for epoch in (1, 2):
            begun, version = Beginning(epoch, -1, {}, {}), None
            while not beginnings.try_put("t", begun, version, PATIENCE_S):
                found = beginnings.read("t", PATIENCE_S)
                if found is not None and found[0] == begun:
                    break
                version = None if found is None else found[1]
            found = beginnings.read("t", PATIENCE_S)
            assert found is not None
            assert found[0] == begun


def test_all_questions_of_one_note_have_its_time_together() -> None:
    class Forgetful:
        """A master's tree in which nothing is yet."""

        def __init__(self) -> None:
            self.nodes, self.times = set[str](), list[float]()

        def tree_node_get(self, path: str, timeout_s: float) -> None:
            self.times.append(timeout_s)
            raise NoSuchNode(path)

        def tree_node_add(self, path: str, value: str = "", timeout_s: float = 0.0) -> None:
            self.times.append(timeout_s)
            if path.rpartition("/")[0] not in {"", *self.nodes}:
                raise NoSuchNode(path)
            self.nodes.add(path)

    specs = spread(SparseSpec("t", 0, 2, ADD, Constant(), 1), 2)  # type: ignore[arg-type]
    one, other = Forgetful(), Forgetful()
    Schemas(one, "kv").note(specs, time.monotonic() + PATIENCE_S, True)  # type: ignore[arg-type]
    begun = Beginning(1, -1, {}, {})
    assert Beginnings(other, "kv").try_put("t", begun, None, PATIENCE_S)  # type: ignore[arg-type]
    for tree in (one, other):
        assert len(tree.times) == 4
        assert all(after < before for before, after in itertools.pairwise(tree.times))


def test_a_restore_that_a_reset_has_overtaken_changes_nothing(tmp_path: Path) -> None:
    service = LocalService()
    TableServer(service)
    worker, (shard,) = TableWorker(service), service.servers["kv"]
    assert isinstance(shard, TableShard)
    worker.create_sparse("t", 1, ADD)
    worker.push("t", KEYS, ONES)
    worker.save(str(tmp_path), step=1)
    spec = shard.tables["t"][0].to_dict()
    name, _, _ = run_to_end(shard.checkpoint_find(str(tmp_path)))
    run_to_end(shard.checkpoint_load("0" * 16, str(tmp_path), name, {"t": spec}, 0, 1))
    assert shard.create_table(spec, 9, shard.life)
    with pytest.raises(CheckpointError, match="another restore or reset of table 't' came between"):
        shard.checkpoint_swap("0" * 16, {"t": (8, 1)})
    assert shard.pull(asked_as("t", 9), KEYS).max() == 0

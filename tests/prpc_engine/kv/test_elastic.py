"""Servers and workers are killed at random while pushes go on: what was acknowledged counts once,
and service comes back.

PRPC_TEST_KILLS=200 for a long run; with -s the times to recover are printed.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path

import numpy as np
import pytest

from prpc_engine import Master, RpcService
from prpc_engine.errors import Closed, ConfigError, DeadlineExceeded, NoServer, RemoteError
from prpc_engine.kv import ElasticServer, EpochChanged, TableServer, TableWorker
from prpc_engine.kv.client.future import KVFuture
from prpc_engine.master.client import MasterClient
from tests.program import halt
from tests.prpc_engine.kv.elastic_processes import (
    KEYS_A_PUSH,
    PUSH_TIMEOUT_S,
    TABLE,
    Watcher,
    check_ledger,
    elastic_world,
    keys_of,
    push_for_ever,
    serve_elastic,
    timed,
)
from tests.prpc_engine.master_processes import MasterProcess
from tests.prpc_engine.processes import PATIENCE_S, wait_until
from tests.prpc_engine.workloads.farm import Farm, end, kill
from tests.shard.processes import in_fork

KILLS = int(os.environ.get("PRPC_TEST_KILLS") or 6)
CUT_EVERY_S = 0.3  # of a server's connections, some one
PUSHES_UNDER_CUTS = 100
# of the server that is to lose it: longer than a busy machine leaves one alone that is not
LEASE_S = 3.0
ONES = np.ones((KEYS_A_PUSH, 1), np.float32)


@pytest.mark.slow
def test_whoever_is_killed_each_acknowledged_push_counts_once(farm: Farm, seed: int) -> None:
    chance = random.Random(seed)
    settings = {"partitions": 6, "replicas": 1, "servers": 3}
    with elastic_world() as (master, watcher):
        servers = [
            farm.start_ready(serve_elastic, master.address, settings, None, CUT_EVERY_S)
            for _ in range(3)
        ]
        watcher.wait_whole(3)
        mine = TableWorker(watcher.service, elastic=True, ack="replicated")
        mine.create_sparse(TABLE, 1, {"name": "add"})
        workers = {1: farm.start_ready(push_for_ever, master.address, 1, "replicated")}
        recovery_s = []
        for round_number in range(KILLS):
            if chance.random() < 0.3:
                kill(workers[max(workers)])
                workers[max(workers) + 1] = farm.start_ready(
                    push_for_ever, master.address, max(workers) + 1, "replicated"
                )
            kill(servers.pop(chance.randrange(3)))
            push = keys_of(0, round_number)
            recovery_s.append(
                timed(lambda push=push: mine.push(TABLE, push, ONES, timeout_s=PUSH_TIMEOUT_S))
            )  # type: ignore[misc]
            servers.append(
                farm.start_ready(serve_elastic, master.address, settings, None, CUT_EVERY_S)
            )
            watcher.wait_whole(3)
        wait_until(
            lambda: sum(worker.life.done - 1 for worker in workers.values()) > KILLS,
            "pushes of others",
        )
        end(workers[max(workers)])
        check_ledger(mine, 0, KILLS)
        pushes = {number: worker.life.done - 1 for number, worker in workers.items()}
        for number, acknowledged in pushes.items():
            check_ledger(mine, number, acknowledged)
        p50, p99 = np.percentile(recovery_s, [50, 99])
        print(
            f"{KILLS} kills, {sum(pushes.values())} pushes, each once; recovery p50 {p50:.3f} s, "
            f"p99 {p99:.3f} s"
        )
        for server in servers:
            end(server)


@pytest.mark.slow
def test_while_links_between_servers_and_workers_are_cut_each_acknowledged_push_counts_once(
    farm: Farm,
) -> None:
    settings = {"partitions": 4, "replicas": 1, "servers": 3}
    with elastic_world() as (master, watcher):
        servers = [
            farm.start_ready(serve_elastic, master.address, settings, None, 0.03) for _ in range(3)
        ]
        workers = [
            farm.start_ready(push_for_ever, master.address, number, "replicated")
            for number in (1, 2)
        ]
        for pushes in range(1, PUSHES_UNDER_CUTS + 1):
            wait_until(
                lambda pushes=pushes: all(worker.life.done > pushes for worker in workers),
                "a push under cuts",
            )  # type: ignore[misc]
        for worker in workers:
            end(worker)
        mine = TableWorker(watcher.service, elastic=True)
        mine.create_sparse(TABLE, 1, {"name": "add"})
        for number, worker in enumerate(workers, start=1):
            check_ledger(mine, number, worker.life.done - 1)
        placement = watcher.placement()
        assert placement is not None
        assert not any(placed.history for placed in placement.partitions)
        for server in servers:
            end(server)


@pytest.mark.slow
def test_servers_join_and_leave_under_load_and_nothing_is_lost(farm: Farm) -> None:
    with elastic_world() as (master, watcher):
        settings = {"partitions": 6}
        servers = [farm.start_ready(serve_elastic, master.address, settings)]
        worker = farm.start_ready(push_for_ever, master.address, 1, "applied")
        watcher.wait_whole(1)
        before = watcher.placement()
        servers += [farm.start_ready(serve_elastic, master.address, settings) for _ in range(2)]
        watcher.wait_whole(3)
        after = watcher.placement()
        assert before is not None
        assert after is not None
        # a third stays where it was
        assert [placed.epoch for placed in after.partitions].count(1) == 2
        assert max(placed.epoch for placed in after.partitions) <= 3
        with RpcService(master.address) as service, ElasticServer(service, **settings) as leaving:
            watcher.wait_whole(4)
            wait_until(lambda: leaving.statistics().primaries, "its share")
            leaving.drain(PATIENCE_S)
            left = leaving.statistics()
            assert (left.primaries, left.copies, left.lag, left.unanswered) == ((), (), 0, 0)
            # after everybody was told
            wait_until(lambda: leaving.statistics().hand_overs, "the count of what it gave away")
        watcher.wait_whole(3)
        pushes = worker.life.done
        wait_until(lambda: worker.life.done > pushes + 5)
        end(worker)
        placement = watcher.placement()
        assert placement is not None
        assert not any(placed.history for placed in placement.partitions)
        mine = TableWorker(watcher.service, elastic=True)
        mine.create_sparse(TABLE, 1, {"name": "add"})
        check_ledger(mine, 1, worker.life.done - 1)
        for server in servers:
            end(server)


def test_a_partition_without_a_copy_comes_from_the_checkpoint_and_workers_are_told_once(
    farm: Farm, tmp_path: Path
) -> None:
    settings = {"partitions": 2, "servers": 2, "checkpoint": str(tmp_path)}
    with elastic_world() as (master, watcher):
        servers = [farm.start_ready(serve_elastic, master.address, settings) for _ in range(2)]
        watcher.wait_whole(2)
        mine, other = (TableWorker(watcher.service, elastic=True) for _ in range(2))
        for worker in (mine, other):
            worker.create_sparse(TABLE, 1, {"name": "add"})
        for push in range(10):
            mine.push(TABLE, keys_of(0, push), ONES)
        mine.save(str(tmp_path), step=10)
        for push in range(10, 13):
            mine.push(TABLE, keys_of(0, push), ONES)
        kill(servers.pop())
        # applied, whatever happened before
        mine.push(TABLE, keys_of(0, 13), ONES, timeout_s=PUSH_TIMEOUT_S)
        with pytest.raises(
            EpochChanged, match="as of the checkpoint of step 10: up to 3 pushes of this worker"
        ) as told:
            mine.pull(TABLE, keys_of(0, 0))
        assert (told.value.step, told.value.pushes_lost) == (10, 3)
        counts = mine.pull(TABLE, np.concatenate([keys_of(0, push) for push in range(15)])).reshape(
            15, -1
        )
        assert (counts[:10] == 1).all()
        # half of the keys were held elsewhere
        assert set(counts[10:13].ravel().tolist()) == {0.0, 1.0}
        assert (counts[13] == 1).all()
        assert other.pull(TABLE, keys_of(0, 0)).tolist() == [[1]] * KEYS_A_PUSH
        with pytest.raises(EpochChanged, match="up to 0 pushes"):
            other.pull(TABLE, keys_of(0, 0))
        assert other.pull(TABLE, keys_of(0, 13)).tolist() == [[1]] * KEYS_A_PUSH
        for server in servers:
            end(server)


@pytest.mark.slow
def test_a_server_that_was_stopped_for_longer_than_its_lease_acknowledges_nothing(
    farm: Farm,
) -> None:
    settings = {"partitions": 2, "replicas": 1, "servers": 2}
    with elastic_world() as (master, watcher):
        servers = {}
        for lease_s in (LEASE_S, None):
            victim = farm.start_ready(serve_elastic, master.address, settings, lease_s)
            servers[victim.pid] = victim
        watcher.wait_whole(2)
        mine = TableWorker(watcher.service, elastic=True, ack="replicated")
        mine.create_sparse(TABLE, 1, {"name": "add"})
        mine.push(TABLE, keys_of(0, 0), ONES)
        stopped = next(iter(servers.values()))
        before = watcher.placement()
        halt(stopped.pid)
        pushes = [
            mine.submit_push(TABLE, keys_of(0, push), ONES, timeout_s=PUSH_TIMEOUT_S)
            for push in range(1, 9)
        ]
        wait_until(lambda: watcher.is_whole(1), "the other one has everything")
        after = watcher.placement()
        os.kill(stopped.pid, signal.SIGCONT)
        for push in pushes:
            push.result(PUSH_TIMEOUT_S)
        assert before is not None
        assert after is not None
        assert sorted(
            new.epoch - old.epoch
            for old, new in zip(before.partitions, after.partitions, strict=True)
        ) == [0, 1]
        watcher.wait_whole(2)  # it is filled anew
        check_ledger(mine, 0, 9)
        here, moved = sorted(
            mine.balance().workers, key=lambda share: share.worker.startswith("worker ")
        )
        # of the partition that moved a copy was told, and not by whom
        assert (here.pushes, moved.pushes) == (9, 9)
        assert f"process {os.getpid()}" in here.worker
        for server in servers.values():
            end(server)


def test_statistics_come_from_who_has_a_partition_now_though_the_worker_had_not_heard() -> None:
    with (
        elastic_world() as (master, watcher),
        ElasticServer(watcher.service, partitions=2) as first,
    ):
        worker = TableWorker(watcher.service, elastic=True)
        worker.create_sparse(TABLE, 1, {"name": "add"})
        assert worker.server_ids == (1,)
        with RpcService(master.address) as service, ElasticServer(service, partitions=2) as second:
            watcher.wait_whole(2)
            wait_until(
                lambda: (
                    (first.statistics().primaries, second.statistics().primaries) == ((1,), (0,))
                ),
                "a half for each",
            )
            assert worker.server_ids == (1,)
            assert sorted(worker.statistics()) == [1, 2]
            assert [share.server_id for share in worker.balance().servers] == [1, 2]
            second.drain(PATIENCE_S)


def test_statistics_count_a_verb_in_each_partition_and_each_different_key_of_it() -> None:
    with elastic_world() as (_, watcher), ElasticServer(watcher.service, partitions=4) as server:
        worker = TableWorker(watcher.service, elastic=True)
        worker.create_sparse(TABLE, 1, {"name": "add"})
        keys = np.arange(100).repeat(2)
        worker.push(TABLE, keys, np.ones((200, 1), np.float32))
        worker.pull(TABLE, keys)
        counted = worker.statistics()[server.server_id][TABLE]
        assert (counted.pushes, counted.pulls) == (4, 4)
        assert (counted.keys_pushed, counted.keys_pulled) == (100, 100)


def test_a_push_that_is_not_acknowledged_in_time_says_what_it_waited_for() -> None:
    with elastic_world() as (_, watcher), ElasticServer(watcher.service, partitions=1, replicas=1):
        for ack, said in (
            ("replicated", r"ack='replicated'.*second ElasticServer"),
            ("durable", r"ack='durable'.*save\(\) before its deadline"),
        ):
            worker = TableWorker(watcher.service, elastic=True, ack=ack)
            worker.create_sparse(TABLE, 1, {"name": "add"})
            push = worker.submit_push(TABLE, keys_of(0, 0), ONES, timeout_s=0.1)
            for end_of in (push.result, lambda push=push: asyncio.run(_awaited(push))):
                with pytest.raises(DeadlineExceeded, match=said):
                    end_of()


def test_a_server_refuses_folders_that_it_could_load_no_checkpoint_from() -> None:
    with elastic_world() as (_, watcher):
        for folders in ({"checkpoint": "saved"}, {"checkpoint_root": "saved"}):
            with pytest.raises(ConfigError, match="'saved': an absolute path"):
                ElasticServer(watcher.service, **folders)
        with pytest.raises(ConfigError, match="'/saved' is not below '/root'"):
            ElasticServer(watcher.service, checkpoint="/saved", checkpoint_root="/root")


def test_a_worker_that_was_made_for_plain_tables_is_told_to_say_elastic(tmp_path: Path) -> None:
    with (
        elastic_world() as (master, watcher),
        ElasticServer(watcher.service, partitions=2),
        RpcService(master.address) as service,
    ):
        TableWorker(watcher.service, elastic=True).save(tmp_path, 1)
        plain = TableWorker(service)
        for verb in (
            lambda: plain.create_sparse(TABLE, 1, {"name": "add"}),
            lambda: plain.create_dense("head", (2,), {"name": "add"}),
            lambda: plain.save(tmp_path, 2),
            lambda: plain.restore(tmp_path),
        ):
            with pytest.raises(ConfigError, match=r"TableWorker\(elastic=True\) is needed"):
                verb()
        with pytest.raises(RemoteError, match=r"TableWorker\(elastic=True\) is needed"):
            plain.statistics()


def test_a_worker_that_was_made_for_elastic_tables_is_told_of_plain_servers() -> None:
    with Master() as master, RpcService(master.address) as ours, RpcService(master.address) as own:
        TableServer(ours)
        with pytest.raises(DeadlineExceeded, match="TableServers, leave out elastic=True"):
            TableWorker(own, elastic=True, timeout_s=0.1)


def test_a_push_that_was_lost_ends_when_its_service_is_closed() -> None:
    with elastic_world() as (master, watcher), RpcService(master.address) as service:
        with ElasticServer(watcher.service, partitions=1):
            worker = TableWorker(service, elastic=True)
            worker.create_sparse(TABLE, 1, {"name": "add"})
        push = worker.submit_push(TABLE, keys_of(0, 0), ONES, timeout_s=PUSH_TIMEOUT_S)
        wait_until(lambda: worker.request_statistics().lost, "the loss")
        service.close()
        assert push.done()
        for end_of in (
            push.result,
            lambda: asyncio.run(_awaited(push)),
            lambda: worker.pull(TABLE, keys_of(0, 0)),
        ):
            with pytest.raises(Closed, match="closed"):
                end_of()


async def _awaited(push: KVFuture[None]) -> None:
    await push


def test_a_server_that_is_drained_before_there_is_a_placement_gives_away_what_it_gets() -> None:
    settings = {"partitions": 2, "servers": 2}
    with (
        elastic_world() as (master, watcher),
        ElasticServer(watcher.service, **settings) as leaving,
    ):
        with pytest.raises(DeadlineExceeded):
            leaving.drain(0.0)
        with RpcService(master.address) as service, ElasticServer(service, **settings) as staying:
            wait_until(lambda: staying.statistics().primaries == (0, 1), "all partitions")


def test_a_durable_push_is_answered_by_the_checkpoint_that_holds_it(
    farm: Farm, tmp_path: Path
) -> None:
    settings = {"partitions": 2, "servers": 2, "checkpoint": str(tmp_path)}
    with elastic_world() as (master, watcher):
        servers = [farm.start_ready(serve_elastic, master.address, settings) for _ in range(2)]
        watcher.wait_whole(2)
        mine, saver = (
            TableWorker(watcher.service, elastic=True, ack="durable"),
            TableWorker(watcher.service, elastic=True),
        )
        for worker in (mine, saver):
            worker.create_sparse(TABLE, 1, {"name": "add"})
        first = mine.submit_push(TABLE, keys_of(0, 0), ONES)
        assert mine.pull(TABLE, keys_of(0, 0)).tolist() == [[1]] * KEYS_A_PUSH
        assert not first.done()
        saver.save(str(tmp_path), step=1)
        first.result(PATIENCE_S)
        second = mine.submit_push(TABLE, keys_of(0, 1), ONES, timeout_s=PUSH_TIMEOUT_S)
        kill(servers.pop())  # it comes again, to whoever loads the checkpoint, and waits there
        saver.pull(TABLE, keys_of(0, 1), timeout_s=PUSH_TIMEOUT_S)
        with pytest.raises(EpochChanged):
            saver.pull(TABLE, keys_of(0, 0))
        wait_until(
            lambda: saver.pull(TABLE, keys_of(0, 1)).tolist() == [[1]] * KEYS_A_PUSH, "the push"
        )
        assert not second.done()
        saver.save(str(tmp_path), step=2)
        second.result(PATIENCE_S)
        with pytest.raises(EpochChanged, match="up to 0 pushes"):
            mine.pull(TABLE, keys_of(0, 0))
        check_ledger(mine, 0, 2)
        for server in servers:
            end(server)


def test_a_push_that_waits_at_a_server_as_that_is_closed_is_asked_of_its_successor(
    tmp_path: Path,
) -> None:
    settings = {"partitions": 2, "replicas": 1, "servers": 2}
    with (
        elastic_world() as (master, watcher),
        ElasticServer(watcher.service, **settings) as staying,
    ):
        with RpcService(master.address) as service, ElasticServer(service, **settings) as leaving:
            watcher.wait_whole(2)
            worker = TableWorker(watcher.service, elastic=True, ack="durable")
            worker.create_sparse(TABLE, 1, {"name": "add"})
            push = worker.submit_push(TABLE, keys_of(0, 0), ONES, timeout_s=PUSH_TIMEOUT_S)
            wait_until(
                lambda: staying.statistics().unanswered == leaving.statistics().unanswered == 1,
                "a half at each",
            )
        wait_until(lambda: staying.statistics().unanswered == 2, "the other half")
        worker.save(str(tmp_path), step=1, timeout_s=PUSH_TIMEOUT_S)
        push.result()
        assert worker.pull(TABLE, keys_of(0, 0)).tolist() == [[1]] * KEYS_A_PUSH


@pytest.mark.slow
def test_a_server_closes_though_its_master_is_gone_which_hears_of_it_when_it_is_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with MasterProcess(tmp_path) as master, RpcService(master.address, lease_s=60.0) as service:
        server = ElasticServer(service, partitions=2)
        wait_until(lambda: server.statistics().primaries == (0, 1), "its partitions")
        master.kill()
        wait_until(lambda: not service.master_client.connected, "the loss")
        server.close()
        assert "server 1 of 'kv' is closed; the master at" in caplog.text
        # only here, where the reconciler has ended
        monkeypatch.setattr("prpc_engine.kv.schema.tree.ASK_TIMEOUT_S", PATIENCE_S)
        with master.again():
            watcher = Watcher(service)
            wait_until(
                lambda: service.master_client.connected and not watcher.servers(), "the word"
            )


def test_a_close_in_a_fork_takes_nothing_from_the_parents_server() -> None:
    with elastic_world() as (_, watcher), ElasticServer(watcher.service, partitions=2) as server:
        wait_until(lambda: server.statistics().primaries == (0, 1), "its partitions")
        assert in_fork(server.close) == 0
        assert server.statistics().primaries == (0, 1)
        mine = TableWorker(watcher.service, elastic=True)
        mine.create_sparse(TABLE, 1, {"name": "add"})
        mine.push(TABLE, keys_of(0, 0), ONES)


def test_a_server_that_could_not_be_made_is_given_no_partitions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def is_away(self: MasterClient, path: str, *_: object, **__: object) -> int:
        raise DeadlineExceeded("the master is away")

    with elastic_world() as (_, watcher):
        monkeypatch.setattr(MasterClient, "tree_watch", is_away)
        with pytest.raises(DeadlineExceeded, match="the master is away"):
            ElasticServer(watcher.service, partitions=2)
        monkeypatch.undo()
        assert watcher.servers() == []
        with ElasticServer(watcher.service, partitions=2) as server:
            wait_until(lambda: server.statistics().primaries == (0, 1), "all partitions")


@pytest.mark.slow
def test_elastic_tables_say_what_they_cannot_do(farm: Farm) -> None:
    with elastic_world() as (master, watcher):
        with pytest.raises(NoServer):
            TableWorker(watcher.service, elastic=True, timeout_s=0.2)
        with pytest.raises(
            ConfigError,
            match="ack='replicated'; allowed: applied, durable, of elastic tables replicated",
        ):
            TableWorker(watcher.service, ack="replicated")
        with pytest.raises(ConfigError, match="replicas is 9"):
            ElasticServer(watcher.service, replicas=9)
        with (
            RpcService(master.address, shards=1) as sharded,
            pytest.raises(ConfigError, match="1 shards, none is allowed"),
        ):
            ElasticServer(sharded)
        with ElasticServer(watcher.service, partitions=2, replicas=1) as alone:
            worker = TableWorker(watcher.service, elastic=True, ack="replicated")
            worker.create_sparse(TABLE, 1, {"name": "add"})
            with pytest.raises(
                ConfigError, match="for services whose partitions stay where they are"
            ):
                worker.create_sparse(
                    "paced", 1, {"name": "add"}, consistency={"name": "sync", "workers": 2}
                )
            with pytest.raises(
                DeadlineExceeded, match=r"still holds partitions \[0, 1\] after 0.2 s"
            ):
                alone.drain(0.2)

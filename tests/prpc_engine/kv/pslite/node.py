"""What the processes of the job tests run: `python -m tests.prpc_engine.kv.pslite.node FLOW
[arguments]`, in each role.

A flow is a function here; what it asserts makes its process fail, and with it the job.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import select
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from prpc_engine import Master, RpcService, errors
from prpc_engine import pslite as ps
from prpc_engine.kv import ElasticServer, EpochChanged, TableWorker
from prpc_engine.pslite.ids import KEY_MAX
from prpc_engine.pslite.slicer import by_ranges
from tests.prpc_engine.kv.pslite import flows
from tests.prpc_engine.kv.pslite.bytedance import benchmark_stress, ipc_benchmark
from tests.prpc_engine.kv.pslite.flows import (
    awaited,
    group,
    holder,
    landing,
    miscounted,
    order,
    own_benchmark,
    threads,
    together,
)
from tests.prpc_engine.processes import PATIENCE_S, wait_until

KEYS = 10_000
PUSHES = 50


def connection() -> None:
    """Come and go, and come again."""
    ps.start(0)
    ps.finalize(0, True)
    ps.start(0)
    assert ps.num_servers() == int(os.environ["DMLC_NUM_SERVER"])
    assert ps.my_rank() == int(os.environ["DMLC_RANK"])
    assert [ps.is_scheduler(), ps.is_server(), ps.is_worker()].count(True) == 1
    left = []
    ps.register_exit_callback(lambda: left.append(True))
    ps.finalize(0, True)
    assert left == [True]


def simple_app(requests: str = "100") -> None:
    """The scheduler asks everybody, itself too, and nobody is asked more or less often."""
    ps.start(0)
    seen: list[int] = []
    answered: list[tuple[int, str, int]] = []

    def handle(data: ps.SimpleData, app: ps.SimpleApp) -> None:
        assert (data.head, data.body) == (1, "test")
        seen.append(data.timestamp)
        app.response(data, f"from {ps.get_postoffice().node_of(0)}")

    app = ps.SimpleApp(
        0,
        0,
        request_handle=handle,
        response_handle=lambda data, app: answered.append((data.sender, data.body, data.timestamp)),
    )
    if ps.is_scheduler():
        timestamps = [app.request(1, "test", ps.ALL) for _ in range(int(requests))]
        for timestamp in timestamps:
            app.wait(timestamp)
            assert app.is_done(timestamp)
        everybody = ps.get_postoffice().members(ps.ALL)
        assert sorted(answered) == sorted(
            (node, f"from {node}", ts) for node in everybody for ts in timestamps
        )
    ps.finalize(0, True)
    assert sorted(seen) == list(range(int(requests)))


def _train(customer_id: int) -> None:
    kv = ps.KVWorker(0, customer_id)
    place = ps.my_rank() + customer_id
    keys = np.uint64(KEY_MAX // KEYS) * np.arange(KEYS, dtype=np.uint64) + np.uint64(place)
    vals = np.random.default_rng(place + 7).integers(0, 1000, KEYS).astype(np.float32)
    timestamps = []
    for i in range(PUSHES):
        timestamps.append(kv.push(keys, vals))
        if i > 10:
            kv.wait(timestamps[-10])
    for timestamp in timestamps:
        kv.wait(timestamp)
    pulled = np.full(KEYS, np.nan, np.float32)
    done: list[tuple[float, threading.Thread]] = []
    note = lambda: done.append((pulled[0], threading.current_thread()))  # noqa: E731
    kv.wait(kv.pull(keys, pulled, callback=note))
    kv.wait(kv.push(keys, 0 * vals, callback=note))
    assert [value for value, _ in done] == 2 * [pulled[0]]
    assert threading.current_thread() not in [thread for _, thread in done]
    assert np.abs(pulled - PUSHES * vals).sum() / PUSHES < 1e-5
    outs = np.empty(KEYS, np.float32)
    for _ in range(PUSHES):
        kv.wait(kv.push_pull(keys, vals, outs))
    assert np.abs(outs - 2 * PUSHES * vals).sum() / (2 * PUSHES) < 1e-5


def kv_app() -> None:
    """Sums of floats, exact."""
    ps.start(0)
    if ps.is_server():
        ps.KVServer(0).set_request_handle(ps.KVServerDefaultHandle())
    elif ps.is_worker():
        _train(0)
    ps.finalize(0, True)


def kv_app_multi_workers(role: str) -> None:
    """One worker process, with as many customers as there are workers."""
    if role != "worker":
        kv_app()
        return
    failures: list[BaseException] = []

    def run(customer_id: int) -> None:
        try:
            ps.start(customer_id)
            _train(customer_id)
            ps.finalize(customer_id, True)
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(ps_workers())]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def ps_workers() -> int:
    """DMLC_NUM_WORKER."""
    return int(os.environ["DMLC_NUM_WORKER"])


def kv_app_benchmark(pairs: str) -> None:
    """Handlers of the user's: pushes are acknowledged, pulls get zeros."""
    ps.start(0)
    if ps.is_server():

        def handle(meta: ps.KVMeta, pairs: ps.KVPairs, server: ps.KVServer) -> None:
            server.response(
                meta,
                ps.KVPairs(pairs.keys, np.zeros(len(pairs.keys), np.float32))
                if meta.pull
                else None,
            )

        ps.KVServer(0).set_request_handle(handle)
    elif ps.is_worker():
        kv = ps.KVWorker(0, 0)
        count = int(pairs)
        keys = np.uint64(KEY_MAX // count) * np.arange(count, dtype=np.uint64)
        vals = np.ones(count, np.float32)
        kv.wait(kv.zpush(keys, vals))
        kv.wait(kv.pull(keys, vals))
        assert not vals.any()
    ps.finalize(0, True)


def verbs() -> None:
    """One worker, two servers: lens, the ends of the key range, slicers, cmd, order, deferred and
    wrong answers, typed errors.
    """
    ps.start(0)
    if ps.is_server():
        sums = ps.KVServerDefaultHandle()
        order: list[int] = []
        held: list[ps.KVMeta] = []

        def handle(meta: ps.KVMeta, pairs: ps.KVPairs, server: ps.KVServer) -> None:
            if meta.cmd == 1:  # remember, and answer in another thread
                order.append(int(pairs.vals[0]))
                threading.Thread(target=server.response, args=(meta,)).start()
            elif meta.cmd == 2:
                server.response(meta, ps.KVPairs(pairs.keys, np.array(order[:200], np.float32)))
            elif meta.cmd == 3:
                raise ValueError("this handler refuses")
            elif meta.cmd == 4:
                held.append(meta)  # and answer never
            elif meta.cmd == 5:
                server.response(meta)
                server.response(meta)
            elif meta.cmd == 6:
                server.response(
                    meta, ps.KVPairs(pairs.keys, np.ones(3, np.float32), np.array([3], np.int32))
                )
            else:
                sums(meta, pairs, server)

        server = ps.KVServer(3)
        with pytest.raises(errors.BadArguments, match="a function of"):
            server.set_request_handle(None)  # type: ignore[arg-type]
        server.set_request_handle(handle)
    elif ps.is_worker():
        kv = ps.KVWorker(3, 0)
        keys = np.array([0, 5, KEY_MAX // 2 + 1, KEY_MAX - 1, KEY_MAX], np.uint64)
        lens = np.array([2, 1, 0, 3, 1], np.int32)
        vals = np.arange(7, dtype=np.float64)
        kv.wait(kv.push(keys, vals, lens))
        kv.wait(kv.push(keys[3:4], vals[:3], lens[3:4]))
        got, got_lens = np.empty(7), np.empty(5, np.int32)
        kv.wait(kv.pull(keys, got, got_lens))
        assert got_lens.tolist() == lens.tolist()
        assert got.tolist() == [0, 1, 2, 3, 5, 7, 6]
        kv.set_slicer(lambda pairs, ranges: [None, pairs])
        other = np.array([7, 8], np.uint64)
        kv.wait(kv.push(other, np.array([1.0, 2.0])))
        kv.set_slicer(lambda pairs, ranges: [pairs, None])
        with pytest.raises(errors.RemoteError, match="never pushed"):
            kv.wait(kv.pull(other, np.empty(2)))
        kv.set_slicer(lambda pairs, ranges: [pairs, pairs])
        with pytest.raises(errors.BadArguments, match="each key is in one slice"):
            kv.push(other, np.array([1.0, 2.0]))
        kv.set_slicer(by_ranges)
        one = np.array([1], np.uint64)
        buffer = np.empty(1, np.float32)
        timestamps = []
        for i in range(1000):
            buffer[0] = i
            timestamps.append(kv.push(one, buffer, cmd=1))  # copied, though it may wait
        for timestamp in timestamps:
            kv.wait(timestamp, 30)
        first = np.empty(200, np.float32)
        kv.wait(kv.pull(one, first, cmd=2))
        assert first.tolist() == list(range(200))
        with pytest.raises(errors.RemoteError, match="this handler refuses"):
            kv.wait(kv.push(one, buffer, cmd=3))
        timestamp = kv.push(one, buffer, cmd=4)
        with pytest.raises(errors.DeadlineExceeded, match="server 0"):
            kv.wait(timestamp, 0.01)
        timestamp = kv.push(one, buffer, cmd=4, timeout_s=0.3)
        for _ in ("first", "again"):
            with pytest.raises(errors.DeadlineExceeded):
                kv.wait(timestamp)
        with pytest.raises(errors.RemoteError, match="answered before"):
            kv.wait(kv.push(one, buffer, cmd=5))
        with pytest.raises(
            errors.RemoteError, match="a pull of 2 keys is answered with as many lens, not with 1"
        ):
            kv.wait(kv.pull(other, np.empty(3, np.float32), cmd=6))
        with pytest.raises(ps.AnswerMismatch, match="there is room for 5"):
            kv.wait(kv.pull(keys, np.empty(5)))
        called = []
        kv.wait(kv.push(keys[:0], vals[:0], callback=lambda: called.append(1)))
        assert called == [1]
        with pytest.raises(ZeroDivisionError):
            kv.wait(kv.push(one, buffer, callback=lambda: 1 // 0))
        nested = lambda: kv.wait(kv.push(one, buffer, callback=lambda: called.append(2)))  # noqa: E731
        kv.wait(kv.push(one, buffer, callback=nested))
        assert called == [1, 2]
        with pytest.raises(errors.BadArguments, match="was not given"):
            kv.wait(10_000)
        for unfit in (kv.wait, kv.is_done, lambda none: asyncio.run(kv.wait_async(none))):
            with pytest.raises(errors.BadArguments, match="timestamp None: give the number"):
                unfit(None)  # type: ignore[arg-type]
        with pytest.raises(errors.ConfigError, match="only nodes with DMLC_ROLE=server"):
            ps.KVServer(9)
        ps.SimpleApp(9, 0).close()
        with pytest.raises(errors.ConfigError, match="customer 1 was not started"):
            ps.SimpleApp(9, 1)
        late: list[BaseException | None] = []
        timestamp = kv.push(one, buffer, cmd=4)
        waiting = threading.Thread(target=lambda: late.append(_outcome(kv, timestamp)), daemon=True)
        waiting.start()
        ps.finalize(0, True)
        waiting.join(30)
        assert isinstance(late[0], errors.RpcError), late
        assert not isinstance(late[0], errors.DeadlineExceeded)  # which is a minute later
        return
    ps.finalize(0, True)


def _outcome(kv: ps.KVWorker, timestamp: int) -> BaseException | None:
    try:
        kv.wait(timestamp)
    except Exception as error:
        return error
    return None


def early() -> None:
    """Pushes that come before their server is made, or has a handle, wait for it."""
    ps.start(0)
    postoffice = ps.get_postoffice()
    if ps.is_server():
        customer_router = postoffice.customer_router(postoffice.node_of(0))
        wait_until(lambda: customer_router.early_messages >= 5, "five early messages")
        server = ps.KVServer(0)
        seen: list[float] = []

        def handle(meta: ps.KVMeta, pairs: ps.KVPairs, server: ps.KVServer) -> None:
            seen.append(float(pairs.vals[0]))
            server.response(meta)

        server.set_request_handle(handle)
        ps.finalize(0, True)
        assert seen == list(range(10))
        return
    if ps.is_worker():
        kv = ps.KVWorker(0, 0)
        for timestamp in [
            kv.push(np.array([1], np.uint64), np.array([i], np.float32)) for i in range(10)
        ]:
            kv.wait(timestamp)
    ps.finalize(0, True)


def barriers() -> None:
    """Groups meet; who does not come is named."""
    ps.start(0)
    postoffice = ps.get_postoffice()
    if ps.is_worker():
        for _ in range(20):
            postoffice.barrier(0, ps.WORKER_GROUP, 30)
        if ps.my_rank() == 0:
            with pytest.raises(errors.DeadlineExceeded) as caught:
                postoffice.barrier(0, ps.WORKER_GROUP + ps.SERVER_GROUP, 0.5)
            assert str(caught.value).endswith("missing: server 0, worker 1") or str(
                caught.value
            ).endswith("missing: server 0")
            assert "scheduler" not in str(caught.value)
        with pytest.raises(errors.ConfigError, match="not in group 2"):
            postoffice.barrier(0, ps.SERVER_GROUP)
    ps.finalize(0, True)


def rejoin(folder: str) -> None:
    """A worker is killed and started again, three times; the job goes on. The test starts the new
    ones.
    """
    generation = len(list(Path(folder).iterdir()))
    if os.environ["DMLC_ROLE"] != "worker":
        ps.start(0)
        if ps.is_server():
            ps.KVServer(0).set_request_handle(ps.KVServerDefaultHandle())
        ps.finalize(0, True)
        return
    node = ps.start(0) if generation == 0 else ps.start_async(0)
    assert node == 9
    postoffice = ps.get_postoffice()
    assert postoffice.is_recovery == (generation > 0)
    kv = ps.KVWorker(0, 0)
    keys, vals = np.array([1, KEY_MAX], np.uint64), np.ones(2, np.float32)
    kv.wait(kv.push(keys, vals))
    kv.wait(kv.pull(keys, vals))
    assert vals.tolist() == [generation + 1] * 2
    Path(folder, str(generation)).touch()
    if generation < 3:
        signal.pause()  # until it is killed
    ps.finalize(0, True)


def rejoin_launched(folder: str) -> None:
    """As rejoin, and the launcher starts the new ones: the first dies by kill -9, the second asks
    for it by 254.
    """
    attempt = int(os.environ.get("DMLC_NUM_ATTEMPT", "0"))
    if os.environ["DMLC_ROLE"] != "worker":
        ps.start(0)
        if ps.is_server():
            ps.KVServer(0).set_request_handle(ps.KVServerDefaultHandle())
        ps.finalize(0, True)
        return
    node = ps.start_async(0) if attempt else ps.start(0)
    assert node == 9
    assert ps.get_postoffice().is_recovery == (attempt > 0)
    kv = ps.KVWorker(0, 0)
    keys, vals = np.array([1, KEY_MAX], np.uint64), np.ones(2, np.float32)
    kv.wait(kv.push(keys, vals))
    kv.wait(kv.pull(keys, vals))
    Path(folder, str(attempt)).write_text(str(vals.tolist()))
    if attempt == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    elif attempt == 1:
        os._exit(254)
    ps.finalize(0, True)


def elastic(folder: str) -> None:
    """A job of elastic tables, whose scheduler is the master: its server is killed, and comes back
    from its checkpoint.
    """
    role, path = os.environ["DMLC_ROLE"], Path(folder)
    address = f"{os.environ['DMLC_PS_ROOT_URI']}:{os.environ['DMLC_PS_ROOT_PORT']}"
    if role == "scheduler":
        with Master(address):
            (path / "master").touch()
            wait_until(
                lambda: all((path / f"{each} left").exists() for each in ("server", "worker")),
                "the others' leave",
            )
        return
    wait_until(lambda: (path / "master").exists(), "the master")
    with RpcService(address) as service:
        if role == "server":
            (path / f"server {os.environ['DMLC_NUM_ATTEMPT']}").write_text(str(os.getpid()))
            with ElasticServer(service, partitions=1, checkpoint=str(path / "saved")):
                wait_until(lambda: (path / "worker left").exists(), "the worker")
        else:
            train_over_a_loss(TableWorker(service, elastic=True, timeout_s=PATIENCE_S), path)
    (path / f"{role} left").touch()


def train_over_a_loss(worker: TableWorker, path: Path) -> None:
    """A push that is saved, one that is lost with its server, and one after that."""
    worker.create_sparse("counts", 1, {"name": "add"})
    keys, ones = np.arange(64), np.ones((64, 1), np.float32)
    worker.push("counts", keys, ones)
    worker.save(str(path / "saved"), step=1)
    worker.push("counts", keys, ones)
    _kill(int((path / "server 0").read_text()))
    worker.push("counts", keys, ones, timeout_s=60)
    with pytest.raises(EpochChanged, match="as of the checkpoint of step 1"):
        worker.pull("counts", keys)
    assert worker.pull("counts", keys).tolist() == [[2]] * 64
    assert (path / "server 1").exists()


def _kill(pid: int) -> None:
    """kill -9, and wait for the end: until then it may still answer."""
    descriptor = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    ended, _, _ = select.select([descriptor], [], [], PATIENCE_S)
    os.close(descriptor)
    assert ended, f"process {pid} outlives kill -9"


def lost_server() -> None:
    """A server dies: what is under way fails, with a typed error, and the node is known to be
    dead.
    """
    ps.start(0)
    if ps.is_server():
        server = ps.KVServer(0)
        server.set_request_handle(lambda meta, pairs, server: os.kill(os.getpid(), signal.SIGKILL))
        signal.pause()
    elif ps.is_worker():
        kv = ps.KVWorker(0, 0)
        began = time.monotonic()
        one = np.array([1], np.uint64), np.ones(1, np.float32)
        many = [kv.push(*one) for _ in range(3000)]  # most of them wait here
        with pytest.raises(errors.MaybeExecuted):
            kv.wait(many[0])
        for timestamp in many[1:]:
            with pytest.raises((errors.MaybeExecuted, errors.NotSent)):
                kv.wait(timestamp)
        wait_until(lambda: ps.get_postoffice().get_dead_nodes() == [8], "the dead server")
        with pytest.raises(errors.NotSent):
            kv.wait(kv.push(*one))
        assert time.monotonic() - began < 20  # told by what happened, and not by the deadline
        ps.get_postoffice().barrier(0, ps.SCHEDULER + ps.WORKER_GROUP)
    else:
        ps.get_postoffice().barrier(0, ps.SCHEDULER + ps.WORKER_GROUP)
        wait_until(lambda: ps.get_postoffice().get_dead_nodes() == [8, 9], "the end of the worker")
    ps.finalize(0, False)


def replaced_server(folder: str) -> None:
    """A server is killed and started again: the worker, which stays, finds it under the same node
    id.
    """
    role, path = os.environ["DMLC_ROLE"], Path(folder)
    if role == "server" and (path / "killed").exists():
        assert ps.start_async(0) == 8
        assert ps.get_postoffice().is_recovery
    else:
        ps.start(0)
    if role == "server":
        ps.KVServer(0).set_request_handle(ps.KVServerDefaultHandle())
    elif role == "worker":
        kv = ps.KVWorker(0, 0)
        one = np.array([1], np.uint64), np.ones(1, np.float32)
        kv.wait(kv.push(*one))
        (path / "pushed").touch()
        wait_until(lambda: (path / "killed").exists(), "the end of the server")
        ps.get_postoffice().connect((8,))
        kv.wait(kv.push(*one))
        got = np.zeros(1, np.float32)
        kv.wait(kv.pull(one[0], got))
        assert got.tolist() == [1]  # what the first one had is lost
    ps.finalize(0, True)


def dead_in_barrier(folder: str) -> None:
    """A server is killed while it waits in the last barrier: it does not count as there."""
    path = Path(folder)
    ps.start(0)
    if ps.is_scheduler():
        postoffice = ps.get_postoffice()
        wait_until(lambda: postoffice.waiting(ps.ALL) == {8}, "the server in the barrier")
        (path / "waits").touch()
        wait_until(lambda: not postoffice.waiting(ps.ALL), "its end")
        (path / "gone").touch()
    elif ps.is_worker():
        wait_until(lambda: (path / "gone").exists(), "the end of the server")
    ps.finalize(0, ps.is_server())


def joint() -> None:
    """Processes that are a server and a worker each: both ids, both ranks, exact sums, barriers of
    either group.
    """
    ps.start(0)
    if ps.is_scheduler():
        ps.finalize(0, True)
        return
    assert ps.is_server() and ps.is_worker()
    postoffice = ps.get_postoffice()
    assert {postoffice.node_of(0, "server") % 2, postoffice.node_of(0, "worker") % 2} == {0, 1}
    ps.KVServer(0).set_request_handle(ps.KVServerDefaultHandle())
    postoffice.barrier(0, ps.WORKER_GROUP, 30)
    postoffice.barrier(0, ps.SERVER_GROUP, 30)
    _train(0)
    ps.finalize(0, True)


def crash() -> None:
    """One worker fails; the others would wait for it in the last barrier for ever."""
    ps.start(0)
    if ps.is_worker() and ps.my_rank() == 1:
        os._exit(7)
    ps.finalize(0, True)


FLOWS = (
    connection, simple_app, kv_app, kv_app_multi_workers, kv_app_benchmark, verbs, early, barriers,
    rejoin, lost_server, replaced_server, dead_in_barrier, crash, joint, group, threads, landing,
    awaited, order, own_benchmark, together, holder, rejoin_launched, elastic, miscounted,
    flows.lengths, ipc_benchmark, benchmark_stress,
)  # fmt: skip

if __name__ == "__main__":
    name, arguments = sys.argv[1], list(itertools.islice(sys.argv, 2, None))
    {flow.__name__: flow for flow in FLOWS}[name](*arguments)

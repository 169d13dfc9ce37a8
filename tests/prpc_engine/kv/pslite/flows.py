"""Flows of node.py beyond dmlc's tests: groups, handler threads, registered buffers, coroutines,
bytedance's benchmark.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from prpc_engine import errors
from prpc_engine import pslite as ps
from prpc_engine.pslite.ids import KEY_MAX
from tests.prpc_engine.processes import wait_until


def group() -> None:
    """Two instances in each process: each talks to the servers' instances of its own number, under
    the process's id.
    """
    ps.start(0)
    postoffice = ps.get_postoffice()
    if ps.is_server():
        assert ps.my_rank() == int(os.environ["DMLC_RANK"])
        for instance in range(2):
            sums = ps.KVServerDefaultHandle()

            def handle(
                meta: ps.KVMeta,
                pairs: ps.KVPairs,
                server: ps.KVServer,
                sums: ps.KVServerDefaultHandle = sums,
            ) -> None:
                assert meta.sender in (9, 11)  # of the process, not of its instance
                sums(meta, pairs, server)

            ps.KVServer(0, instance=instance).set_request_handle(handle)
    elif ps.is_worker():
        assert ps.num_workers() == 2 and len(postoffice.members(ps.WORKER_GROUP)) == 4
        assert len(postoffice.key_ranges) == 2
        keys = np.array([ps.my_rank(), KEY_MAX - ps.my_rank()], np.uint64)
        for instance in range(2):
            kv = ps.KVWorker(0, 0, instance=instance)
            kv.wait(kv.push(keys, np.array([1, 2], np.float32) + instance))
            got = np.zeros(2, np.float32)
            kv.wait(kv.pull(keys, got))
            assert got.tolist() == [1 + instance, 2 + instance]
        with pytest.raises(errors.ConfigError, match="instance 2 of 2"):
            ps.KVWorker(1, 0, instance=2)
        postoffice.barrier(0, ps.WORKER_GROUP, 30)
    ps.finalize(0, True)


def lengths() -> None:
    """Two servers hold values of lengths that the worker does not know."""
    ps.start(0)
    if ps.is_server():
        ps.KVServer(0).set_request_handle(ps.KVServerDefaultHandle())
    elif ps.is_worker():
        kv = ps.KVWorker(0, 0)
        keys, lens = np.array([0, 5, KEY_MAX], np.uint64), np.array([2, 1, 3], np.int32)
        kv.wait(kv.push(keys, np.arange(6, dtype=np.float32), lens))
        for pull in (kv.pull, kv.zpull):
            got, got_lens = np.empty(0, np.float32), np.empty(0, np.int32)
            kv.wait(pull(keys, got, got_lens))
            assert (got.tolist(), got_lens.tolist()) == ([0, 1, 2, 3, 4, 5], [2, 1, 3])
            longer = np.full(8, -1, np.float32)
            kv.wait(pull(keys, longer, got_lens))
            assert (longer.tolist(), got_lens.tolist()) == ([0, 1, 2, 3, 4, 5, -1, -1], [2, 1, 3])
        sums = np.empty(0, np.float64)
        kv.wait(kv.push_pull(keys, np.ones(6, np.float32), sums, lens))
        assert sums.tolist() == [1, 2, 3, 4, 5, 6]
        sums.fill(0)
        kv.wait(kv.pull(keys, sums))  # it fits now, and stays where it is
        assert sums.tolist() == [1, 2, 3, 4, 5, 6]
        called: list[int] = []
        got = np.empty(0, np.float32)
        kv.wait(kv.pull(keys, got, callback=lambda: called.append(len(got))))
        assert called == [6]
        for unfit in (np.empty(5, np.float32), np.empty(8, np.float32)[:0]):
            with pytest.raises(
                ps.AnswerMismatch,
                match=f"there is room for {len(unfit)}; .* an empty one of your own",
            ):
                kv.wait(kv.pull(keys, unfit))
        kv.wait(kv.push(keys[2:], np.array([0, 0.5, 294])))
        whole = np.full(6, -1, np.int64)
        with pytest.raises(
            ps.AnswerMismatch,
            match=f"key {KEY_MAX}: float32 5.5 does not fit into int64, .* give one of float32",
        ):
            kv.wait(kv.pull(keys, whole))
        assert whole.tolist() == [-1] * 6  # not even of the keys whose values fit
        kv.wait(kv.pull(keys[:2], whole))
        assert whole.tolist() == [1, 2, 3, -1, -1, -1]
        with pytest.raises(errors.RemoteError, match="key 5: int64 16777217 does not fit into"):
            kv.wait(kv.push(keys[1:2], np.array([2**24 + 1])))
        with pytest.raises(errors.BadArguments, match=r"int32\[3\] is allowed"):
            kv.pull(keys, got, np.empty(0, np.int64))
        with pytest.raises(errors.BadArguments, match=r"int32\[3\] is allowed"):
            kv.push(keys, got, np.empty(0, np.int32))
    ps.finalize(0, True)


def threads() -> None:
    """Two handler threads: each worker's requests in order, and one that is stuck does not hold up
    the other's.
    """
    ps.start(0)
    if ps.is_server():
        seen: dict[int, list[float]] = {9: [], 11: []}
        go_on = threading.Event()

        def handle(meta: ps.KVMeta, pairs: ps.KVPairs, server: ps.KVServer) -> None:
            if meta.cmd == 1:
                raise ValueError("not here")
            if meta.cmd == 4:
                sys.exit("and not now")
            if meta.cmd == 2:
                assert go_on.wait(30)
            if meta.cmd == 3:
                go_on.set()
            seen[meta.sender].append(float(pairs.vals[0]))
            server.response(meta)

        server = ps.KVServer(0, handler_threads=2)
        server.set_request_handle(handle)
        ps.finalize(0, True)
        assert seen == {9: list(range(100)), 11: list(range(100))}
        return
    if ps.is_worker():
        kv = ps.KVWorker(0, 0)
        one = np.array([1], np.uint64)
        first = ps.my_rank() == 0
        timestamps = [kv.push(one, np.zeros(1, np.float32), cmd=2 if first else 3)]
        timestamps += [kv.push(one, np.array([i], np.float32)) for i in range(1, 100)]
        for timestamp in timestamps:
            kv.wait(timestamp, 30)
        for cmd, said in ((4, "and not now"), (1, "not here")):  # its thread goes on
            with pytest.raises(errors.RemoteError, match=said):
                kv.wait(kv.push(one, np.zeros(1, np.float32), cmd=cmd, timeout_s=30))
    ps.finalize(0, True)


def landing() -> None:
    """Registered buffers: pushes land in them, each of one worker and one key; what does not fit is
    refused.
    """
    ps.start(0)
    keys, size = np.array([7], np.uint64), 100_000
    if ps.is_server():
        buffers = {rank: np.zeros(size, np.uint8) for rank in range(2)}
        server = ps.KVServer(0)
        for rank, buffer in buffers.items():
            server.register_recv_buffer(rank, keys, buffer, np.array([size], np.int32))
        with pytest.raises(errors.BadArguments, match="one key"):
            server.register_recv_buffer(0, np.array([1, 2], np.uint64), np.zeros(4, np.uint8))

        def handle(meta: ps.KVMeta, pairs: ps.KVPairs, server: ps.KVServer) -> None:
            if meta.push:
                assert pairs.vals is buffers[ps_rank(meta.sender)]
                assert int(pairs.vals.min()) == int(pairs.vals.max()) == meta.cmd
            server.response(
                meta, ps.KVPairs(pairs.keys, buffers[ps_rank(meta.sender)]) if meta.pull else None
            )

        server.set_request_handle(handle)
    elif ps.is_worker():
        kv = ps.KVWorker(0, 0)
        vals, got = np.empty(size, np.uint8), np.empty(size, np.uint8)
        for round_number in range(5):
            vals[:] = round_number + 10 * ps.my_rank()
            kv.wait(kv.zpush(keys, vals, cmd=int(vals[0])))
            kv.wait(kv.zpull(keys, got))
            assert np.array_equal(vals, got)
        kv.wait(kv.zpush_pull(keys, vals, got, cmd=int(vals[0])))
        with pytest.raises(errors.RemoteError, match="registered buffer"):
            kv.wait(kv.push(keys, vals[:10]))
    ps.finalize(0, True)


def ps_rank(node: int) -> int:
    """Of a worker's id."""
    return (node - 9) // 2


def awaited() -> None:
    """In a coroutine: several under way, and an error where it belongs."""
    ps.start(0)
    if ps.is_server():
        ps.KVServer(0).set_request_handle(ps.KVServerDefaultHandle())
    elif ps.is_worker():
        kv = ps.KVWorker(0, 0)

        async def work() -> None:
            keys = np.array([1, KEY_MAX], np.uint64)
            await asyncio.gather(
                *(kv.wait_async(kv.push(keys, np.ones(2, np.float32))) for _ in range(100))
            )
            got = np.zeros(2, np.float32)
            await kv.wait_async(kv.pull(keys, got))
            assert got.tolist() == [100, 100]
            with pytest.raises(errors.RemoteError, match="has 1 values since"):
                await kv.wait_async(kv.push(keys, np.ones(4, np.float32)))

        asyncio.run(work())
    ps.finalize(0, True)


def order() -> None:
    """Messages get lost and are sent again: they are handled in order all the same."""
    ps.start(0)
    if ps.is_server():
        seen: list[int] = []

        def handle(meta: ps.KVMeta, pairs: ps.KVPairs, server: ps.KVServer) -> None:
            seen.append(int(pairs.vals[0]))
            server.response(meta)

        ps.KVServer(0).set_request_handle(handle)
        ps.finalize(0, True)
        assert seen == list(range(200))
        return
    if ps.is_worker():
        kv = ps.KVWorker(0, 0)
        for timestamp in [
            kv.push(np.array([1], np.uint64), np.array([i], np.float32)) for i in range(200)
        ]:
            kv.wait(timestamp)
    ps.finalize(0, True)


def together(length: str) -> None:
    """Small requests that leave together: each has an answer of its own, in order, and a late one
    is no obstacle to others.
    """
    ps.start(0)
    size = int(length)
    if ps.is_server():
        seen: list[int] = []
        held: list[ps.KVMeta] = []

        def handle(meta: ps.KVMeta, pairs: ps.KVPairs, server: ps.KVServer) -> None:
            seen.append(int(pairs.vals[0]) if meta.push else -1)
            if meta.cmd == 1:
                raise ValueError(f"not {seen[-1]}")
            if meta.cmd == 2:
                held.append(meta)
            elif meta.pull:
                server.response(meta, ps.KVPairs(pairs.keys, np.full(size, len(seen), np.float32)))
            else:
                server.response(meta)
            if meta.cmd == 3:
                while held:
                    server.response(held.pop())
            if meta.cmd == 4:
                os.kill(os.getpid(), signal.SIGKILL)

        ps.KVServer(0).set_request_handle(handle)
        ps.get_postoffice().barrier(0, ps.SERVER_GROUP + ps.WORKER_GROUP)
        signal.pause()
    elif ps.is_worker():
        kv = ps.KVWorker(0, 0)
        ps.get_postoffice().barrier(0, ps.SERVER_GROUP + ps.WORKER_GROUP)
        one = np.array([1], np.uint64)
        outs = np.zeros((300, size), np.float32)
        timestamps = []
        for i in range(300):
            if i % 10 == 7:
                timestamps.append(kv.pull(one, outs[i]))
            else:
                timestamps.append(
                    kv.zpush(one, np.full(size, i, np.float32), cmd={3: 1, 5: 2}.get(i % 10, 0))
                )
        for i, timestamp in enumerate(timestamps):
            if i % 10 == 3:
                with pytest.raises(errors.RemoteError, match=f"ValueError: not {i}"):
                    kv.wait(timestamp)
            elif i % 10 == 5:
                assert not kv.is_done(timestamp)
            else:
                kv.wait(timestamp, 30)
        # in the order in which they were sent
        assert outs[7::10, [0, -1]].tolist() == [[i, i] for i in range(8, 301, 10)]
        kv.wait(kv.push(one, np.zeros(1, np.float32), cmd=3))
        for timestamp in timestamps[5::10]:
            kv.wait(timestamp, 30)
        failed, done = (kv.push(one, np.zeros(size, np.float32), cmd=cmd) for cmd in (1, 0))
        wait_until(
            lambda: kv.is_done(failed) and kv.is_done(done),
            "the answers to two that nobody waits for",
        )
        for _ in range(2):
            kv.wait(done)
            with pytest.raises(errors.RemoteError, match="ValueError: not 0"):
                kv.wait(failed)
        late = [kv.push(one, np.zeros(1, np.float32), cmd=2) for _ in range(100)]
        kv.push(one, np.zeros(1, np.float32), cmd=4)
        for timestamp in late:
            with pytest.raises((errors.MaybeExecuted, errors.NotSent)):
                kv.wait(timestamp)
        ps.get_postoffice().barrier(0, ps.SCHEDULER + ps.WORKER_GROUP)
    else:
        ps.get_postoffice().barrier(0, ps.SCHEDULER + ps.WORKER_GROUP)
        wait_until(lambda: ps.get_postoffice().get_dead_nodes() == [8, 9], "the end of the worker")
    ps.finalize(0, False)


def holder(folder: str) -> None:
    """The worker that holds a barrier is killed while another one waits in it: its successor holds
    it again.
    """
    path = Path(folder)
    is_first = not (path / "waited").exists()
    if os.environ["DMLC_ROLE"] != "worker" or is_first:
        ps.start(0)
    else:
        assert ps.start_async(0) == 9
    postoffice = ps.get_postoffice()
    if ps.is_worker():
        for _ in range(3 if is_first else 0):
            postoffice.barrier(0, ps.WORKER_GROUP, 30)
        if ps.my_rank() == 0 and is_first:
            threading.Thread(
                target=postoffice.barrier, args=(0, ps.WORKER_GROUP), daemon=True
            ).start()
            wait_until(lambda: postoffice.waiting(ps.WORKER_GROUP) == {9, 11}, "worker 1")
            (path / "waited").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if ps.my_rank() == 2:
            wait_until(lambda: (path / "killed").exists(), "the end of worker 0")
        for _ in range(3):
            postoffice.barrier(0, ps.WORKER_GROUP, 30)
        if ps.my_rank() == 0:
            postoffice.barrier(0, ps.SCHEDULER + ps.WORKER_GROUP, 30)
            os.kill(os.getpid(), signal.SIGKILL)
        postoffice.barrier(0, ps.SCHEDULER + ps.WORKER_GROUP, 30)
        with pytest.raises(errors.DeadlineExceeded, match="missing: worker 0"):
            postoffice.barrier(0, ps.WORKER_GROUP, 0.5)
    elif ps.is_scheduler():
        postoffice.barrier(0, ps.SCHEDULER + ps.WORKER_GROUP)
        wait_until(
            lambda: {8, 9, 11, 13} <= set(postoffice.get_dead_nodes()), "the end of all others"
        )
    ps.finalize(0, False)


def miscounted() -> None:
    """A worker counts one server more than there is, and would find every key elsewhere; then it
    counts right.
    """
    if os.environ["DMLC_ROLE"] == "worker":
        os.environ["DMLC_NUM_SERVER"] = "2"
        with pytest.raises(
            errors.ConfigError, match="DMLC_NUM_SERVER is 2 here and 1 at the scheduler"
        ):
            ps.start(0, timeout_s=30)
        os.environ["DMLC_NUM_SERVER"] = "1"
    ps.start(0)
    if ps.is_worker():
        with pytest.raises(
            errors.ConfigError, match="this process is a worker, and so are all of its customers"
        ):
            ps.start(1, role="server")
    ps.finalize(0, True)


def own_benchmark(nbytes: str, mode: str) -> None:
    """bytedance's test_benchmark: one key a message, spread over the servers; the server keeps what
    was pushed first.
    """
    ps.start(0)
    size, keys_per_server, rounds = int(nbytes), 4, 5
    ranges = ps.get_postoffice().key_ranges
    if ps.is_server():
        store: dict[int, np.ndarray] = {}

        def handle(meta: ps.KVMeta, pairs: ps.KVPairs, server: ps.KVServer) -> None:
            key = int(pairs.keys[0])
            if meta.push:
                assert pairs.lens is not None and pairs.lens.tolist() == [len(pairs.vals)]
                store.setdefault(key, pairs.vals.copy())
                server.response(meta)
            else:
                server.response(
                    meta, ps.KVPairs(pairs.keys, store[key], np.array([len(store[key])], np.int32))
                )

        ps.KVServer(0).set_request_handle(handle)
        workers = ps.num_workers()
        ps.finalize(0, True)
        assert len(store) == keys_per_server * workers  # of this server's range, by all workers
        return
    if ps.is_worker():
        kv = ps.KVWorker(0, 0)
        count, first = keys_per_server * len(ranges), ps.my_rank() * keys_per_server
        chosen = [
            np.array([ranges[i % len(ranges)].begin + first + i // len(ranges)], np.uint64)
            for i in range(count)
        ]
        lens = np.array([size], np.int32)
        vals = [np.full(size, i + 1, np.uint8) for i in range(count)]
        outs = [np.zeros(size, np.uint8) for _ in range(count)]
        for timestamp in [kv.zpush(key, val, lens) for key, val in zip(chosen, vals, strict=True)]:
            kv.wait(timestamp)
        ps.get_postoffice().barrier(0, ps.WORKER_GROUP, 30)
        for _ in range(rounds):
            timestamps = []
            for key, val, out in zip(chosen, vals, outs, strict=True):
                if mode != "pull":
                    timestamps.append(kv.zpush(key, val, lens))
                if mode != "push":
                    timestamps.append(kv.zpull(key, out))
            for timestamp in timestamps:
                kv.wait(timestamp)
        if mode != "push":
            assert all(np.array_equal(val, out) for val, out in zip(vals, outs, strict=True))
    ps.finalize(0, True)

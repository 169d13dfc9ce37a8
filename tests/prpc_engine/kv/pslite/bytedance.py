"""Flows of node.py after bytedance's test_ipc_benchmark and test_benchmark_stress, which need RDMA
or GPUs there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

import prpc_engine
from prpc_engine import pslite as ps
from prpc_engine.pslite import ids

TIMEOUT_S = 60.0


def stored() -> ps.KVServer:
    """A server that keeps what was pushed last to each key."""
    store: dict[int, np.ndarray] = {}

    def handle(meta: ps.KVMeta, pairs: ps.KVPairs, server: ps.KVServer) -> None:
        key = int(pairs.keys[0])
        assert pairs.keys.shape == (1,)
        if meta.push:
            assert pairs.lens is not None and pairs.lens.tolist() == [len(pairs.vals)]
            store[key] = pairs.vals.copy()
        server.response(
            meta,
            ps.KVPairs(pairs.keys, store[key], np.array([len(store[key])], np.int32))
            if meta.pull
            else None,
        )

    server = ps.KVServer(0)
    server.set_request_handle(handle)
    return server


def shares(dedicated: int, workers: int, keys: int) -> Iterator[int]:
    """Which server has each key where `workers` hosts have a server beside their worker, and
    `dedicated` have one alone: those come first, and get so much more that every network card
    carries the same."""
    colocated = workers
    alone = round(
        keys * 2 * dedicated * (workers - 1) / (workers * (workers + dedicated) - 2 * dedicated)
    )
    for key in range(keys):
        yield key % dedicated if key < alone else dedicated + key % colocated


def ipc_benchmark(nbytes: str) -> None:
    """Values in shared memory, pushed from where they are and pulled to where they shall be, by
    every worker at once.
    """
    ps.start(0)
    if ps.is_server():
        stored()
    elif ps.is_worker():
        kv, size, ranges = ps.KVWorker(0, 0), int(nbytes), ps.get_postoffice().key_ranges
        lens = np.array([size], np.int32)
        homes = [
            *itertools.islice(itertools.cycle(range(len(ranges))), 6),
            *shares(1, len(ranges) - 1, 6),
        ]
        assert set(homes) == set(range(len(ranges)))
        chosen = [
            np.array([ranges[home].begin + (ps.my_rank() << 32) + (seed << 16)], np.uint64)
            for seed, home in enumerate(homes)
        ]
        vals = [prpc_engine.empty(size, np.uint8) for _ in chosen]
        outs = [np.zeros(size, np.uint8) for _ in chosen]
        for round_number in range(3):
            for seed, val in enumerate(vals):
                val[:] = seed + 10 * round_number
            timestamps = [kv.zpush(key, val, lens) for key, val in zip(chosen, vals, strict=True)]
            timestamps += [kv.zpull(key, out) for key, out in zip(chosen, outs, strict=True)]
            for timestamp in timestamps:
                kv.wait(timestamp, TIMEOUT_S)
            assert all(np.array_equal(val, out) for val, out in zip(vals, outs, strict=True))
    ps.finalize(0, True)


def benchmark_stress(nbytes: str, minibatches: str) -> None:
    """Joint nodes that scatter, gather, scatter again, and exchange dense values: with every other
    node, never with their own.
    """
    ps.start(0)
    if ps.is_scheduler():
        ps.finalize(0, True)
        return
    postoffice = ps.get_postoffice()
    server = stored()
    kv, own = ps.KVWorker(0, 0), ids.rank_of(server.node)
    assert ids.rank_of(kv.node) == own == ps.my_rank()
    lens = np.array([int(nbytes)], np.int32)
    others = [each for rank, each in enumerate(postoffice.key_ranges) if rank != own]

    def key(session: str, begin: int, of: int) -> np.ndarray:
        return np.array(
            [begin + 1000 * ["scatter", "again", "dense"].index(session) + of], np.uint64
        )

    def push(session: str, value: int) -> None:
        full = np.full(int(nbytes), value, np.uint8)
        for timestamp in [kv.zpush(key(session, each.begin, own), full, lens) for each in others]:
            kv.wait(timestamp, TIMEOUT_S)

    def pulled(session: str) -> set[int]:
        """What all nodes have pushed of it to the others."""
        outs = [
            (each.begin, of, np.zeros(int(nbytes), np.uint8))
            for each in others
            for of in range(ps.num_workers())
            if postoffice.key_ranges[of] != each
        ]
        for timestamp in [kv.zpull(key(session, begin, of), out) for begin, of, out in outs]:
            kv.wait(timestamp, TIMEOUT_S)
        assert all(int(out.min()) == int(out.max()) for _, _, out in outs)
        return {int(out[0]) for _, _, out in outs}

    for minibatch in range(int(minibatches)):
        for session in ("scatter", "again", "dense"):
            push(session, minibatch)
        postoffice.barrier(0, ps.WORKER_GROUP, TIMEOUT_S)
        assert [pulled(session) for session in ("scatter", "again", "dense")] == [{minibatch}] * 3
        postoffice.barrier(0, ps.WORKER_GROUP, TIMEOUT_S)
    ps.finalize(0, True)

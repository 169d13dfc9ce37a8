"""Figures that others published for other machines, to stand beside ours in a table or a plot;
nothing is judged by them.

Source: the documentation of DI-engine, page "high-performance RPC framework", table "intra-node
P2P" in ms. Pods with A100-80GB. Arrays are of float32, and their sizes binary: 5 x 64 Ki items are
its "1.25 MB".

    shm                 GPU memory copied to shared memory, a message, copied out and back to a GPU:
                        the round trip of a queue
    nccl-nvlink         dist.send() from GPU to GPU, without an answer
    cuda-shared-tensor  a copy from GPU to GPU, and the round trip of a queue
They are means of 10 (nccl: of 2) without warm-up, and stand where ours has medians.

The C++ ps-lite (dmlc/ps-lite 15b8adf, built natively; zmq over loopback; one worker, one server; 2
cores of an AMD EPYC): rates of rounds of 40 keys (4 of 16 MB), each waited for as a whole, payload
counted once; times of one push awaited, and of a barrier.
"""

from __future__ import annotations

from .harness import Result

OTHER_MACHINE = "other machine"
KIB = 1 << 10
SIZES_BYTES = {
    label: 5 * items * 4
    for label, items in {
        "1.25 KB": 64,
        "20 KB": KIB,
        "1.25 MB": 64 * KIB,
        "10 MB": 512 * KIB,
        "40 MB": 2 * KIB * KIB,
        "640 MB": 32 * KIB * KIB,
        "1.25 GB": 64 * KIB * KIB,
    }.items()
}
# Table "inter-node P2P" of the same page, in ms: 200 Gb/s InfiniBand between two hosts.
INTER_SIZES_BYTES = {
    **{label: SIZES_BYTES[label] for label in list(SIZES_BYTES)[1:]},
    "2.5 GB": 5 * 128 * KIB * KIB * 4,
}
INTER_TIMES_MS = {
    "DI-engine nng-TCP": (5.7353, 9.6782, 30.5187, 172.9719, 3450.7418, 7083.6372, 14072.1213),
    "DI-engine torchrpc-TCP": (5.6691, 5.4707, 14.0155, 39.4443, 580.333, 1154.0793, 2297.3776),
    "DI-engine torchrpc-IB": (21.3884, 4.4093, 5.9105, 22.3012, 130.249, 236.8084, 477.2389),
}
TIMES_MS = {  # for each of the sizes
    "DI-engine shm": (0.3605, 0.352, 0.9924, 7.1229, 47.9575, 798.8635, 1548.782),
    "DI-engine nccl-nvlink": (0.1969, 0.1104, 0.2162, 0.3285, 0.4532, 3.3166, 5.3828),
    "DI-engine cuda-shared-tensor": (0.5307, 0.578, 0.9643, 0.5908, 1.2449, 5.3707, 9.686),
}


def name_of(column: str) -> str:
    """How a column of the table is called among candidates."""
    return f"{column} ({OTHER_MACHINE})"


def results(bench: str, case: str, label: str, between_hosts: bool = False) -> list[Result]:
    """What was published for the size called `label`, within a host or between two."""
    sizes = INTER_SIZES_BYTES if between_hosts else SIZES_BYTES
    row = list(sizes).index(label)
    return [
        Result(
            bench,
            case,
            name_of(column),
            "given",
            "ok",
            p50_ns=times_ms[row] * 1e6,
            bytes_per_op=sizes[label],
        )
        for column, times_ms in (INTER_TIMES_MS if between_hosts else TIMES_MS).items()
    ]


PSLITE = "dmlc ps-lite, zmq"
PSLITE_GBPS = {  # {verb: {bytes of a value: of many under way}}
    "push": {65_536: 23.3, 1_024_000: 44.9, 16_384_000: 27.6},
    "pull": {65_536: 24.6, 1_024_000: 49.1, 16_384_000: 23.8},
    "push_pull": {65_536: 11.5, 1_024_000: 20.2, 16_384_000: 13.0},
}
PSLITE_AWAITED_US = {64: 110.0, 1024: 142.0, 4096: 134.0}  # one push; now and then 50 to 60
PSLITE_MESSAGES_PER_S = 205_000.0  # pushes of 64 B under way
PSLITE_BATCHED_MKEYS_PER_S = 112.0  # scalars, 100,000 a push, its default handle
PSLITE_BARRIER_US = 91.0


def pslite_results(bench: str, case: str, verb: str, size_bytes: int, window: int) -> list[Result]:
    """What was measured of it for a verb ("keys": of scalars;
    "barrier"), as one result, or none.
    """
    p50_us = ops_per_s = None
    figures: dict[str, float] = {}
    if verb == "barrier":
        p50_us = PSLITE_BARRIER_US
    elif verb == "keys":
        figures["million_keys_per_s"] = PSLITE_BATCHED_MKEYS_PER_S
    elif window > 1:
        ops_per_s = PSLITE_MESSAGES_PER_S
    elif verb == "push" and size_bytes in PSLITE_AWAITED_US:
        p50_us = PSLITE_AWAITED_US[size_bytes]
    elif size_bytes in PSLITE_GBPS.get(verb, {}):
        figures["gbps"] = gbps = PSLITE_GBPS[verb][size_bytes]
        ops_per_s = gbps * 1e9 / 8 / size_bytes
    else:
        return []
    p50_ns = None if p50_us is None else p50_us * 1e3
    given = Result(
        bench,
        case,
        name_of(PSLITE),
        "given",
        "ok",
        p50_ns=p50_ns,
        ops_per_s=ops_per_s,
        bytes_per_op=size_bytes,
        figures=figures,
    )
    return [given]

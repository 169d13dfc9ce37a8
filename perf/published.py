"""Figures that others published for other machines, to stand beside ours in a table or a plot; nothing is judged by them.

Source: the documentation of DI-engine, page "high-performance RPC framework", table "intra-node P2P" in ms. Pods with A100-80GB.
Arrays are of float32, and their sizes binary: 5 x 64 Ki items are its "1.25 MB".

    shm                 GPU memory copied to shared memory, a message, copied out and back to a GPU: the round trip of a queue
    nccl-nvlink         dist.send() from GPU to GPU, without an answer
    cuda-shared-tensor  a copy from GPU to GPU, and the round trip of a queue
They are means of 10 (nccl: of 2) without warm-up, and stand where ours has medians.
"""

from __future__ import annotations

from perf.harness import Result

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
TIMES_MS = {  # for each of the sizes
    "DI-engine shm": (0.3605, 0.352, 0.9924, 7.1229, 47.9575, 798.8635, 1548.782),
    "DI-engine nccl-nvlink": (0.1969, 0.1104, 0.2162, 0.3285, 0.4532, 3.3166, 5.3828),
    "DI-engine cuda-shared-tensor": (0.5307, 0.578, 0.9643, 0.5908, 1.2449, 5.3707, 9.686),
}


def name_of(column: str) -> str:
    """How a column of the table is called among candidates."""
    return f"{column} ({OTHER_MACHINE})"


def results(bench: str, case: str, label: str) -> list[Result]:
    """What was published for the size called `label`."""
    row = list(SIZES_BYTES).index(label)
    return [
        Result(bench, case, name_of(column), "given", "ok", p50_ns=times_ms[row] * 1e6, bytes_per_op=SIZES_BYTES[label])
        for column, times_ms in TIMES_MS.items()
    ]

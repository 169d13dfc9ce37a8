"""A step of training with TensorFlow: its own gRPC servers and ours, the same script, in one run.

Every task is one process that has both servers. A worker runs some steps on the one, then some on
the other, and so on, so that a drift of the machine hits both alike. A step is session.run([train,
loss]) with data that was made before the clock starts.

Expected of a step with one ps and one worker: one run of the worker's graph (20 us, and what it
computes), two calls of the ps of some 40 us each, in which it runs a stage in the thread that found
the request: 0.15 ms above what one process takes. Stock: two rounds of some 0.35 ms, through a
master, two workers, and a change of threads at each edge. A dense variable of 64 MB: some 20 ms of
arithmetic, half of it page faults of its 64 MB results, and one copy of 64 MB into shared memory in
each direction (3 ms each, and not less with two threads: one takes all that the memory gives);
stock makes three or four, each into fresh pages.

    python -m perf.bench_tensorflow [--json] [--quick]          TensorFlow 2.15 is needed
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import select
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest

from .harness import Result
from .targets import Target
from .timing import FULL, TINY, Effort

NAME = "tensorflow"
STOCK, OURS, EACH, FUSED = "stock gRPC", "prpc", "prpc, sendrecv", "prpc, sendrecv, tensor_fuse"
PORTS = range(20000, 32000)  # below what the kernel gives to others
HASH_BUCKETS = 10_000  # of each column of Wide & Deep
SIZES = (100_000, 1_000)  # goods and kinds of goods
LAYERS_OF_500_OPS = 27  # 16 ops each with gradient, update and initial value, and 65 around them
ANSWER_S_MAX = 120.0  # the longest is importing TensorFlow on a busy machine


class Way(NamedTuple):
    """Of running a step."""

    protocol: str
    plane: str = "star"
    fuse: bool = False


WAYS = {
    STOCK: Way("grpc"),
    OURS: Way("prpc"),
    EACH: Way("prpc", "sendrecv"),
    FUSED: Way("prpc", "sendrecv", True),
}
PROTOCOLS = ("grpc", "prpc")


@dataclass(frozen=True, slots=True)
class Train:
    """A model, how many tasks train it, and the ways that are compared."""

    model: str
    ps: int = 1
    workers: int = 1
    steps_of_full: int = 400
    ways: tuple[str, ...] = (STOCK, OURS)
    shards: int = 1  # processes of each ps, of ours

    def __str__(self) -> str:
        fused = ", fused or not" if FUSED in self.ways else ""
        if self.shards > 1:
            fused = f", {self.shards} processes a ps"
        return (
            f"{self.model}, {self.ps} ps, {self.workers} "
            f"worker{'s' if self.workers > 1 else ''}{fused}"
        )


CASES = [
    Train("softmax"),
    Train("embedding + 8 variables"),
    Train("32 variables"),
    Train("64 MB dense", steps_of_full=30),
    Train("softmax", workers=2),
    Train("embedding + 8 variables", ps=2, workers=2),
    Train("first step of 500 ops", steps_of_full=5),
    Train("32 variables", ways=(EACH, FUSED, OURS)),
    Train("Wide & Deep", steps_of_full=200),
    Train("Wide & Deep", ps=2, workers=2, steps_of_full=200),
    Train("softmax", workers=2, shards=2),
    Train("Wide & Deep", workers=2, steps_of_full=200, shards=2),
    Train("Wide & Deep", steps_of_full=200, shards=2),
    Train("Wide & Deep", workers=2, steps_of_full=200),
    Train("1 M x 16 sparse, Adagrad"),
    Train("DeepFM", steps_of_full=200),
    Train("DeepFM", workers=2, steps_of_full=200),
    Train("DIN-like", steps_of_full=200),
    Train("DIN-like", workers=2, steps_of_full=200),
    Train("softmax", workers=4),
    Train("first step of Wide & Deep", steps_of_full=5),
]
TARGETS = [
    *(Target(str(case), OURS, "p50_ns", "at most", 1 / 1.7, against=STOCK) for case in CASES[:3]),
    Target(str(CASES[3]), OURS, "p50_ns", "at most", 1 / 2, against=STOCK),
    *(Target(str(case), OURS, "ops_per_s", "at least", 1.5, against=STOCK) for case in CASES[4:6]),
    Target(str(CASES[6]), OURS, "p50_ns", "at most", 2.0, against=STOCK),
    Target(str(CASES[7]), FUSED, "messages", "at most", 1 / 3, against=EACH),
    Target(str(CASES[7]), FUSED, "p50_ns", "at most", 1 / 2, against=EACH),
    Target(str(CASES[8]), OURS, "p50_ns", "at most", 1 / 1.6, against=STOCK),
    Target(str(CASES[9]), OURS, "ops_per_s", "at least", 1.7, against=STOCK),
    # on four cores or more
    Target(str(CASES[10]), OURS, "ops_per_s", "at least", 1.7, against=STOCK),
    Target(str(CASES[11]), OURS, "ops_per_s", "at least", 1.7, against=STOCK),
    Target(str(CASES[12]), OURS, "p50_ns", "at most", 1 / 1.6, against=STOCK),
    Target(str(CASES[13]), OURS, "ops_per_s", "at least", 1.6, against=STOCK),
    Target(str(CASES[14]), OURS, "p50_ns", "at most", 1 / 1.7, against=STOCK),
    *(
        Target(str(case), OURS, "ops_per_s", "at least", 1.6, against=STOCK)
        for case in CASES[15:20]
    ),
    Target(str(CASES[20]), OURS, "p50_ns", "at most", 1.0, against=STOCK),
]


def run(
    case: Train,
    effort: Effort = FULL,
    progress: Callable[[str], None] | None = None,
    pinned: bool = True,
) -> list[Result]:
    """Measure one case in all its ways. Nothing is pinned: TensorFlow has threads for all cores."""
    with _job(case) as workers:
        return _measured(case, workers, effort, progress)


def _measured(
    case: Train,
    workers: list[subprocess.Popen[bytes]],
    effort: Effort,
    progress: Callable[[str], None] | None = None,
) -> list[Result]:
    """By these workers, in all its ways."""
    rounds = max(1, effort.repeats)
    steps = max(effort.ops_min, case.steps_of_full if effort is FULL else case.steps_of_full // 4)
    steps = effort.ops_max if effort is TINY else steps
    for index, worker in enumerate(workers):
        _tell(worker, ["build", case.model, index, case.ways])
    for worker in workers:
        _hear(worker)
    if effort is not TINY and not case.model.startswith("first"):
        # executors are made in the first step, tables warmed in the next ones
        for name in case.ways:
            for worker in workers:
                _tell(worker, ["steps", name, 10])
            for worker in workers:
                _hear(worker)
    medians: dict[str, list[float]] = {name: [] for name in case.ways}
    rates: dict[str, list[float]] = {name: [] for name in case.ways}
    figures: dict[str, dict[str, float]] = {}
    for number in range(rounds):
        for name in case.ways:
            if progress is not None:
                progress(f"{case}: {name}, {number + 1} of {rounds}")
            for worker in workers:
                _tell(worker, ["steps", name, max(1, steps // rounds)])
            answers = [_hear(worker) for worker in workers]
            medians[name].append(statistics.median(answer["p50_ns"] for answer in answers))
            rates[name].append(sum(answer["ops_per_s"] for answer in answers))
            figures[name] = answers[0]["figures"]
    return [
        Result(
            bench=NAME,
            case=str(case),
            candidate=name,
            role="peer" if name == STOCK else "ours",
            state="ok",
            repeats=rounds,
            ops=steps // rounds,
            p50_ns=statistics.median(medians[name]),
            ops_per_s=statistics.median(rates[name]),
            figures=figures[name],
            each={"p50_ns": medians[name], "ops_per_s": rates[name]},
            work={"steps": steps // rounds * rounds},
        )
        for name in case.ways
    ]


# -- processes -------------------------------------------------------------------------------------


@contextlib.contextmanager
def _job(case: Train) -> Iterator[list[subprocess.Popen[bytes]]]:
    source = random.Random()
    ports, clusters = _free_ports(source), {}
    for protocol in PROTOCOLS:
        host = f"127.{source.randint(1, 254)}.{source.randint(0, 255)}.{source.randint(1, 254)}"
        clusters[protocol] = {
            "ps": [f"{host}:{next(ports)}" for _ in range(case.ps)],
            "worker": [f"{host}:{next(ports)}" for _ in range(case.workers)],
        }
    tasks = [("ps", index) for index in range(case.ps)] + [
        ("worker", index) for index in range(case.workers)
    ]
    variables = {
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "",
        "NETWORK_PS_CORE_NUMBER": str(case.shards),
    }
    with contextlib.ExitStack() as ending:
        processes = []
        for job, index in tasks:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    f"{__package__}.bench_tensorflow",
                    "task",
                    json.dumps(clusters),
                    job,
                    str(index),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, **variables},
            )
            ending.callback(_end, process)
            processes.append(process)
        for process in processes:
            _hear(process)
        yield processes[case.ps :]


def _free_ports(source: random.Random) -> Iterator[int]:
    """No two the same."""
    for port in source.sample(PORTS, len(PORTS)):
        with socket.socket() as probe:
            try:
                probe.bind(("0.0.0.0", port))  # the stock server listens at all addresses
            except OSError:
                continue
        yield port


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    process.stdout.close()


def _tell(process: subprocess.Popen[bytes], words: list[Any]) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(words).encode() + b"\n")
    process.stdin.flush()


def _hear(process: subprocess.Popen[bytes]) -> Any:
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], ANSWER_S_MAX)
    line = process.stdout.readline() if ready else b""
    if not line:
        raise RuntimeError(f"a task did not answer within {ANSWER_S_MAX:.0f} s, or has ended")
    return json.loads(line)


# -- in a task -------------------------------------------------------------------------------------


def _task(clusters: str, job: str, index: str) -> None:
    import prpc_engine.tensorflow as prpc_tf

    prpc_tf.install()
    import tensorflow as tf

    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    v1 = tf.compat.v1
    v1.disable_eager_execution()
    v1.logging.set_verbosity("ERROR")
    servers = {
        protocol: v1.train.Server(
            tf.train.ClusterSpec(cluster), job_name=job, task_index=int(index), protocol=protocol
        )
        for protocol, cluster in json.loads(clusters).items()
    }
    print(json.dumps("ready"), file=out, flush=True)
    workers: dict[str, _Worker] = {}
    for line in sys.stdin:
        words = json.loads(line)
        answer: Any = None
        if words[0] == "build":
            for name in words[3]:
                protocol = WAYS[name].protocol
                workers[name] = _Worker(
                    tf,
                    servers[protocol].target,
                    json.loads(clusters)[protocol],
                    words[1],
                    words[2],
                    WAYS[name],
                )
        else:
            answer = workers[words[1]].steps(words[2])
        print(json.dumps(answer), file=out, flush=True)
    os._exit(0)  # a stock server cannot be stopped


class _Worker:
    """One model in one way."""

    def __init__(
        self, tf: Any, target: str, cluster: dict[str, list[str]], model: str, index: int, way: Way
    ) -> None:
        self._tf, self._target, self._cluster, self._model, self._index, self._way = (
            tf,
            target,
            cluster,
            model,
            index,
            way,
        )
        self._session: Any = None
        self._ops = 0  # of the graph
        if not model.startswith("first"):
            self._open()

    def _open(self) -> None:
        tf, v1 = self._tf, self._tf.compat.v1
        graph = tf.Graph()
        setter = v1.train.replica_device_setter(
            cluster=self._cluster, worker_device=f"/job:worker/task:{self._index}"
        )
        with graph.as_default(), v1.device(setter):
            v1.set_random_seed(1)
            step = v1.train.get_or_create_global_step()
            self._loss, self._feeds = MODELS[self._model](tf)
            self._op = OPTIMIZERS.get(self._model, _descend)(tf, self._loss, step)
            initialize = v1.global_variables_initializer()
            missing = v1.report_uninitialized_variables(v1.global_variables())
        self._ops = len(graph.get_operations())
        os.environ["PRPC_TF_PLANE"] = self._way.plane
        self._session = v1.Session(
            self._target, graph=graph, config=v1.ConfigProto(tensor_fuse=self._way.fuse)
        )
        if self._index == 0:
            self._session.run(initialize)
        while len(self._session.run(missing)):
            time.sleep(0.1)

    def steps(self, count: int) -> dict[str, Any]:
        """Run so many; what they took."""
        took_ns, sent = [], self._messages()
        started = time.perf_counter_ns()
        for number in range(count):
            if self._model.startswith("first"):
                self._open()  # nothing of it is timed but the first step below
            before = time.perf_counter_ns()
            _, loss = self._session.run(
                [self._op, self._loss], self._feeds[number % len(self._feeds)]
            )
            took_ns.append(time.perf_counter_ns() - before)
        rate = count * 1e9 / (time.perf_counter_ns() - started)
        figures = {"loss": float(loss), "ops_of_graph": self._ops}
        if self._way.plane == "sendrecv":
            figures["messages"] = (self._messages() - sent) / count
        return {"p50_ns": float(np.median(took_ns)), "ops_per_s": rate, "figures": figures}

    def _messages(self) -> Any:
        """Requests for values that its steps took so far, where the plane has any."""
        is_counted = self._session is not None and self._way.plane == "sendrecv"
        return self._session._prpc.statistics().messages if is_counted else 0


def _softmax(tf: Any) -> Any:
    v1, rng = tf.compat.v1, np.random.RandomState(0)
    x, y = v1.placeholder(tf.float32, [None, 784]), v1.placeholder(tf.int64, [None])
    logits = tf.matmul(x, v1.get_variable("w", [784, 10])) + v1.get_variable("b", [10])
    feeds = [
        {x: rng.rand(64, 784).astype(np.float32), y: rng.randint(0, 10, 64)} for _ in range(20)
    ]
    return v1.losses.sparse_softmax_cross_entropy(y, logits), feeds


def _embedding(tf: Any) -> Any:
    v1, rng = tf.compat.v1, np.random.RandomState(0)
    ids, y = v1.placeholder(tf.int64, [None, 4]), v1.placeholder(tf.int64, [None])
    hidden = tf.reshape(
        tf.nn.embedding_lookup(v1.get_variable("table", [20000, 16]), ids), [-1, 64]
    )
    for number in range(4):
        hidden = tf.nn.relu(
            tf.matmul(hidden, v1.get_variable(f"w{number}", [64, 64]))
            + v1.get_variable(f"b{number}", [64])
        )
    feeds = [{ids: rng.randint(0, 20000, (64, 4)), y: rng.randint(0, 10, 64)} for _ in range(20)]
    return v1.losses.sparse_softmax_cross_entropy(y, hidden[:, :10]), feeds


def _many(tf: Any) -> Any:
    v1, rng = tf.compat.v1, np.random.RandomState(0)
    x = v1.placeholder(tf.float32, [None, 16])
    parts = [
        tf.reduce_mean(tf.square(x * v1.get_variable(f"v{number}", [16]) - 1.0))
        for number in range(32)
    ]
    return tf.add_n(parts), [{x: rng.rand(32, 16).astype(np.float32)} for _ in range(20)]


def _dense(tf: Any) -> Any:
    v1 = tf.compat.v1
    x = v1.placeholder(tf.float32, [])
    large = v1.get_variable("large", [1 << 24], initializer=v1.ones_initializer())
    return tf.reduce_mean(tf.square(large * x)), [{x: np.float32(0.5)}]


def _deep(tf: Any) -> Any:
    v1 = tf.compat.v1
    hidden = x = v1.placeholder(tf.float32, [None, 8])
    for number in range(LAYERS_OF_500_OPS):
        hidden = tf.nn.relu(
            tf.matmul(
                hidden, v1.get_variable(f"w{number}", [8, 8], initializer=v1.ones_initializer())
            )
        )
    return tf.reduce_mean(tf.square(hidden)), [{x: np.ones((4, 8), np.float32)}]


class _Advertisements(NamedTuple):
    """The shape of Criteo's: 26 hashed columns and 13 numbers, and whether it was clicked. The data
    are drawn: values of a column as the powers of their ranks, as there.
    """

    kinds: list[Any]
    numbers: list[Any]
    features: dict[str, Any]
    clicked: Any

    @classmethod
    def of(cls, tf: Any) -> _Advertisements:
        v1, columns = tf.compat.v1, tf.feature_column
        kinds = [
            columns.categorical_column_with_hash_bucket(f"C{number}", HASH_BUCKETS)
            for number in range(26)
        ]
        numbers = [columns.numeric_column(f"I{number}") for number in range(13)]
        features = {one.key: v1.placeholder(tf.string, [None, 1]) for one in kinds}
        features.update({one.key: v1.placeholder(tf.float32, [None, 1]) for one in numbers})
        return cls(kinds, numbers, features, v1.placeholder(tf.float32, [None, 1]))

    def feeds(self) -> list[dict[Any, Any]]:
        """Batches of 256."""
        rng, feeds = np.random.RandomState(0), []
        for _ in range(20):
            feed: dict[Any, Any] = {self.clicked: rng.randint(0, 2, (256, 1)).astype(np.float32)}
            for one in self.kinds:
                drawn = rng.zipf(1.2, (256, 1)) % 200_000
                feed[self.features[one.key]] = drawn.astype("S8").astype(object)
            for column in self.numbers:
                feed[self.features[column.key]] = rng.rand(256, 1).astype(np.float32)
            feeds.append(feed)
        return feeds


def _layers(tf: Any, hidden: Any, widths: Sequence[int], name: str = "") -> Any:
    """Dense ones; all but the last with relu."""
    v1 = tf.compat.v1
    for index, width in enumerate(widths):
        made = v1.get_variable(f"{name}w{index}", [hidden.shape[-1], width])
        product = tf.matmul if hidden.shape.rank == 2 else partial(tf.tensordot, axes=1)
        hidden = product(hidden, made) + v1.get_variable(f"{name}b{index}", [width])
        hidden = tf.nn.relu(hidden) if index < len(widths) - 1 else hidden
    return hidden


def _partitioner(tf: Any) -> Any:
    return tf.compat.v1.min_max_variable_partitioner(2, min_slice_size=64 << 10)


def _wide_and_deep(tf: Any) -> Any:
    """DeepRec's example on Criteo's advertisements, with embeddings of 16."""
    v1, columns, data = tf.compat.v1, tf.feature_column, _Advertisements.of(tf)
    with v1.variable_scope("deep", partitioner=_partitioner(tf)):
        hidden = v1.feature_column.input_layer(
            data.features, [columns.embedding_column(one, 16) for one in data.kinds] + data.numbers
        )
        hidden = _layers(tf, hidden, (128, 64, 1))
    with v1.variable_scope("wide", partitioner=_partitioner(tf)):
        wide = v1.feature_column.linear_model(data.features, data.kinds)
    return v1.losses.sigmoid_cross_entropy(data.clicked, hidden + wide), data.feeds()


def _deep_fm(tf: Any) -> Any:
    """Guo et al. 2017 on the same data: a linear part, the products of each two embeddings, and
    dense layers above the same embeddings.
    """
    v1, columns, data = tf.compat.v1, tf.feature_column, _Advertisements.of(tf)
    with v1.variable_scope("deep", partitioner=_partitioner(tf)):
        embedded = v1.feature_column.input_layer(
            data.features, [columns.embedding_column(one, 16) for one in data.kinds]
        )
        numbers = v1.feature_column.input_layer(data.features, data.numbers)
        each = tf.reshape(embedded, [-1, len(data.kinds), 16])
        squares = tf.square(tf.reduce_sum(each, 1)) - tf.reduce_sum(tf.square(each), 1)
        products = 0.5 * tf.reduce_sum(squares, 1, keepdims=True)
        hidden = _layers(tf, tf.concat([embedded, numbers], 1), (256, 128, 64, 1))
    with v1.variable_scope("wide", partitioner=_partitioner(tf)):
        wide = v1.feature_column.linear_model(data.features, data.kinds)
    return v1.losses.sigmoid_cross_entropy(data.clicked, wide + products + hidden), data.feeds()


def _din_like(tf: Any) -> Any:
    """Zhou et al. 2018 in its shape: what a user has bought, weighted by how it goes with what is
    offered. 50 goods of 100,000, and the kind of each of 1,000; drawn as above.
    """
    v1, rng = tf.compat.v1, np.random.RandomState(0)
    offered = [v1.placeholder(tf.int64, [None]) for _ in range(2)]
    bought = [v1.placeholder(tf.int64, [None, 50]) for _ in range(2)]
    length, y = v1.placeholder(tf.int64, [None]), v1.placeholder(tf.float32, [None, 1])
    with v1.variable_scope("deep", partitioner=_partitioner(tf)):
        tables = [v1.get_variable("goods", [100_000, 16]), v1.get_variable("kinds", [1_000, 16])]

        def embedded(ids: Sequence[Any]) -> Any:
            found = [tf.nn.embedding_lookup(*one) for one in zip(tables, ids, strict=True)]
            return tf.concat(found, -1)

        query, keys = embedded(offered), embedded(bought)
        repeated = tf.tile(tf.expand_dims(query, 1), [1, 50, 1])
        pairs = tf.concat([repeated, keys, repeated - keys, repeated * keys], -1)
        pairs = tf.reshape(pairs, [-1, 50, 128])
        scores = _layers(tf, pairs, (36, 1), "attention_")
        weights = scores * tf.expand_dims(tf.sequence_mask(length, 50, tf.float32), -1)
        user = tf.reduce_sum(weights * keys, 1)
        joined = tf.reshape(tf.concat([user, query, user * query], -1), [-1, 96])
        hidden = _layers(tf, joined, (80, 40, 1))
    feeds = [
        {
            **{one: rng.zipf(1.2, 128) % most for one, most in zip(offered, SIZES, strict=True)},
            **{
                one: rng.zipf(1.2, (128, 50)) % most
                for one, most in zip(bought, SIZES, strict=True)
            },
            length: rng.randint(1, 51, 128),
            y: rng.randint(0, 2, (128, 1)).astype(np.float32),
        }
        for _ in range(20)
    ]
    return v1.losses.sigmoid_cross_entropy(y, hidden), feeds


def _sparse(tf: Any) -> Any:
    v1, rng = tf.compat.v1, np.random.RandomState(0)
    ids, y = v1.placeholder(tf.int64, [None]), v1.placeholder(tf.float32, [None, 16])
    rows = tf.nn.embedding_lookup(v1.get_variable("table", [1_000_000, 16]), ids)
    feeds = [
        {ids: rng.randint(0, 1_000_000, 1024), y: rng.rand(1024, 16).astype(np.float32)}
        for _ in range(20)
    ]
    return tf.reduce_mean(tf.square(rows - y)), feeds


def _descend(tf: Any, loss: Any, step: Any) -> Any:
    return tf.compat.v1.train.GradientDescentOptimizer(0.01).minimize(loss, step)


def _adagrad(tf: Any, loss: Any, step: Any) -> Any:
    return tf.compat.v1.train.AdagradOptimizer(0.01).minimize(loss, step)


def _adagrad_and_ftrl(tf: Any, loss: Any, step: Any) -> Any:
    v1 = tf.compat.v1

    def of(scope: str) -> Any:
        return v1.get_collection(v1.GraphKeys.TRAINABLE_VARIABLES, scope)

    deep = v1.train.AdagradOptimizer(0.01).minimize(loss, step, of("deep"))
    return tf.group(deep, v1.train.FtrlOptimizer(0.05).minimize(loss, var_list=of("wide")))


OPTIMIZERS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "Wide & Deep": _adagrad_and_ftrl,
    "DeepFM": _adagrad_and_ftrl,
    "DIN-like": _adagrad,
    "1 M x 16 sparse, Adagrad": _adagrad,
    "first step of Wide & Deep": _adagrad_and_ftrl,
}
MODELS: dict[str, Callable[[Any], Any]] = {
    "softmax": _softmax,
    "embedding + 8 variables": _embedding,
    "32 variables": _many,
    "64 MB dense": _dense,
    "first step of 500 ops": _deep,
    "Wide & Deep": _wide_and_deep,
    "DeepFM": _deep_fm,
    "DIN-like": _din_like,
    "1 M x 16 sparse, Adagrad": _sparse,
    "first step of Wide & Deep": _wide_and_deep,
}


@pytest.fixture(scope="module")
def workers() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Of a job with one ps and one worker, for all tests: importing TensorFlow takes longer."""
    if importlib.util.find_spec("tensorflow") is None:
        pytest.skip("TensorFlow is not installed: prpc-engine[tensorflow]")
    with _job(CASES[0]) as found:
        yield found


@pytest.mark.parametrize("case", [CASES[0], *CASES[14:16], CASES[17]], ids=str)
def test_both_protocols_train_a_model_to_the_same_loss(
    case: Train, workers: list[subprocess.Popen[bytes]]
) -> None:
    results = _measured(case, workers, TINY)
    assert {result.candidate for result in results} == {STOCK, OURS}
    stock, ours = (result.figures["loss"] for result in results)
    assert np.isclose(stock, ours)


def test_fused_values_take_fewer_messages(workers: list[subprocess.Popen[bytes]]) -> None:
    results = _measured(replace(CASES[7], ways=(EACH, FUSED)), workers, TINY)
    messages = {result.candidate: result.figures.get("messages", 0) for result in results}
    assert 0 < messages[FUSED] * 3 <= messages[EACH]


def test_the_graph_of_500_ops_has_500(workers: list[subprocess.Popen[bytes]]) -> None:
    for result in _measured(CASES[6], workers, TINY):
        assert abs(result.figures["ops_of_graph"] - 500) <= 50


def test_every_target_has_something_to_judge() -> None:
    assert {target.case for target in TARGETS} == {str(case) for case in CASES}


if __name__ == "__main__":
    if sys.argv[1:2] == ["task"]:
        _task(*sys.argv[2:])
    else:
        from . import cli_bench

        raise SystemExit(cli_bench.command_line(NAME))

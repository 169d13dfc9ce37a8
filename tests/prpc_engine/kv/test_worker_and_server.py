import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from prpc_engine.errors import BadArguments, ConfigError, NoServer, RemoteError
from prpc_engine.kv import (
    Adagrad,
    Cast,
    Compressor,
    Cosine,
    Int8,
    Momentum,
    Sgd,
    SparseTable,
    TableServer,
    TableShard,
    TableWorker,
    TopK,
    Uniform,
)
from prpc_engine.kv.client.local import LocalService

SGD = {"name": "sgd", "learning_rate": 1.0}


def make(servers: int = 3) -> tuple[LocalService, TableWorker]:
    service = LocalService()
    for _ in range(servers):
        TableServer(service)
    return service, TableWorker(service, expected_servers=servers)


def floats(*values: object) -> np.ndarray:
    return np.array(values, np.float32)


# Sparse verbs


@pytest.mark.parametrize("servers", [1, 2, 5])
def test_many_servers_behave_as_one_table(servers: int) -> None:
    _, worker = make(servers)
    worker.create_sparse("clicks", 3, Adagrad(0.1), Uniform(0.1))
    alone = SparseTable(3, Adagrad(0.1), Uniform(0.1))
    random = np.random.default_rng(0)
    for size in (500, 1, 0, 300):
        keys = random.integers(-100, 100, size)
        grads = random.normal(size=(size, 3)).astype(np.float32)
        np.testing.assert_allclose(worker.pull("clicks", keys), alone.pull(keys), rtol=1e-6)
        worker.push("clicks", keys, grads)
        alone.push(keys, grads)
        np.testing.assert_allclose(
            worker.push_pull("clicks", keys, grads),
            alone.push_pull(keys, grads),
            rtol=1e-5,
            atol=1e-7,
        )


def test_a_key_that_is_asked_for_twice_travels_once() -> None:
    service, worker = make()
    worker.create_sparse("clicks", 1, SGD)
    service.calls.clear()
    keys = np.array([5, 9, 5, 5, 1])
    worker.push("clicks", keys, floats([1], [2], [3], [4], [5]))
    assert worker.pull("clicks", keys)[:, 0].tolist() == [-8, -2, -8, -8, -5]
    for verb, place in (("apply", 4), ("pull", 1)):
        sent = np.concatenate(
            [args[place] for _, method, args, _ in service.calls if method == verb]
        )
        assert sorted(sent) == [1, 5, 9]


def test_servers_that_own_none_of_the_keys_hear_nothing() -> None:
    service, worker = make(5)
    worker.create_sparse("clicks", 1, SGD)
    service.calls.clear()
    worker.pull("clicks", np.array([42]))
    assert len(service.calls) == 1
    assert worker.pull("clicks", np.array([], np.int64)).shape == (0, 1)
    assert len(service.calls) == 1


def test_pushes_can_be_in_flight_while_other_work_is_done() -> None:
    _, worker = make()
    worker.create_sparse("clicks", 1, SGD)
    pushes = [
        worker.submit_push("clicks", np.array([1, 2, 3]), np.ones((3, 1), np.float32))
        for _ in range(4)
    ]
    for push in pushes:
        push.result(5.0)
        assert push.done()
    assert worker.submit_pull("clicks", np.array([3])).result(5.0).tolist() == [[-4]]


def test_a_verb_can_be_awaited() -> None:
    _, worker = make()
    worker.create_sparse("clicks", 1, SGD)

    async def train() -> np.ndarray:
        await worker.submit_push("clicks", np.array([1, 2]), floats([1], [2]))
        return await worker.submit_pull("clicks", np.array([2, 1]))

    assert asyncio.run(train()).tolist() == [[-2], [-1]]


def test_a_verbs_timeout_is_the_deadline_of_each_of_its_calls() -> None:
    service, worker = make()
    worker.create_sparse("clicks", 1, SGD, timeout_s=3.0)
    worker.pull("clicks", np.arange(20), timeout_s=2.0)
    worker.pull("clicks", np.arange(20))
    assert [timeout_s for *_, timeout_s in service.calls] == 3 * [3.0] + 3 * [2.0] + 3 * [
        worker.call_timeout_s
    ]


def test_what_a_table_is_told_reaches_its_servers() -> None:
    service, worker = make(2)
    bounds = {"admission": {"min_count": 2}, "eviction": {"rows_max": 8, "ttl_s": 3600}}
    worker.create_sparse("clicks", 1, Momentum(Cosine(1.0, steps=10)), dtype="bfloat16", **bounds)  # type: ignore[arg-type]
    TableWorker(service, expected_servers=2).create_sparse(
        "clicks", 1, Momentum(Cosine(1.0, steps=10)), dtype="bfloat16", **bounds
    )  # type: ignore[arg-type]
    keys = np.arange(40)
    for _ in range(2):
        worker.push("clicks", keys, np.ones((40, 1), np.float32))
    statistics = worker.statistics().values()
    assert [each["clicks"].rows for each in statistics] == [8, 8]
    assert sum(each["clicks"].keys_refused for each in statistics) == 40 + 40 - 16
    with pytest.raises(ConfigError, match="is there with another spec"):
        worker.create_sparse("clicks", 1, Momentum(Cosine(1.0, steps=10)))


@pytest.mark.parametrize("made", [Cast(), Int8(block=4)], ids=str)
def test_gradients_of_sparse_tables_may_travel_compressed(made: Compressor) -> None:
    service, worker = make(3)
    worker.create_sparse("clicks", 4, SGD, compression=made.to_spec())
    grads = np.random.default_rng(3).normal(size=(90, 4)).astype(np.float32)
    worker.push("clicks", np.arange(90), grads)
    np.testing.assert_allclose(worker.pull("clicks", np.arange(90)), -grads, atol=0.02)
    sent = [
        sum(array.nbytes for array in args[5:])
        for _, method, args, _ in service.calls
        if method == "apply"
    ]
    assert sum(sent) <= grads.nbytes / 2
    assert worker.push_pull("clicks", np.array([7, 7]), grads[:2]).shape == (2, 4)


@pytest.mark.parametrize("nonfinite", ["skip", "apply"])
def test_what_is_compressed_is_finite_and_no_table_is_made_that_says_else(nonfinite: str) -> None:
    _, worker = make(1)
    with pytest.raises(ConfigError, match=f"'rows': nonfinite='{nonfinite}' with compression 'c"):
        worker.create_sparse("rows", 1, SGD, compression=Cast(), nonfinite=nonfinite)
    with pytest.raises(ConfigError, match="'refuse' is allowed, or no compression"):
        worker.create_dense("whole", (2,), SGD, compression=TopK(0.5), nonfinite=nonfinite)
    worker.create_sparse("rows", 1, SGD, nonfinite=nonfinite)


@pytest.mark.parametrize("made", [Cast(), Int8(), TopK(0.25)], ids=str)
def test_what_compression_loses_of_a_dense_gradient_comes_with_the_next_ones(
    made: Compressor,
) -> None:
    service, worker = make(2)
    worker.create_dense("w", (64, 4), SGD, compression=made, split_bytes_min=0)
    grads = np.random.default_rng(3).normal(size=(64, 4)).astype(np.float32)
    worker.push("w", grads)
    for _ in range(8):
        worker.push("w", np.zeros((64, 4), np.float32))
    np.testing.assert_allclose(worker.pull("w"), -grads, atol=1e-4)
    sent = [
        sum(array.nbytes for array in args[4:])
        for _, method, args, _ in service.calls
        if method == "apply"
    ]
    assert sum(sent[:2]) <= grads.nbytes / 2


# Dense verbs


@pytest.mark.parametrize("shape", [(7,), (2, 3), (1,), (5, 2, 2), ()])
@pytest.mark.parametrize("split_bytes_min", [0, 65536])
def test_a_dense_tensor_is_whole_to_the_worker(
    shape: tuple[int, ...], split_bytes_min: int
) -> None:
    _, worker = make(3)
    worker.create_dense("w", shape, SGD, Uniform(0.1), split_bytes_min=split_bytes_min)
    before = worker.pull("w")
    assert before.shape == shape
    assert before.dtype == np.float32
    grads = np.arange(before.size, dtype=np.float32).reshape(shape)
    worker.push("w", grads)
    np.testing.assert_allclose(worker.pull("w"), before - grads, rtol=1e-5)
    np.testing.assert_allclose(worker.push_pull("w", grads), before - 2 * grads, rtol=1e-5)


def test_a_large_dense_tensor_is_spread_over_all_servers_and_a_small_one_is_not() -> None:
    _, worker = make(3)
    worker.create_dense("large", (30_000,), SGD)
    worker.create_dense("small", (30,), SGD)
    statistics = list(worker.statistics().values())
    assert [each["large"].rows for each in statistics] == [10_000] * 3
    assert [each["small"].rows for each in statistics if "small" in each] == [30]


# Tables


def test_creating_a_table_again_finds_it_with_its_values() -> None:
    service, worker = make()
    worker.create_sparse("clicks", 1, SGD)
    worker.push("clicks", np.array([1]), floats([1]))
    other = TableWorker(service, expected_servers=3)
    other.create_sparse("clicks", 1, Sgd(1.0))
    assert other.pull("clicks", np.array([1])).tolist() == [[-1]]


def test_another_spec_under_the_same_name_is_refused_and_both_are_shown() -> None:
    service, worker = make()
    worker.create_sparse("clicks", 8, SGD)
    other = TableWorker(service, expected_servers=3)
    attempts: list[Callable[[], None]] = [
        lambda: other.create_sparse("clicks", 9, SGD),
        lambda: other.create_sparse("clicks", 8, Sgd(0.5)),
        lambda: other.create_sparse("clicks", 8, SGD, Uniform(0.1)),
        lambda: other.create_dense("clicks", (8,), SGD, split_bytes_min=0),
    ]
    for attempt in attempts:
        with pytest.raises(
            ConfigError,
            match=r"'clicks' is there with another spec: asked for .* there is .*'dim': 8",
        ):
            attempt()
    with pytest.raises(BadArguments, match="not known to this worker"):
        other.pull("clicks", np.array([1]))


def test_a_worker_that_counts_the_servers_differently_is_found_out() -> None:
    service, worker = make(2)
    worker.create_sparse("clicks", 1, SGD)
    TableServer(service)
    late = TableWorker(service, expected_servers=3)
    with pytest.raises(ConfigError, match=r"'partitions': 3.*'partitions': 2"):
        late.create_sparse("clicks", 1, SGD)


def test_more_servers_than_expected_are_refused_since_workers_would_disagree() -> None:
    service, _ = make(3)
    with pytest.raises(ConfigError, match=r"3 servers .* expected_servers is 2"):
        TableWorker(service, expected_servers=2)
    with pytest.raises(NoServer):
        TableWorker(service, expected_servers=4)


@pytest.mark.parametrize(
    ("attempt", "said"),
    [
        (lambda w: w.create_sparse("", 1, SGD), "table name ''"),
        (lambda w: w.create_sparse("x" * 256, 1, SGD), "1 to 255 bytes"),
        (lambda w: w.create_sparse("\ud800", 1, SGD), "bytes of Unicode text are allowed"),
        (lambda w: w.create_dense("\ud800", (1,), SGD), "bytes of Unicode text are allowed"),
        (lambda w: w.create_sparse("t", 0, SGD), "dim is 0; a whole number from 1 to 65536"),
        (
            lambda w: w.create_sparse("t", 1, {"name": "lamb"}),
            "table 't': optimizer {'name': 'lamb'}",
        ),
        (
            lambda w: w.create_sparse("t", 1, SGD, dtype="float64"),
            "dtype is 'float64'; allowed: float32, float16, bfloat16",
        ),
        (
            lambda w: w.create_sparse("t", 1, SGD, eviction={"rows": 3}),
            "table 't': eviction has no setting 'rows'",
        ),
        (
            lambda w: w.create_sparse("t", 1, SGD, compression=TopK()),
            "sparse ones may have: cast, int8",
        ),
        (lambda w: w.create_sparse("t", 2, SGD, Uniform([1.0])), "1 scales for rows of 2 columns"),
        (lambda w: w.create_dense("t", (3, 0), SGD), "an extent of its shape is 0"),
        (lambda w: w.create_dense("t", 3, SGD), "shape is 3"),
        (lambda w: w.create_dense("t", (1 << 30, 1 << 30), SGD), "elements"),
        (lambda w: w.create_dense("t", (3,), SGD, {"name": "normal"}), "'normal' is not known"),
    ],
)
def test_a_bad_table_is_refused_before_anything_is_sent(attempt: object, said: str) -> None:
    service, worker = make()
    with pytest.raises(ConfigError) as caught:
        attempt(worker)  # type: ignore[operator]
    assert said in str(caught.value)
    assert service.calls == []


KEY, GRAD = np.array([1]), floats([1, 2])


@pytest.mark.parametrize(
    ("verb", "args", "said"),
    [
        (
            "pull",
            ("nothing", KEY),
            "table 'nothing' of 'kv' is not known to this worker; it has created: clicks, w",
        ),
        ("push", ("nothing", KEY, GRAD), "table 'nothing'"),
        (
            "pull",
            ("clicks",),
            "pull of sparse table 'clicks' with 0 arrays; pull('clicks', keys) is allowed",
        ),
        ("push", ("clicks", KEY), "push('clicks', keys, grads) is allowed"),
        ("pull", ("clicks", [1]), "keys are a list; a numpy array int64[n] is allowed"),
        ("pull", ("clicks", KEY.astype(np.int32)), "pull from table 'clicks': keys are int32[1]"),
        ("push", ("clicks", np.array([[1]]), GRAD), "keys are int64[1, 1]"),
        (
            "push",
            ("clicks", KEY, GRAD.astype(np.float64)),
            "grads are float64[1, 2]; a numpy array float32[1, 2]",
        ),
        (
            "push_pull",
            ("clicks", KEY, floats([1])),
            "push_pull to sparse table 'clicks': grads are float32[1, 1]",
        ),
        ("pull", ("w", KEY), "pull of dense table 'w' with 1 arrays; pull('w') is allowed"),
        ("push", ("w", KEY, GRAD), "push('w', grads) is allowed"),
        (
            "push",
            ("w", floats(1, 2)),
            "push to dense table 'w': grads are float32[2]; a numpy array float32[3]",
        ),
    ],
)
def test_bad_arguments_are_named_before_anything_is_sent(
    verb: str, args: tuple[object, ...], said: str
) -> None:
    service, worker = make()
    worker.create_sparse("clicks", 2, SGD)
    worker.create_dense("w", (3,), SGD)
    service.calls.clear()
    with pytest.raises(BadArguments) as caught:
        getattr(worker, verb)(*args)
    assert said in str(caught.value)
    assert service.calls == []


# Servers


def test_each_shard_of_a_sharded_service_is_a_server_with_tables_of_its_own() -> None:
    service = LocalService(shards=2)
    TableServer(service)
    TableServer(service)
    assert len(service.servers["kv"]) == 4
    worker = TableWorker(service, expected_servers=4)
    worker.create_sparse("clicks", 1, SGD)
    worker.push("clicks", np.arange(1000), np.ones((1000, 1), np.float32))
    rows = [each["clicks"].rows for each in worker.statistics().values()]
    assert sum(rows) == 1000
    assert min(rows) > 150


def test_services_of_different_names_share_nothing() -> None:
    service = LocalService()
    TableServer(service, name="a")
    TableServer(service, name="b")
    for name, value in (("a", 1.0), ("b", 2.0)):
        worker = TableWorker(service, name)
        worker.create_sparse("t", 1, SGD, {"name": "constant", "value": value})
        assert worker.pull("t", np.array([1])).tolist() == [[value]]


def test_a_server_tells_a_stranger_which_tables_there_are() -> None:
    shard = TableShard()
    with pytest.raises(BadArguments, match="no sparse table 'x' here; there are: none"):
        shard.pull("x", np.array([1]))
    with pytest.raises(BadArguments, match="no dense table 'x' here"):
        shard.pull_dense("x")


@pytest.mark.parametrize(
    "spec", [{}, {"name": "sparse"}, {"name": "sparse", "table": 3}, "sparse", None]
)
def test_a_server_refuses_a_spec_that_is_none(spec: object) -> None:
    with pytest.raises(ConfigError):
        TableShard().create_table(spec)  # type: ignore[arg-type]


def test_what_a_server_raises_reaches_the_caller() -> None:
    service, worker = make(1)
    worker.create_sparse("clicks", 1, SGD)
    service.servers["kv"][0] = TableShard()  # restarted, empty
    with pytest.raises(RemoteError, match="no sparse table 'clicks'"):
        service.create_client("kv").submit_to(11, "pull", "clicks", np.array([1])).result()

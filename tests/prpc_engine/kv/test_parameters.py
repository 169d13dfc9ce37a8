"""Parameters by name in one dense table: what a step does, what it costs, and who may take part."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from prpc_engine import Master, RpcService
from prpc_engine.errors import BadArguments, ConfigError
from prpc_engine.kv import DenseTable, Ftrl, TableServer, TableShard, TableWorker
from prpc_engine.kv.client.local import LocalService
from prpc_engine.kv.client.parameters import Parameters
from prpc_engine.kv.table.initializer import Constant
from tests.prpc_engine.kv.elastic_processes import elastic_world
from tests.prpc_engine.kv.test_session import serve
from tests.prpc_engine.processes import PATIENCE_S
from tests.prpc_engine.workloads.farm import Farm, end, kill

SGD = {"name": "sgd", "learning_rate": 0.5}
START = {"w": np.arange(6.0).reshape(2, 3), "b": np.ones(2, np.float32), "scale": np.float32(2)}


def make(servers: int = 2) -> tuple[LocalService, TableWorker, TableWorker]:
    service = LocalService()
    for _ in range(servers):
        TableServer(service)
    one, other = (TableWorker(service, expected_servers=servers) for _ in range(2))
    return service, one, other


def test_a_step_is_one_message_to_each_server_and_all_workers_see_it() -> None:
    service, one, other = make(3)
    mine = Parameters(one, "model", START, SGD, split_bytes_min=0)
    theirs = Parameters(other, "model", START, SGD, split_bytes_min=0)
    service.calls.clear()
    for name, grads in mine.grads.items():
        grads[...] = START[name]
    mine.step()
    assert len(service.calls) == 3
    theirs.pull()
    for name, start in START.items():
        np.testing.assert_allclose(mine.values[name], start / 2)
        np.testing.assert_array_equal(mine.values[name], theirs.values[name])
    assert not theirs.values["w"].flags.owndata


@pytest.mark.parametrize(
    "start",
    [START | {"b": np.ones((2, 1))}, {"c": START["w"]}],
    ids=["shape", "name"],
)
def test_a_worker_with_another_model_is_refused(start: dict[str, np.ndarray]) -> None:
    _, one, other = make()
    Parameters(one, "model", START, SGD)
    with pytest.raises(ConfigError, match="other workers may have other names, shapes or settings"):
        Parameters(other, "model", start, SGD)


def test_what_is_no_array_of_floats_is_refused_by_name() -> None:
    _, one, _ = make()
    with pytest.raises(BadArguments, match=r"parameter 'step' is int64\[\]"):
        Parameters(one, "model", START | {"step": np.int64(3)}, SGD)
    with pytest.raises(BadArguments, match="there are none"):
        Parameters(one, "model", {}, SGD)


def of(start: float) -> dict[str, np.ndarray]:
    return {name: np.full(np.shape(value), start, np.float32) for name, value in START.items()}


def flat(parameters: Parameters) -> list[float]:
    return [float(each) for view in parameters.values.values() for each in view.reshape(-1)]


def test_values_are_those_of_whoever_comes_first_and_others_take_them() -> None:
    _, one, other = make()
    first = Parameters(one, "model", of(1), SGD, split_bytes_min=0)
    first.grads["b"][:] = 1
    first.step()
    second = Parameters(other, "model", of(2), SGD, split_bytes_min=0)
    assert flat(second) == flat(first) == [1] * 6 + [0.5] * 2 + [1]
    # the table has them, and no difference to something
    np.testing.assert_array_equal(one.pull("model"), flat(first))


def test_workers_that_begin_at_once_have_the_values_of_one_of_them(master: Master) -> None:
    services = [RpcService(master.address) for _ in range(5)]
    for service in services[:2]:
        TableServer(service)
    made: list[Parameters] = []

    def begin(number: int) -> None:
        worker = TableWorker(
            services[number], expected_servers=2, timeout_s=PATIENCE_S, call_timeout_s=PATIENCE_S
        )
        made.append(Parameters(worker, "model", of(number), SGD, split_bytes_min=0))

    threads = [threading.Thread(target=begin, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    for service in services:
        service.close()
    assert len(made) == 5
    assert len({tuple(flat(each)) for each in made}) == 1
    assert len(set(flat(made[0]))) == 1


def test_a_worker_that_died_while_it_assigned_leaves_nothing_of_its_own() -> None:
    service, one, other = make()
    names = {name: np.shape(value) for name, value in START.items()}
    one.create_dense("model", (9,), SGD, names=names, split_bytes_min=0)
    shard = service.servers["kv"][0]
    assert isinstance(shard, TableShard)
    with pytest.raises(BadArguments, match=r"it has no values yet: assign\(\) them first"):
        shard.push_dense("model", np.ones(shard.pull_dense("model").shape, np.float32))
    shard.assign_dense("model", np.full(shard.pull_dense("model").shape, 7, np.float32))
    assert flat(Parameters(other, "model", of(2), SGD, split_bytes_min=0)) == [2] * 9


def test_a_checkpoint_has_the_values_by_name_and_is_a_model_elsewhere(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    _, one, _ = make()
    first = Parameters(
        one, "model", START, {"name": "adam", "learning_rate": 0.5}, split_bytes_min=0
    )
    first.grads["w"][:] = 1
    first.step()
    one.save(str(tmp_path), step=1)
    stored = {
        name: array
        for path in tmp_path.rglob("*-table-*.safetensors")
        for name, array in safetensors.load_file(path).items()
    }
    assert {name for name in stored if not name.startswith("optimizer/")} == set(START)
    for name, values in first.values.items():
        np.testing.assert_array_equal(stored[name], values)
    _, elsewhere, late = make(3)
    assert elsewhere.restore(str(tmp_path)) == 1
    for worker in (elsewhere, late):
        again = Parameters(
            worker, "model", of(9), {"name": "adam", "learning_rate": 0.5}, split_bytes_min=0
        )
        assert flat(again) == flat(first)
    after = []
    for each in (first, again):
        each.grads["b"][:] = 3
        each.grads["w"][:] = 1
        each.step()
        after.append(flat(each))
    np.testing.assert_allclose(after[0], after[1], rtol=1e-6)  # with the state of the optimizer


def test_assigned_values_are_every_workers_and_the_next_step_goes_on_from_them() -> None:
    _, one, other = make()
    mine, theirs = (
        Parameters(each, "model", START, SGD, split_bytes_min=0) for each in (one, other)
    )
    theirs.grads["b"][:] = 2
    theirs.step()
    mine.values["w"][:] = 5
    mine.assign(["w"])
    assert mine.values["b"].tolist() == [0, 0]  # the other worker's step
    mine.step()
    theirs.pull()
    for each in (mine, theirs):
        assert each.values["w"].tolist() == [[5] * 3] * 2
    mine.values["scale"][...] = 4
    mine.assign()
    theirs.step()
    assert theirs.values["scale"] == 4
    with pytest.raises(BadArguments, match=r"float32\[9\] is allowed"):
        one.assign("model", np.ones(3, np.float32))
    one.create_sparse("rows", 1, SGD)
    with pytest.raises(BadArguments, match="dense tables are allowed"):
        one.assign("rows", np.ones(3, np.float32))


@pytest.mark.parametrize("learning_rate", [0.5, {"name": "cosine", "initial": 0.5, "steps": 10}])
def test_l1_pulls_values_to_zero_and_ftrl_keeps_what_is_assigned(learning_rate: object) -> None:
    ftrl = {"name": "ftrl", "learning_rate": learning_rate, "l1": 3.0, "l2": 0.1}
    _, one, _ = make(1)
    parameters = Parameters(one, "model", of(5), ftrl)
    for gradient in (0.1, 0.2):
        for grads in parameters.grads.values():
            grads[...] = gradient
        parameters.step()
    assert flat(parameters) == [0] * 9
    for sign in (1, -1):
        for name, values in parameters.values.items():
            values[...] = sign * (2 + len(name))
            parameters.grads[name][...] = 0
        wanted = flat(parameters)
        parameters.assign()
        parameters.step()
        np.testing.assert_allclose(flat(parameters), wanted, rtol=1e-5)


def test_settled_ftrl_has_the_state_that_makes_its_values() -> None:
    table = DenseTable((3,), Ftrl(0.3, l1=0.5, l2=0.2), Constant(0.0))
    table.push(np.array([1, -20, 3], np.float32))
    table.assign(np.array([4, -5, 0], np.float32))
    table.push(np.zeros(3, np.float32))
    np.testing.assert_allclose(table.pull(), [4, -5, 0], rtol=1e-6)


def test_names_must_fill_a_tensor_of_one_axis() -> None:
    _, one, _ = make()
    for shape, names in (((4,), {"a": (3,)}), ((2, 2), {"a": (4,)})):
        with pytest.raises(ConfigError, match="names say"):
            one.create_dense("t", shape, SGD, names=names)


def test_an_assign_that_a_save_holds_comes_after_its_cut(tmp_path: Path) -> None:
    service, one, _ = make(1)
    Parameters(one, "model", START, SGD)
    shard = service.servers["kv"][0]
    assert isinstance(shard, TableShard)
    shard.checkpoint_enter("0" * 16, str(tmp_path))
    answer = shard.apply(1, 1, "assign_dense", "model", np.zeros(9, np.float32))
    assert not answer.done()
    assert shard.pull_dense("model").max() == 5
    shard.checkpoint_release("0" * 16)
    assert answer.result() == 2
    assert shard.pull_dense("model").max() == 0


@pytest.mark.slow
def test_assigned_values_are_on_the_replica_too(farm: Farm) -> None:
    with elastic_world() as (master, watcher):
        servers = {
            each.life.done: each
            for each in [farm.start_ready(serve, master.address) for _ in range(2)]
        }
        watcher.wait_whole(2)
        with RpcService(master.address, transports=["tcp"]) as service:
            worker = TableWorker(
                service,
                elastic=True,
                ack="replicated",
                timeout_s=PATIENCE_S,
                call_timeout_s=PATIENCE_S,
            )
            parameters = Parameters(worker, "model", of(3), SGD)
            placement = watcher.placement()
            assert placement is not None
            kill(servers.pop(placement.partitions[0].primary))
            parameters.pull()
            assert flat(parameters) == [3] * 9
        for server in servers.values():
            end(server)

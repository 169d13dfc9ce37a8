from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from prpc_engine.demo.baseline import train_baseline, trivial_auc
from prpc_engine.demo.batches import epoch_batches
from prpc_engine.demo.data import FIELDS, NUMERIC, Examples, Flights
from prpc_engine.demo.model import prepare
from prpc_engine.demo.settings import DENSE_TABLE, ROWS_TABLE, DemoSettings
from prpc_engine.demo.training import Progress, create_tables, evaluate, train
from prpc_engine.errors import ConfigError, RemoteError
from prpc_engine.kv import TableServer, TableShard, TableWorker
from prpc_engine.kv.client.local import LocalService

VALUES_PER_FIELD = 12
SETTINGS = DemoSettings(epochs=3, batch_examples=256)


def made_up_flights(count: int = 6000) -> Flights:
    """Flights whose lateness hangs on their first two fields and on the first numeric feature, with
    some chance.
    """
    random = np.random.default_rng(5)
    values = random.integers(0, VALUES_PER_FIELD, (count, len(FIELDS)))
    numeric = random.normal(size=(count, len(NUMERIC))).astype(np.float32)
    effect = random.normal(size=(2, VALUES_PER_FIELD))
    logits = effect[0][values[:, 0]] + effect[1][values[:, 1]] + numeric[:, 0]
    labels = (random.random(count) < 1 / (1 + np.exp(-logits))).astype(np.float32)
    ordinals = (values + VALUES_PER_FIELD * np.arange(len(FIELDS))).astype(np.int32)
    vocabulary = np.arange(VALUES_PER_FIELD * len(FIELDS)) * 1_000_003
    examples = Examples(ordinals, numeric, labels)
    return Flights(
        vocabulary, examples.take(slice(count // 5, None)), examples.take(slice(count // 5)), 0
    )


FLIGHTS = made_up_flights()


def make_workers(
    count: int, servers: int = 2, settings: DemoSettings = SETTINGS
) -> tuple[LocalService, list[TableWorker]]:
    service = LocalService()
    for _ in range(servers):
        TableServer(service)
    workers = [TableWorker(service, expected_servers=servers) for _ in range(count)]
    for worker in workers:
        create_tables(worker, settings)
    return service, workers


def run_in_turns(trainings: list[Iterator[Progress]]) -> list[Progress]:
    """One batch of each, round and round, as processes of equal speed would."""
    records = []
    while trainings:
        for training in list(trainings):
            record = next(training, None)
            if record is None:
                trainings.remove(training)
            else:
                records.append(record)
    return records


def test_the_workers_batches_of_an_epoch_are_the_baselines_batches() -> None:
    alone = [part.labels.tolist() for part in epoch_batches(FLIGHTS.train, SETTINGS, 1)]
    shared = [
        [part.labels.tolist() for part in epoch_batches(FLIGHTS.train, SETTINGS, 1, rank, 3)]
        for rank in range(3)
    ]
    assert [shared[i % 3][i // 3] for i in range(len(alone))] == alone
    assert sum(len(labels) for labels in alone) == len(FLIGHTS.train)


def test_every_epoch_has_an_order_of_its_own() -> None:
    first, second = (next(epoch_batches(FLIGHTS.train, SETTINGS, epoch)) for epoch in range(2))
    assert (first.ordinals != second.ordinals).any()


def test_one_worker_that_waits_for_everything_is_the_baseline_to_the_last_bit() -> None:
    settings = replace(SETTINGS, pull_ahead=False, pushes_in_flight_max=0)
    _, (worker,) = make_workers(1, settings=settings)
    records = list(train(worker, FLIGHTS, settings))
    baseline = train_baseline(FLIGHTS, settings)
    assert [record.loss for record in records] == list(baseline.losses)
    assert evaluate(worker, prepare(FLIGHTS.test, FLIGHTS.vocabulary)).auc == baseline.auc


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_workers_that_do_not_wait_learn_as_much_as_the_baseline(workers: int) -> None:
    _, kv = make_workers(workers)
    records = run_in_turns(
        [train(kv[rank], FLIGHTS, SETTINGS, rank, workers) for rank in range(workers)]
    )
    assert sum(record.examples for record in records) == SETTINGS.epochs * len(FLIGHTS.train)
    reached = evaluate(kv[0], prepare(FLIGHTS.test, FLIGHTS.vocabulary))
    baseline = train_baseline(FLIGHTS, SETTINGS)
    assert reached.auc == pytest.approx(baseline.auc, abs=0.01)
    assert reached.loss == pytest.approx(baseline.test_loss, abs=0.01)


def test_training_beats_guessing_and_its_loss_falls() -> None:
    baseline = train_baseline(FLIGHTS, SETTINGS)
    assert baseline.auc > 0.7 > 0.55 > trivial_auc(FLIGHTS)  # made-up hours mean nothing
    assert np.mean(baseline.losses[-10:]) < baseline.losses[0] - 0.05
    assert baseline.examples == SETTINGS.epochs * len(FLIGHTS.train)
    assert baseline.examples_per_s > 0


def test_all_gradients_have_arrived_when_training_ends() -> None:
    service, (worker,) = make_workers(1)
    steps = len(list(train(worker, FLIGHTS, SETTINGS)))
    tables = list(worker.statistics().values())
    assert [each[ROWS_TABLE].pushes for each in tables] == [steps, steps]
    assert sum(each[DENSE_TABLE].pushes for each in tables if DENSE_TABLE in each) == steps
    assert all(
        method in {"create_table", "pull", "pull_dense", "apply", "statistics"}
        for _, method, _, _ in service.calls
    )


def test_a_record_says_where_the_time_went() -> None:
    _, (worker,) = make_workers(1)
    for record in train(worker, FLIGHTS, SETTINGS):
        assert min(record.prepare_s, record.pull_s, record.compute_s, record.push_s) >= 0
        assert record.compute_s > 0
        assert 0 < record.keys <= len(FLIGHTS.vocabulary)
        assert record.examples <= SETTINGS.batch_examples


def test_more_workers_than_batches_is_no_trouble() -> None:
    few = replace(FLIGHTS, train=FLIGHTS.train.take(slice(10)))
    _, workers = make_workers(2)
    records = [list(train(worker, few, SETTINGS, rank, 2)) for rank, worker in enumerate(workers)]
    assert [len(each) for each in records] == [SETTINGS.epochs, 0]


def test_a_server_that_lost_its_tables_ends_the_training_with_its_error() -> None:
    service, (worker,) = make_workers(1, servers=1)
    training = train(worker, FLIGHTS, SETTINGS)
    next(training)
    lost = service.servers["kv"][0]
    assert isinstance(lost, TableShard)
    lost.__init__()  # type: ignore[misc]  # as one that was started again would be
    with pytest.raises(RemoteError, match=r"no .* table"):
        list(training)


def test_workers_with_other_settings_are_refused() -> None:
    _, (worker,) = make_workers(1)
    with pytest.raises(ConfigError, match="another spec"):
        create_tables(worker, replace(SETTINGS, learning_rate=0.1))


@pytest.mark.parametrize(
    "bad", [{"epochs": 0}, {"batch_examples": 1.5}, {"learning_rate": 0}, {"initial_scale": 0}]
)
def test_bad_settings_are_named(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(bad))} is {next(iter(bad.values()))}"):
        replace(SETTINGS, **bad)  # type: ignore[arg-type]

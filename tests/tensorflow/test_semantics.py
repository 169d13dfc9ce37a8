"""What scripts of TensorFlow 1 are made of besides models means the same on the stock protocol and
on ours.
"""

from __future__ import annotations

import pytest

from tests.tensorflow.tasks import Job
from tests.tensorflow.test_scenarios import check

SCENARIOS = [
    "accumulators", "close_ends_what_waits", "containers", "convolutions",
    "dataset_until_its_end", "device_filters", "device_placement", "devices", "embedding_columns",
    "hooks", "input_queues", "python_ops", "random_numbers", "resets", "run_options",
    "sharded_files", "sliced_updates", "streaming_metrics", "summaries_and_checkpoints", "tables",
    "taken_and_put", "time_limits", "twins",
]  # fmt: skip


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_it_means_the_same(job: Job, scenario: str) -> None:
    found = check(job, scenario)
    # none of the scenario's own
    assert not (len(found) == 2 and isinstance(found[0], str) and found[0].endswith("Error")), found


def test_steps_with_a_time_limit_leave_nothing_in_the_graph_that_each_of_them_would_add_to(
    job: Job,
) -> None:
    assert job.worker().do("limited_in_a_loop", "prpc") == [["DeadlineExceededError", 2.5] * 4, 0]


def test_own_parts_that_keep_nothing_go_with_their_session(job: Job) -> None:
    found, grown, gone = job.worker().do("sessions_in_a_row", "prpc")
    assert found == [0.0, True, 2.0, True, 4.0, True, 6.0, True]
    assert grown == 0
    assert gone == [True] * 4


def test_a_step_that_goes_on_in_the_thread_of_another_has_its_own_deadline(job: Job) -> None:
    assert job.worker().do("continued_in_another_thread", "prpc") == [[5.0], 1, [True]]


def test_a_strategy_that_would_not_use_the_protocol_is_told(job: Job) -> None:
    stock, ours = job.both("run_configs")
    assert stock == [[], "grpc", ["ValueError", "protocol should be grpc or grpc+verbs"]]
    assert ours[1:] == ["prpc", ["ValueError", "protocol should be grpc or grpc+verbs"]]
    (line,) = ours[0]
    assert line.startswith(
        'RunConfig(protocol="prpc", train_distribute=ParameterServerStrategyV1(...)): '
    )

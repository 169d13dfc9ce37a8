"""ClusterSpec has TensorFlow's face; what is wrong with a cluster or TF_CONFIG is named with what
is allowed.
"""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest

from prpc_engine.errors import ConfigError
from prpc_engine.settings.cluster_spec import ClusterSpec, Task, parse_tf_config
from tests.prpc_engine.endpoint_map.goldens import golden_lines

JOBS: dict[str, Any] = {"ps": ["ps0:2222", "ps1:2222"], "worker": {3: "w3:2222", 0: "w0:2222"}}


def test_it_answers_as_that_of_tensorflow() -> None:
    cluster = ClusterSpec(JOBS)
    assert cluster.jobs == ["ps", "worker"]
    assert [cluster.num_tasks(job) for job in cluster.jobs] == [2, 2]
    assert cluster.task_indices("worker") == [0, 3]
    assert cluster.task_address("worker", 3) == "w3:2222"
    assert cluster.job_tasks("ps") == ["ps0:2222", "ps1:2222"]
    assert cluster.job_tasks("worker") == ["w0:2222", None, None, "w3:2222"]
    assert cluster.as_dict() == JOBS
    assert cluster
    assert not ClusterSpec({})
    assert cluster == ClusterSpec(cluster) == ClusterSpec(cluster.as_dict())
    assert hash(cluster) == hash(ClusterSpec(dict(reversed(JOBS.items()))))
    assert cluster != ClusterSpec({"ps": ["ps0:2222"]})
    assert cluster != JOBS
    assert repr(ClusterSpec({"ps": ["h:1"]})) == "ClusterSpec({'ps': ['h:1']})"


def test_sparse_indices_that_have_no_gap_are_a_list() -> None:
    assert ClusterSpec({"worker": {1: "b:1", 0: "a:1"}}).as_dict() == {"worker": ["a:1", "b:1"]}


def test_a_job_may_have_no_tasks() -> None:
    cluster = ClusterSpec({"ps": [], "worker": ["w:1"]})
    assert cluster.num_tasks("ps") == 0
    assert cluster.job_tasks("ps") == []
    assert list(cluster.addresses) == [Task("worker", 0)]


def test_changing_what_it_was_made_from_or_what_it_gave_out_changes_nothing() -> None:
    tasks = ["a:1"]
    cluster = ClusterSpec({"ps": tasks})
    tasks.append("b:1")
    cluster.job_tasks("ps").append("c:1")
    cluster.as_dict().clear()
    assert cluster.as_dict() == {"ps": ["a:1"]}


def test_any_free_port_is_for_one_who_is_alone() -> None:
    assert ClusterSpec({"local": ["localhost:0"]}).task_address("local", 0) == "localhost:0"


def test_it_goes_to_another_process_whole() -> None:
    copy = pickle.loads(pickle.dumps(ClusterSpec(JOBS)))
    assert copy == ClusterSpec(JOBS)
    assert copy.addresses == ClusterSpec(JOBS).addresses


def test_flags_become_a_cluster() -> None:
    assert ClusterSpec.from_hosts(ps="a:1, b:1", worker="c:1", chief="") == ClusterSpec(
        {"ps": ["a:1", "b:1"], "worker": ["c:1"]}
    )


BAD: dict[str, Any] = {
    "no mapping": ["a:1"],
    "job is no str": {1: ["a:1"]},
    "job with slash": {"ps/0": ["a:1"]},
    "empty job": {"": ["a:1"]},
    "tasks are a str": {"ps": "a:1"},
    "tasks are None": {"ps": None},
    "address is no str": {"ps": [1]},
    "empty address": {"ps": ["a:1", ""]},
    "no port": {"ps": ["a"]},
    "slash in host": {"ps": ["a/b:1"]},
    "port 0 for one of two": {"ps": ["a:0", "b:1"]},
    "one address twice": {"ps": ["a:1"], "worker": ["b:1", "A:1"]},
    "negative index": {"ps": {-1: "a:1"}},
    "huge index": {"ps": {10**9: "a:1"}},
    "index is bool": {"ps": {True: "a:1"}},
    "index is a name": {"ps": {"first": "a:1"}},
    "index twice": {"ps": {0: "a:1", "00": "b:1"}},
    "too many tasks": {"ps": ["a:1"] * 65537},
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_cluster_is_named_with_what_is_allowed(case: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ClusterSpec(BAD[case])
    assert str(caught.value) == golden_lines("cluster_spec_errors.txt")[case]


@pytest.mark.parametrize("method", ["num_tasks", "task_indices", "job_tasks"])
def test_a_job_that_is_not_there_is_named_with_those_that_are(method: str) -> None:
    with pytest.raises(
        ConfigError, match="no job 'evaluator' in the cluster: there are ps, worker"
    ):
        getattr(ClusterSpec(JOBS), method)("evaluator")


def test_a_task_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match="no task 1 in job 'worker': its tasks are 0, 3"):
        ClusterSpec(JOBS).task_address("worker", 1)


def test_flags_with_an_empty_place_are_refused() -> None:
    with pytest.raises(ConfigError, match="cluster: ps 1: '' is no address"):
        ClusterSpec.from_hosts(ps="a:1,,b:1")


# TF_CONFIG

CLUSTER = {"chief": ["c:1"], "ps": ["p:1"], "worker": {"0": "w0:1", "2": "w2:1"}}


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ({"type": "chief", "index": 0}, Task("chief", 0)),
        ({"type": "worker", "index": 2}, Task("worker", 2)),
        ({"type": "ps", "index": "0"}, Task("ps", 0)),
        ({"type": "evaluator", "index": 5}, Task("evaluator", 5)),  # beside the cluster
        ({"type": "ps", "index": 0, "trial": "7"}, Task("ps", 0)),
    ],
)
def test_tf_config_says_who_is_there_and_who_this_is(task: dict[str, Any], expected: Task) -> None:
    config = parse_tf_config(
        json.dumps({"cluster": CLUSTER, "task": task, "environment": "cloud", "job": {"x": 1}})
    )
    assert config.cluster.as_dict() == {
        "chief": ["c:1"],
        "ps": ["p:1"],
        "worker": {0: "w0:1", 2: "w2:1"},
    }
    assert config.task == expected


def test_a_master_is_a_chief_and_an_evaluator_may_have_an_address() -> None:
    config = parse_tf_config(
        '{"cluster": {"master": ["m:1"], "evaluator": ["e:1"]}, "task": {"type": "evaluator", '
        '"index": 0}}'
    )
    assert config.cluster.jobs == ["master", "evaluator"]


def test_tf_config_may_name_no_task_and_no_cluster() -> None:
    assert parse_tf_config(json.dumps({"cluster": CLUSTER})).task is None
    assert not parse_tf_config("{}").cluster
    assert parse_tf_config('{"task": {"type": "worker", "index": 0}}').task == Task("worker", 0)


BAD_TEXTS = {
    "empty": "",
    "no JSON": '{"cluster": {"ps": [}}',
    "not an object": "[1]",
    "huge number": "9" * 5000,
    "bad cluster": '{"cluster": {"ps": ["p"]}}',
    "cluster is null": '{"cluster": null}',
    "job twice": '{"cluster": {"ps": ["a:1"], "ps": ["b:1"]}}',
    "two addresses for one task": '{"cluster": {"worker": {"0": "a:1", "0": "b:1"}}}',
    "two chiefs": '{"cluster": {"chief": ["a:1", "b:1"]}}',
    "no master in its job": '{"cluster": {"master": []}}',
    "chief and master": '{"cluster": {"chief": ["a:1"], "master": ["b:1"]}}',
    "task is no object": '{"task": "worker"}',
    "task without index": '{"task": {"type": "worker"}}',
    "type is unknown": '{"cluster": {"ps": ["a:1"]}, "task": {"type": "server", "index": 0}}',
    "type is no str": '{"task": {"type": 1, "index": 0}}',
    "index is not there": '{"cluster": {"ps": ["a:1"]}, "task": {"type": "ps", "index": 1}}',
    "negative index": '{"cluster": {"ps": ["a:1"]}, "task": {"type": "ps", "index": -1}}',
    "index is bool": '{"cluster": {"ps": ["a:1"]}, "task": {"type": "ps", "index": true}}',
    "evaluator not in its job": (
        '{"cluster": {"evaluator": ["a:1"]}, "task": {"type": "evaluator", "index": 1}}'
    ),
}


@pytest.mark.parametrize("case", BAD_TEXTS)
def test_a_bad_tf_config_is_named_with_what_is_allowed(case: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_tf_config(BAD_TEXTS[case])
    said = str(caught.value)
    assert said.startswith("TF_CONFIG")
    # Python's own words, then
    assert said == golden_lines("tf_config_errors.txt")[case] or case in ("no JSON", "huge number")


def test_nesting_without_end_is_refused() -> None:
    with pytest.raises(ConfigError, match="TF_CONFIG is no JSON"):
        parse_tf_config("[" * 1_000_000)

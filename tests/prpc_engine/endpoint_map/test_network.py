"""The variables of GRPC++: each row of the table at the top of network.py."""

from __future__ import annotations

from typing import Any

import pytest

from prpc_engine.errors import ConfigError
from prpc_engine.settings.cluster_spec import ClusterSpec
from prpc_engine.settings.network import UNREAD, NetworkSettings
from shard import polling_enabled
from tests.prpc_engine.endpoint_map.goldens import golden_lines

# 20 tasks, so that the rule of Min cuts nothing but where a test wants it.
CLUSTER = ClusterSpec(
    {
        "ps": [f"p{index}:1" for index in range(8)],
        "worker": [f"w{index}:1" for index in range(10)],
        "chief": ["c:1"],
        "master": ["m:1"],
    }
)
ON, OFF = ("1", "true", "TRUE", "True", " 1\n", "on"), ("0", "false", "FALSE", "False", "Off")


def settings(job: str, **environ: str) -> NetworkSettings:
    return NetworkSettings.for_task(CLUSTER, job, environ)


@pytest.mark.parametrize("job", ["ps", "worker", "chief", "master", "evaluator"])
def test_defaults(job: str) -> None:
    found = settings(job)
    cores = 8 if job == "ps" else 2
    assert found == NetworkSettings(
        cores=cores,
        polling=False,
        pin_cores=False,
        connection_timeout_s=120.0,
        endpoint_map_folder="",
        data_port_offset=None,
        task_index=None,
        ps_graph_fusion=True,
        flow_control_max=None,
        tensor_fuse=False,
        origins=found.origins,
        unread=(),
    )
    assert found.origins["cores"] == f"default: min({cores}, 20 tasks in the cluster)"
    assert {origin for name, origin in found.origins.items() if name != "cores"} == {"default"}


# name of GRPC++, own name, setting, {text: value}, jobs that read it
ROWS: list[tuple[str, str, str, dict[str, Any], set[str]]] = [
    (
        "NETWORK_PS_CORE_NUMBER",
        "PRPC_PS_CORE_NUMBER",
        "cores",
        {"3": 3, " 12 ": 12, "+4": 4},
        {"ps"},
    ),
    (
        "NETWORK_WORKER_CORE_NUMBER",
        "PRPC_WORKER_CORE_NUMBER",
        "cores",
        {"3": 3, "1": 1},
        {"worker", "chief"},
    ),
    (
        "PS_ENABLE_POLLING",
        "PRPC_PS_ENABLE_POLLING",
        "polling",
        dict.fromkeys(ON, True),
        {"ps", "master", "evaluator"},
    ),
    (
        "WORKER_ENABLE_POLLING",
        "PRPC_WORKER_ENABLE_POLLING",
        "polling",
        dict.fromkeys(ON, True),
        {"worker", "chief"},
    ),
    (
        "PS_DISABLE_PIN_CORES",
        "PRPC_PS_DISABLE_PIN_CORES",
        "pin_cores",
        dict.fromkeys(OFF, True),
        {"ps", "master", "evaluator"},
    ),
    (
        "WORKER_DISABLE_PIN_CORES",
        "PRPC_WORKER_DISABLE_PIN_CORES",
        "pin_cores",
        dict.fromkeys(OFF, True),
        {"worker", "chief"},
    ),
]
ALL_JOBS = {"ps", "worker", "chief", "master", "evaluator"}
ROWS += [
    (*row, ALL_JOBS)
    for row in (
        (
            "NETWORK_MAX_CONNECTION_TIMEOUT",
            "PRPC_MAX_CONNECTION_TIMEOUT",
            "connection_timeout_s",
            {"1500": 1.5, "86400000": 86400.0},
        ),
        (
            "TF_SEASTAR_ENDPOINT_MAP_PATH",
            "PRPC_ENDPOINT_MAP",
            "endpoint_map_folder",
            {"/job": "/job", "a b": "a b"},
        ),
        ("TASK_INDEX", "PRPC_TASK_INDEX", "task_index", {"0": 0, "7": 7}),
        (
            "TF_ENABLE_PS_GRAPH_FUSION",
            "PRPC_ENABLE_PS_GRAPH_FUSION",
            "ps_graph_fusion",
            dict.fromkeys(OFF, False),
        ),
        (
            "REMOTE_RENDEZVOUS_FLOW_CONTROL_MAX_SIZE",
            "PRPC_RENDEZVOUS_FLOW_CONTROL_MAX_SIZE",
            "flow_control_max",
            {"1": 1, str((1 << 63) - 1): (1 << 63) - 1},
        ),
    )
]


@pytest.mark.parametrize(
    ("theirs", "ours", "setting", "values", "jobs"),
    ROWS,
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_variable_holds_for_its_jobs_under_both_names(
    theirs: str, ours: str, setting: str, values: dict[str, Any], jobs: set[str]
) -> None:
    for name in (theirs, ours):
        for text, value in values.items():
            for job in ALL_JOBS:
                found = settings(job, **{name: text})
                assert getattr(found, setting) == (
                    value if job in jobs else getattr(settings(job), setting)
                )
                assert found.origins[setting].startswith(f"{name}={text!r}") == (job in jobs)


@pytest.mark.parametrize(
    ("theirs", "ours", "setting", "values", "jobs"),
    ROWS,
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_our_name_wins_and_the_two_must_agree(
    theirs: str, ours: str, setting: str, values: dict[str, Any], jobs: set[str]
) -> None:
    job = min(jobs)
    text = next(iter(values))
    assert settings(job, **{theirs: text, ours: text}).origins[setting].startswith(f"{ours}=")
    other = {"polling": "0", "pin_cores": "1", "ps_graph_fusion": "1"}.get(setting, "9")
    with pytest.raises(
        ConfigError,
        match=f"{ours}=.* and {theirs}=.*: they are one setting; unset one, or set both alike",
    ):
        settings(job, **{theirs: text, ours: other})


def test_a_variable_of_every_node_holds_where_the_role_has_none_set() -> None:
    found = settings("ps", PRPC_ENABLE_POLLING="1", PRPC_PIN_CORES="1")
    assert (found.polling, found.pin_cores) == (True, True)
    assert found.origins["polling"] == "PRPC_ENABLE_POLLING='1'"
    found = settings("ps", PRPC_ENABLE_POLLING="1", PS_ENABLE_POLLING="0", PRPC_SHARDS="5")
    assert (found.polling, found.cores) == (False, 8), "shards are not cores"
    for name in ("PRPC_ENABLE_POLLING", "PRPC_PIN_CORES", "PRPC_SHARDS"):
        with pytest.raises(ConfigError, match=f"^{name}='garbage': "):
            settings("ps", **{name: "garbage"})


def test_two_ways_to_say_the_same_agree() -> None:
    assert settings("ps", PS_ENABLE_POLLING="True", PRPC_PS_ENABLE_POLLING="1").polling


# The rule of Min


@pytest.mark.parametrize(
    ("asked", "cores"),
    [({}, 3), ({"NETWORK_PS_CORE_NUMBER": "8"}, 3), ({"NETWORK_PS_CORE_NUMBER": "2"}, 2)],
)
def test_there_are_at_most_as_many_cores_as_tasks(asked: dict[str, str], cores: int) -> None:
    cluster = ClusterSpec({"ps": ["p:1"], "worker": ["a:1", "b:1"]})
    found = NetworkSettings.for_task(cluster, "ps", asked)
    assert found.cores == cores
    assert found.origins["cores"].endswith(
        f": min({asked.get('NETWORK_PS_CORE_NUMBER', 8)}, 3 tasks in the cluster)"
    )


def test_there_is_at_least_one_core() -> None:
    assert NetworkSettings.for_task(ClusterSpec({"ps": [], "worker": []}), "worker", {}).cores == 1


@pytest.mark.parametrize("number", [(1 << 63) - 1, 1 << 63, 10**30])
def test_a_number_of_cores_that_is_too_large_is_cut_however_large(number: int) -> None:
    assert settings("ps", NETWORK_PS_CORE_NUMBER=str(number)).cores == 20


# What is not allowed

BAD: dict[str, tuple[str, dict[str, str]]] = {
    "cores 0": ("ps", {"NETWORK_PS_CORE_NUMBER": "0"}),
    "negative cores": ("worker", {"NETWORK_WORKER_CORE_NUMBER": "-2"}),
    "cores no number": ("ps", {"NETWORK_PS_CORE_NUMBER": "all"}),
    "cores with fraction": ("ps", {"NETWORK_PS_CORE_NUMBER": "2.0"}),
    "cores empty": ("ps", {"NETWORK_PS_CORE_NUMBER": ""}),
    "cores in other digits": ("ps", {"NETWORK_PS_CORE_NUMBER": "٣"}),
    "own cores 0": ("ps", {"PRPC_PS_CORE_NUMBER": "0"}),
    "yes": ("ps", {"PS_ENABLE_POLLING": "yes"}),
    "oon": ("worker", {"WORKER_ENABLE_POLLING": "oon"}),
    "switch empty": ("ps", {"PS_DISABLE_PIN_CORES": ""}),
    "switch 2": ("worker", {"WORKER_DISABLE_PIN_CORES": "2"}),
    "switch of fusion": ("worker", {"TF_ENABLE_PS_GRAPH_FUSION": "no"}),
    "timeout 0": ("worker", {"NETWORK_MAX_CONNECTION_TIMEOUT": "0"}),
    "negative timeout": ("worker", {"NETWORK_MAX_CONNECTION_TIMEOUT": "-1"}),
    "timeout with unit": ("worker", {"NETWORK_MAX_CONNECTION_TIMEOUT": "120s"}),
    "timeout of days": ("worker", {"NETWORK_MAX_CONNECTION_TIMEOUT": "86400001"}),
    "offset 0": ("worker", {"PRPC_DATA_PORT_OFFSET": "0"}),
    "offset too large": ("worker", {"PRPC_DATA_PORT_OFFSET": "70000"}),
    "negative index": ("worker", {"TASK_INDEX": "-1"}),
    "flow control 0": ("worker", {"REMOTE_RENDEZVOUS_FLOW_CONTROL_MAX_SIZE": "0"}),
    "no such job": ("server", {}),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_value_is_named_with_what_is_allowed(case: str) -> None:
    job, environ = BAD[case]
    with pytest.raises(ConfigError) as caught:
        settings(job, **environ)
    assert str(caught.value) == golden_lines("network_errors.txt")[case]


def test_what_other_jobs_read_may_be_anything() -> None:
    assert settings(
        "worker", NETWORK_PS_CORE_NUMBER="x", PS_ENABLE_POLLING="x", PS_DISABLE_PIN_CORES="x"
    ) == settings("worker")


@pytest.mark.parametrize("offset", [-1000, 1, 65535])
def test_an_offset_is_any_number_of_ports(offset: int) -> None:
    assert settings("ps", PRPC_DATA_PORT_OFFSET=str(offset)).data_port_offset == offset


@pytest.mark.parametrize("name", UNREAD)
def test_a_variable_without_effect_is_told(name: str) -> None:
    found = settings("ps", **{name: "16"})
    assert found.cores == 8
    assert len(found.unread) == 1
    assert found.unread[0].startswith(f"{name}='16' has no effect, ")
    assert found.unread[0].endswith(
        ": there are NETWORK_PS_CORE_NUMBER and NETWORK_WORKER_CORE_NUMBER"
    )


@pytest.mark.parametrize("text", [*ON, *OFF, "yes", "no", "", "2", "enabled"])
def test_the_engine_reads_a_switch_as_a_task_does(text: str) -> None:
    try:
        expected = polling_enabled("PS_ENABLE_POLLING", text, False)
    except ValueError:
        with pytest.raises(ConfigError):
            settings("ps", PS_ENABLE_POLLING=text)
    else:
        assert settings("ps", PS_ENABLE_POLLING=text).polling is expected

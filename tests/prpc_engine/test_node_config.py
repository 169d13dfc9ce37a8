"""NodeConfig: the argument, then the environment, then the file, then the default; each value says
where it comes from, and one that is not allowed is refused by its name there.
"""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import pytest

from prpc_engine.errors import ConfigError
from prpc_engine.settings import layers, network
from prpc_engine.settings.address import Address
from prpc_engine.settings.allow import AllowList, Rule
from prpc_engine.settings.config_file import SECTIONS
from prpc_engine.settings.node_config import NodeConfig
from prpc_engine.settings.sections import SETTING_OF, NetworkSection
from shard import DEFAULT_LIMITS, Limits, RestartPolicy

CORES = 4  # of this machine, as these tests have it
SECRET = "nobody-may-read-this"
IN_SECTIONS = network.OF_NODES | network.OF_NETWORK
TABLE_NAMES = [name for variable in IN_SECTIONS.values() for name in variable.names]
ROLE_NAMES = [
    name for role in ("ps", "worker") for one in network.of_role(role) for name in one.names
]


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*TABLE_NAMES, *ROLE_NAMES, "PRPC_CONFIG", "PRPC_SECRET", "PRPC_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(layers, "usable_cores", lambda: list(range(CORES)))


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "own.toml"
    monkeypatch.setenv("PRPC_CONFIG", str(path))
    return path


def test_without_anything_said_all_is_by_default() -> None:
    config = NodeConfig.load()
    assert set(config.origins.values()) == {"default"}
    assert (config.shards.count, config.shards.polling, config.shards.pin_cores) == (0, False, None)
    assert config.node.transports == ("shm", "unix", "tcp")
    assert config.limits == DEFAULT_LIMITS
    assert config.tls is None
    assert config.allow.rules == ()
    assert config.notes == ()


def test_each_layer_goes_before_the_one_below_it(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text("[shards]\ncount = 1\npolling = true\n[node]\nlease_s = 7\n")
    config = NodeConfig.load()
    assert (config.shards.count, config.shards.polling, config.node.lease_s) == (1, True, 7.0)
    assert config.origins["shards.count"] == f"{file}: [shards]"
    monkeypatch.setenv("PRPC_SHARDS", "2")
    config = NodeConfig.load()
    assert (config.shards.count, config.origins["shards.count"]) == (2, "PRPC_SHARDS='2'")
    monkeypatch.setenv("NETWORK_PS_CORE_NUMBER", "3")
    assert NodeConfig.load().shards.count == NodeConfig.load("worker").shards.count == 2
    config = NodeConfig.load("ps")
    assert config.shards.count == 3
    assert config.origins["shards.count"] == "NETWORK_PS_CORE_NUMBER='3'"
    config = NodeConfig.load("ps", shards=0)
    assert (config.shards.count, config.origins["shards.count"]) == (0, "argument shards")
    assert config.origins["shards.polling"] == f"{file}: [shards]", "each setting by itself"


def test_section_network_is_for_roles_and_goes_below_their_variables(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text(
        "[network]\nconnection_timeout_s = 30\ntensor_fuse = true\nflow_control_max = 9\n"
    )
    network = NodeConfig.load("worker").network
    assert (network.connection_timeout_s, network.tensor_fuse, network.flow_control_max) == (
        *(30.0, True, 9),
    )
    monkeypatch.setenv("NETWORK_MAX_CONNECTION_TIMEOUT", "1500")
    monkeypatch.setenv("PRPC_DATA_PORT_OFFSET", "-5")
    config = NodeConfig.load("worker", tensor_fuse=False)
    assert config.network == NetworkSection(
        connection_timeout_s=1.5, data_port_offset=-5, flow_control_max=9
    )
    assert {name: one.origin for name, one in config.found_network().items()} == {
        "connection_timeout_s": "NETWORK_MAX_CONNECTION_TIMEOUT='1500'",
        "endpoint_map_folder": "default",
        "data_port_offset": "PRPC_DATA_PORT_OFFSET='-5'",
        "flow_control_max": f"{file}: [network]",
        "tensor_fuse": "argument tensor_fuse",
    }
    monkeypatch.setenv("PRPC_DATA_PORT_OFFSET", "garbage")
    assert NodeConfig.load().network.connection_timeout_s == 30.0, "no role: no such variable"


def test_none_as_an_argument_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRPC_SHARDS", "2")
    config = NodeConfig.load(**dict.fromkeys(SETTING_OF))  # type: ignore[arg-type]
    assert config.shards.count == 2
    assert set(config.origins.values()) == {"default", "PRPC_SHARDS='2'"}


def test_a_pyproject_has_the_sections_below_tool_prpc(file: Path) -> None:
    file.write_text('[project]\nname = "x"\n[tool.prpc.shards]\ncount = 1\n[tool.ruff]\na = 1\n')
    config = NodeConfig.load()
    assert (config.shards.count, config.origins["shards.count"]) == (
        1,
        f"{file}: [tool.prpc.shards]",
    )
    file.write_text("[tool.prpc.shard]\ncount = 1\n")
    with pytest.raises(ConfigError, match=r"unknown section or value 'tool\.prpc\.shard': allowed"):
        NodeConfig.load()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "[shards]\ncount = 2\n[tool.prpc.limits]\nring_bytes = 65536\n",
            r"\[shards\] at the top, and \[tool\.prpc\.limits\]: sections stand in one",
        ),
        (
            "[shards]\ncount = 2\n[tool.prpc.shards]\ncount = 1\n",
            r"\[shards\] at the top, and \[tool\.prpc\.shards\]: sections stand in one",
        ),
        ("[node]\n[tool.prpc]\n", r"\[node\] at the top, and \[tool\.prpc\]: "),
    ],
)
def test_sections_in_both_places_of_a_file_are_refused_and_both_are_named(
    file: Path, text: str, said: str
) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"^{file}: {said}"):
        NodeConfig.load()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[shards]\ncount = -1", r"\[shards\] count = -1: a whole number from 0 on is allowed"),
        ("[network]\ncore_number = 1", r"\[network\] core_number = 1: unknown; allowed are connec"),
        (
            "[network]\nconnection_timeout_s = 0",
            r"\[network\] connection_timeout_s = 0: 0\.001 to 86400 secon",
        ),
        (
            "[network]\ndata_port_offset = 0",
            r"\[network\] data_port_offset = 0: a whole number from -65535 to",
        ),
        (
            "[network]\ndata_port_offset = 70000",
            r"\[network\] data_port_offset = 70000: a whole number from -6",
        ),
        (
            "[network]\nendpoint_map_folder = 1",
            r"\[network\] endpoint_map_folder = 1: a folder is allowed",
        ),
        (
            "[network]\nflow_control_max = 0",
            r"\[network\] flow_control_max = 0: a whole number from 1 on is",
        ),
        (
            "[network]\ntensor_fuse = 'no'",
            r"\[network\] tensor_fuse = 'no': true and false are allowed",
        ),
        ('[shards]\ncount = "all"', r"\[shards\] count = 'all': a whole number .* or \"auto\""),
        ('[shards]\npolling = "on"', r"\[shards\] polling = 'on': true and false are allowed"),
        ("[shards]\ncounts = 1", r"\[shards\] counts = 1: unknown; allowed are count, polling"),
        ('[shards]\nrestart = "often"', r"\[shards\] restart = .often.: .never. and .on-failure."),
        ("[node]\nlease_s = 0", r"\[node\] lease_s = 0: 0\.1 to 3600 seconds are allowed"),
        ("[node]\ntimeout_s = nan", r"\[node\] timeout_s = nan: 0 to 3600 seconds are allowed"),
        ('[node]\ntransports = ["udp"]', r"\[node\] transports = \['udp'\]: allowed are shm, unix"),
        ('[node]\nbind = "x"', r"\[node\] bind = 'x': 'x' is no address"),
        ('[node]\nadvertise = "::"', r"\[node\] advertise = '::': "),
        (
            "[transport]\nchecksum = true",
            r"\[transport\] checksum = True: unknown; allowed are tcp",
        ),
        ("[limits]\nring_bytes = 1.5", r"\[limits\] ring_bytes = 1\.5: a whole number is"),
        ("shards = 1", r"shards = 1: a table is expected, under \[shards\]"),
        ("[shard]\ncount = 1", "unknown section or value 'shard'"),
    ],
)
def test_what_a_file_must_not_say_is_named_with_file_and_section(
    file: Path, text: str, said: str
) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"^{file}: {said}"):
        NodeConfig.load()


def test_every_section_is_one_that_a_file_may_have() -> None:
    named = {name.partition(".")[0] for name, _ in NodeConfig.load().settings()}
    assert named == {*SECTIONS, "secret"}


WRONG: dict[str, list[Any]] = {
    "shards": [-1, 65, 1.0, True, "many"],
    "polling": ["yes", 2],
    "pin_cores": ["yes"],
    "restart": ["often", 5],
    "bind": ["host", 5, "host:65536"],
    "advertise": [5, "0.0.0.0"],
    "transports": [[], ["udp"], ["tcp", "tcp"], "tcp", 5, [[]]],
    "timeout_s": [-1, math.nan, math.inf, "5", True, 10**400, [1.0], 1j],
    "lease_s": [0, 3601, "5", True],
    "root": ["", "x" * 257, 5],
    "stall_budget_s": [0, 3601, math.nan, True, "5"],
    "timing": ["yes"],
    "slow_call_s": [0, -1, math.inf, "5"],
    "allow_pickle": ["yes"],
    "compression": [5],
    "limits": [{}, 5],
    "tls": ["x.pem"],
    "allow": [[], 5],
}


@pytest.mark.parametrize("name", WRONG)
def test_an_argument_that_is_not_allowed_is_refused_by_its_name(name: str) -> None:
    for value in WRONG[name]:
        with pytest.raises(ConfigError) as caught:
            NodeConfig.load(**{name: value})  # type: ignore[arg-type]
        assert str(caught.value).startswith(f"{name}={value!r}"[:60])
        assert len(str(caught.value)) < 400


def test_an_argument_that_there_is_not_is_named_with_those_that_there_are() -> None:
    with pytest.raises(TypeError, match=r"unknown argument 'shard': there are bind, .*shards"):
        NodeConfig.load(shard=3)  # type: ignore[call-arg]


@pytest.mark.parametrize("name", ["PRPC_SHARDS", "PRPC_ENABLE_POLLING", "PRPC_PIN_CORES"])
@pytest.mark.parametrize("role", ["", "ps", "worker", "chief", "evaluator"])
def test_a_variable_of_all_nodes_that_makes_no_sense_is_refused_whatever_the_role(
    name: str, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for text in ("garbage", "", "-1", "1.5"):
        monkeypatch.setenv(name, text)
        with pytest.raises(ConfigError, match=f"^{name}={text!r}: .* allowed"):
            NodeConfig.load(role, shards=1, polling=True, pin_cores=True)


def test_a_count_of_any_length_is_clamped_and_what_is_none_is_told_how_to_have_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, role in (("PRPC_SHARDS", ""), ("NETWORK_PS_CORE_NUMBER", "ps")):
        monkeypatch.setenv(name, 23 * "9")
        assert NodeConfig.load(role).shards.count == CORES
        for text in ("", "-3"):
            monkeypatch.setenv(name, text)
            with pytest.raises(ConfigError) as caught:
                NodeConfig.load(role)
            assert str(caught.value).startswith(f"{name}={text!r}: a whole number from ")
            assert str(caught.value).endswith("; unset it for the default")
        monkeypatch.delenv(name)


@pytest.mark.parametrize("name", ROLE_NAMES)
def test_a_variable_of_a_role_that_makes_no_sense_is_refused_by_that_role(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "garbage")
    with pytest.raises(ConfigError, match=f"^{name}='garbage': .* allowed"):
        NodeConfig.load("worker" if "WORKER" in name else "ps")


@pytest.mark.parametrize(
    ("role", "prefix"), [("ps", "PS"), ("worker", "WORKER"), ("chief", "WORKER")]
)
def test_a_role_reads_its_variables_above_those_of_all_nodes(
    role: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRPC_ENABLE_POLLING", "0")
    monkeypatch.setenv("PRPC_PIN_CORES", "0")
    monkeypatch.setenv(f"{prefix}_ENABLE_POLLING", "1")
    monkeypatch.setenv(f"{prefix}_DISABLE_PIN_CORES", "0")
    monkeypatch.setenv(f"NETWORK_{prefix}_CORE_NUMBER", "3")
    shards = NodeConfig.load(role).shards
    assert (shards.count, shards.polling, shards.pin_cores) == (3, True, True)
    shards = NodeConfig.load().shards
    assert (shards.count, shards.polling, shards.pin_cores) == (0, False, False)
    assert NodeConfig.load(role, polling=False).shards.polling is False


@pytest.mark.parametrize("role", ["ps", "worker", "chief", "evaluator"])
def test_nothing_of_a_role_is_pinned_by_default_and_each_layer_may_say_otherwise(
    role: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text("")
    config = NodeConfig.load(role)
    assert (config.shards.pin_cores, config.origins["shards.pin_cores"]) == (False, "default")
    assert NodeConfig.load().shards.pin_cores is None
    file.write_text("[shards]\npin_cores = true\n")
    assert NodeConfig.load(role).shards.pin_cores is True
    monkeypatch.setenv("PRPC_PIN_CORES", "0")
    assert NodeConfig.load(role).shards.pin_cores is False
    assert NodeConfig.load(role, pin_cores=True).shards.pin_cores is True


def test_a_core_number_on_one_core_says_that_no_shards_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(layers, "usable_cores", lambda: [0])
    monkeypatch.setenv("NETWORK_PS_CORE_NUMBER", "100")
    config = NodeConfig.load("ps")
    assert config.shards.count == 0
    [note] = config.notes
    assert note.endswith("has 1 cores: there will be none, its own process answers")
    monkeypatch.delenv("NETWORK_PS_CORE_NUMBER")
    monkeypatch.setenv("PRPC_SHARDS", "100")
    config = NodeConfig.load("ps")
    assert config.shards.count == 1
    assert config.notes[0].endswith("has 1 cores: there will be 1"), "shards, not cores"


def test_a_count_above_the_cpuset_is_clamped_with_a_line_that_says_so(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text("[shards]\ncount = 8\n")
    config = NodeConfig.load()
    assert config.shards.count == CORES
    [note] = config.notes
    assert note.startswith(f"{file}: [shards]: 8 shards are asked for")
    assert note.endswith("has 4 cores: there will be 4")
    monkeypatch.setenv("PRPC_SHARDS", "1000")
    config = NodeConfig.load()
    assert (config.shards.count, len(config.notes)) == (CORES, 1)
    assert config.origins["shards.count"] == "PRPC_SHARDS='1000': clamped to 4 of 4 cores"
    monkeypatch.setenv("NETWORK_PS_CORE_NUMBER", "8")
    config = NodeConfig.load("ps")
    assert (config.shards.count, len(config.notes)) == (CORES, 1)
    assert config.notes[0].startswith("NETWORK_PS_CORE_NUMBER='8': 8 shards")
    config = NodeConfig.load("ps", shards=8)
    assert (config.shards.count, config.notes) == (8, ()), "the program knows"


def test_a_core_number_is_at_most_that_of_the_tasks_and_one_core_is_the_process_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NETWORK_PS_CORE_NUMBER", "3")
    config = NodeConfig.load("ps", 2)
    assert config.shards.count == 2
    assert config.origins["shards.count"].endswith("min(3, 2 tasks in the cluster)")
    assert NodeConfig.load("ps", 1).shards.count == 0
    monkeypatch.setattr(layers, "usable_cores", lambda: [0])
    assert NodeConfig.load("ps").shards.count == 0
    monkeypatch.delenv("NETWORK_PS_CORE_NUMBER")
    monkeypatch.setenv("PRPC_SHARDS", "1")
    assert NodeConfig.load("ps").shards.count == 1, "shards, not cores"


def test_what_is_overridden_is_the_arguments_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PRPC_SHARDS", "2")
    config = NodeConfig.load(
        limits=Limits(blocks_max=7), secret=SECRET, allow=AllowList([Rule("kv", ("any",))])
    )
    monkeypatch.setenv("PRPC_SHARDS", "3")
    other = config.override(polling=True, restart="never", bind="127.0.0.1:99")
    assert other.shards.count == 2
    assert other.origins["shards.count"] == "PRPC_SHARDS='2'"
    assert other.shards.polling
    assert other.shards.restart == RestartPolicy("never")
    assert other.node.bind == Address("127.0.0.1", 99)
    assert other.origins["shards.polling"] == "argument polling"
    assert (other.limits, other.secret, other.allow) == (config.limits, config.secret, config.allow)
    with pytest.raises(ConfigError, match=r"^lease_s=0: "):
        config.override(lease_s=0)


def test_it_is_frozen_goes_to_other_processes_and_never_shows_the_secret() -> None:
    config = NodeConfig.load(secret=SECRET, shards=1)
    with pytest.raises(AttributeError):
        config.secret = b""
    again = pickle.loads(pickle.dumps(config))
    assert (again.secret, again.shards, again.origins) == (
        SECRET.encode(),
        config.shards,
        config.origins,
    )
    for shown in (repr(config), str(config), repr(config.__rich_repr__()), repr(config.origins)):
        assert SECRET not in shown
    with pytest.raises(ConfigError) as caught:
        config.override(shards=-1)
    assert SECRET not in str(caught.value)


def test_pickles_need_a_secret_of_the_job() -> None:
    from prpc_engine import NO_SECRET

    with pytest.raises(ConfigError, match="allow_pickle=True needs a secret of the job"):
        NodeConfig.load(allow_pickle=True, secret=NO_SECRET)
    assert NodeConfig.load(allow_pickle=1, secret=SECRET).node.allow_pickle is True  # type: ignore[arg-type]

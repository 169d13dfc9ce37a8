"""configs/default.toml tells the truth, and a bad one is named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from prpc_engine import Master, RpcService
from prpc_engine.errors import ConfigError
from prpc_engine.settings.node_config import NodeConfig
from shard import DEFAULT_LIMITS, Limits
from shard.memory.limits import RING_BYTES_MIN
from tests.prpc_engine.handlers import Plain
from tests.prpc_engine.settings_of import load_limits

DEFAULT_FILE = Path(__file__).parents[2] / "configs" / "default.toml"


def test_the_default_file_says_what_the_defaults_are() -> None:
    assert load_limits(str(DEFAULT_FILE)) == DEFAULT_LIMITS
    text = DEFAULT_FILE.read_text()
    assert "\n[transport]\n" in text
    named = [
        line.partition(" =")[0]
        for line in text.partition("[transport]")[0].splitlines()
        if " = " in line
    ]
    assert named == list(Limits.__dataclass_fields__), (
        "every limit stands in the file, with its reason"
    )


def test_an_argument_goes_before_the_file_and_the_file_before_the_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "own.toml"
    file.write_text("[limits]\nring_bytes = 65536\nhandshake_s = 1\n")
    monkeypatch.setenv("PRPC_CONFIG", str(file))
    assert NodeConfig.load().limits == Limits(ring_bytes=65536, handshake_s=1.0)
    assert NodeConfig.load(limits=Limits(blocks_max=7)).limits == Limits(blocks_max=7)
    monkeypatch.delenv("PRPC_CONFIG")
    assert NodeConfig.load().limits == DEFAULT_LIMITS


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[limits]\nring_bytes = -1", "ring_bytes = -1: 4096 to 1073741824 is allowed"),
        ("[limits]\nring_bytes = 'many'", "ring_bytes = 'many'"),
        ("[limits]\nring_bites = 5", "ring_bites"),
        ("[limit]\nring_bytes = 5", "unknown section or value 'limit'"),
        ("[limits\n", "own.toml"),
    ],
)
def test_a_bad_file_is_named_with_what_is_allowed(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "own.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_limits(str(file))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("ring_bytes = 3", "4096 to 1073741824"),
        ("ring_bytes = 1_073_741_825", "4096 to 1073741824"),
        ("ring_bytes = 1" + 26 * "0", "4096 to 1073741824"),
        ("blocks_max = 9_223_372_036_854_775_807", "1 to 65535"),
        ("blocks_bytes_max = 9_223_372_036_854_775_807", "1 to 140737488355328"),
        ("handshake_s = 1e300", "0.01 to 3600.0"),
    ],
)
def test_a_limit_that_no_connection_could_keep_is_refused_as_it_is_read(
    tmp_path: Path, text: str, allowed: str
) -> None:
    file = tmp_path / "own.toml"
    file.write_text(f"[limits]\n{text}\n")
    with pytest.raises(ConfigError, match=rf"{text[:10]}.* = .*: {allowed} is allowed"):
        load_limits(str(file))


def test_every_limit_that_is_wrong_is_named(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text(
        "[limits]\nring_bytes = 3\nblocks_max = 0\nsegments_max = 'x'\nhandshake_s = 1\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_limits(str(file))
    texts = str(caught.value).split("; ")
    assert [text.split(" ")[2] for text in texts] == ["blocks_max", "ring_bytes", "segments_max"]


def test_calls_go_through_the_smallest_ring_that_is_allowed() -> None:
    limits = Limits(ring_bytes=RING_BYTES_MIN, ring_bytes_max=RING_BYTES_MIN)
    with (
        Master(limits=limits) as master,
        RpcService(master.address, limits=limits, transports=["shm"]) as server,
        RpcService(master.address, limits=limits, transports=["shm"]) as client,
    ):
        server.create_server("echo", Plain())
        caller = client.create_client("echo", 1)
        sent = np.arange(1000, dtype=np.int64)
        assert caller.call("echo", "x" * 10_000) == "x" * 10_000
        assert (caller.call("echo", sent) == sent).all()


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load_limits("/nowhere/own.toml")


def test_checksums_of_tcp_are_asked_for_in_the_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PRPC_CONFIG", raising=False)
    assert not NodeConfig.load().transport.tcp_checksum
    file = tmp_path / "own.toml"
    monkeypatch.setenv("PRPC_CONFIG", str(file))
    for text, wanted in [
        ("", False),
        ("[transport]\n", False),
        ("[transport]\ntcp_checksum = true\n", True),
    ]:
        file.write_text(text)
        assert NodeConfig.load().transport.tcp_checksum is wanted
    monkeypatch.setenv("PRPC_CONFIG", str(DEFAULT_FILE))
    assert not NodeConfig.load().transport.tcp_checksum


@pytest.mark.parametrize("line", ["tcp_checksum = 1", 'tcp_checksum = "yes"', "checksum = true"])
def test_what_transport_settings_cannot_be_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    file = tmp_path / "own.toml"
    file.write_text(f"[transport]\n{line}\n")
    monkeypatch.setenv("PRPC_CONFIG", str(file))
    with pytest.raises(
        ConfigError, match=r"\[transport\] .*(allowed are tcp_checksum|true and false are allowed)"
    ):
        NodeConfig.load()


def test_the_default_file_says_the_defaults_of_every_section(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PRPC_CONFIG", raising=False)
    expected = dict(NodeConfig.load().settings())
    monkeypatch.setenv("PRPC_CONFIG", str(DEFAULT_FILE))
    config = NodeConfig.load()
    found = dict(config.settings())
    assert found.pop("allow").rules == expected.pop("allow").rules
    assert found == expected
    silent = {name for name, origin in config.origins.items() if origin == "default"}
    assert silent - {"secret", "tls", "allow"} == {
        "node.advertise",
        "node.slow_call_s",
        "node.compression",
        "shards.pin_cores",
        "transport.verbs_device",
        "transport.verbs_gid_index",
        "network.data_port_offset",
        "network.flow_control_max",
    }, "which have no value by default, and stand there as comments"

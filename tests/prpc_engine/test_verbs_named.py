"""RDMA that is asked for on a machine that has none: said by name, and other transports go on.

What verbs do is in tests/rdma, which runs where there is a device.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from prpc_engine import Master, RpcService
from prpc_engine.errors import ConfigError
from prpc_engine.settings.node_config import NodeConfig
from shard import DEFAULT_LIMITS, Node, Slab, VerbsTransport, verbs_refusal
from tests.prpc_engine.handlers import Plain

WHY = verbs_refusal()
without_device = pytest.mark.skipif(WHY is None, reason="this machine has an RDMA device")


@without_device
def test_another_transport_takes_its_place_and_the_log_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        Master("127.0.0.1:0") as master,
        RpcService(master.address, transports=["verbs", "tcp"]) as server,
        RpcService(master.address, transports=["verbs", "tcp"]) as service,
    ):
        server.create_server("plain", Plain())
        assert service.create_client("plain").call("add", 1, 2) == 3
    told = [one.getMessage() for one in caplog.records if "verbs" in one.getMessage()]
    assert told[0] == f"transport verbs is not used: {WHY}"


@without_device
def test_alone_it_is_refused_with_the_reason() -> None:
    with (
        Master("127.0.0.1:0") as master,
        pytest.raises(ConfigError, match=r"none of the transports \['verbs'\] works") as refused,
    ):
        RpcService(master.address, transports=["verbs"])
    assert str(WHY) in str(refused.value)


def test_it_is_refused_beside_tls_wherever_it_runs() -> None:
    slab = Slab()
    transport = VerbsTransport(
        Node(secret=b"", incarnation=1, limits=DEFAULT_LIMITS), slab, has_tls=True
    )
    refusal = transport.refusal()
    slab.close()
    assert refusal is not None
    assert "RDMA encrypts nothing" in refusal


def test_its_settings_stand_in_the_file_and_the_device_in_a_variable_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "own.toml"
    file.write_text(
        '[transport]\nverbs_device = "mlx5_0"\nverbs_gid_index = 3\nverbs_service_level = 5\n'
        "verbs_traffic_class = 106\n"
    )
    monkeypatch.setenv("PRPC_CONFIG", str(file))
    found = NodeConfig.load(transports=["verbs"])
    section = found.transport
    assert (section.verbs_device, section.verbs_gid_index) == ("mlx5_0", 3)
    assert (section.verbs_service_level, section.verbs_traffic_class) == (5, 106)
    monkeypatch.setenv("PRPC_VERBS_DEVICE", "mlx5_1:2")
    found = NodeConfig.load()
    assert found.transport.verbs_device == "mlx5_1:2"
    assert found.origins["transport.verbs_device"] == "PRPC_VERBS_DEVICE='mlx5_1:2'"


@pytest.mark.parametrize(
    ("line", "allowed"),
    [
        ("verbs_device = 1", 'such as "mlx5_0:1"'),
        ("verbs_gid_index = -1", "0 to 255"),
        ("verbs_service_level = 16", "0 to 15"),
        ("verbs_traffic_class = 256", "0 to 255"),
    ],
)
def test_what_they_cannot_be_is_named_with_what_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, allowed: str
) -> None:
    file = tmp_path / "own.toml"
    file.write_text(f"[transport]\n{line}\n")
    monkeypatch.setenv("PRPC_CONFIG", str(file))
    with pytest.raises(ConfigError, match=allowed):
        NodeConfig.load()

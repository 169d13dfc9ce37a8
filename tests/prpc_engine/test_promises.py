"""Sentences of SECURITY.md about nodes as they are by default, and about the texts and peers of
them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from prpc_engine import Master, RpcService, Server, errors
from prpc_engine.cluster.endpoint import Place
from prpc_engine.demo.roles import DemoJob
from prpc_engine.demo.settings import DemoSettings
from prpc_engine.settings.address import Address
from prpc_engine.settings.node_config import NodeConfig
from prpc_engine.settings.user_secret import UserSecret, user_secret
from shard import DEFAULT_LIMITS
from tests.prpc_engine.cluster.tasks import cluster_at, fresh_host
from tests.prpc_engine.inside import node_of
from tests.prpc_engine.processes import PATIENCE_S

SECRET = "nobody-may-read-this"
PS0 = "/job:ps/task:0"


def test_a_master_and_a_service_listen_at_loopback_unless_told_otherwise() -> None:
    with Master() as master, RpcService(master.address) as service:
        listening = [
            master.address,
            *(
                one.removeprefix("tcp://")
                for one in node_of(service).addresses
                if one.startswith("tcp:")
            ),
        ]
        assert len(listening) == 2
        assert all(address.startswith("127.0.0.1:") for address in listening), listening


def test_the_secret_is_in_the_repr_of_nothing_that_holds_it() -> None:
    held = [
        DemoJob("m", 1, 0, 1, False, SECRET, DemoSettings()),
        UserSecret(SECRET.encode()),
        config := NodeConfig.load(secret=SECRET),
        Place("task", "plan", Address("localhost", 1), Address("localhost", 2), config),
        config.override(shards=1),
    ]
    assert [one for one in held if SECRET in repr(one) or SECRET in str(one)] == []
    assert repr(user_secret()) == "UserSecret(...)"
    with Master(secret=SECRET) as master, RpcService(master.address, secret=SECRET) as service:
        shown = [f"{one!r} {one}" for one in (master, service, node_of(master), node_of(service))]
        assert SECRET not in "".join(shown)


@pytest.mark.parametrize("service", ["data", "control"])
def test_an_allow_list_narrows_who_reaches_a_task(
    service: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = tmp_path / "own.toml"
    rules.write_text(f'[[allow]]\nservice = "{service}"\nwho = ["tls:worker-*"]\n')
    cluster = cluster_at(fresh_host(seed), ps=1, worker=1)
    monkeypatch.setenv("PRPC_CONFIG", str(rules))
    with Server(cluster, "ps", 0):
        monkeypatch.delenv("PRPC_CONFIG")
        with (
            Server(cluster, "worker", 0) as worker,
            pytest.raises(errors.RpcError, match="was refused"),
        ):
            worker.recv("weights", source=PS0, step=0, timeout_s=PATIENCE_S)


def test_a_limit_of_a_node_is_the_one_that_is_documented() -> None:
    """What SECURITY.md says in numbers."""
    assert DEFAULT_LIMITS.blocks_bytes_max == DEFAULT_LIMITS.expanded_total_bytes_max == 4 << 30
    assert DEFAULT_LIMITS.expanded_bytes_max == 256 << 20
    found = (
        DEFAULT_LIMITS.handshake_s,
        DEFAULT_LIMITS.handshakes_max,
        DEFAULT_LIMITS.handshakes_per_host_max,
    )
    assert (*found, DEFAULT_LIMITS.handshakes_waiting_max) == (5.0, 256, 64, 1024)

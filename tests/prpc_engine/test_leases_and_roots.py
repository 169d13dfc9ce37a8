"""What a service tells its master: which job it belongs to, and how long it may be silent.

    python -m tests.prpc_engine.test_leases_and_roots MASTER

serves Plain under "test" with a lease of LEASE_S until its standard input ends.
"""

from __future__ import annotations

import queue
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from prpc_engine import Master, MasterClient, RetryPolicy, RpcService
from prpc_engine.errors import ConfigError, NoServer
from prpc_engine.master.client import TreeEvent
from tests.program import Program, halt
from tests.prpc_engine import seen
from tests.prpc_engine.handlers import Plain
from tests.prpc_engine.inside import registry_of, session_of
from tests.prpc_engine.processes import PATIENCE_S, wait_until

LEASE_S = 0.5
# a busy machine may lose that lease, too: a call waits for the server to be back
STUBBORN = RetryPolicy(unsent_max=100)


@pytest.mark.usefixtures("patient_sessions")
def test_jobs_of_other_roots_share_a_master_and_see_nothing_of_each_other() -> None:
    with (
        Master() as master,
        RpcService(master=master.address, root="one") as one,
        RpcService(master=master.address, root="one") as peer,
        RpcService(master=master.address, root="two") as two,
    ):
        assert (one.rank, peer.rank, two.rank) == (0, 1, 0)
        one.create_server("test", {"who": lambda: "one"})
        with pytest.raises(NoServer, match="knows these services: none"):
            two.create_client("test", timeout_s=0.0)
        two.create_server("test", {"who": lambda: "two"})
        assert peer.create_client("test", timeout_s=PATIENCE_S).call("who") == "one"
        assert two.create_client("test", timeout_s=PATIENCE_S).call("who") == "two"
        with MasterClient(master.address, root="two") as client:
            assert [info.global_rank for info in client.get_comm_info()] == [0]
        assert one.master_client.count_up("k") == two.master_client.count_up("k") == 0


def test_what_may_wait_for_nothing_is_asked_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where the reactor has taken up the first of what submit() gives it, before the second
    is there.
    """
    with Master() as master, RpcService(master=master.address) as service:
        reactor = session_of(service).node.reactor
        call_soon, told = reactor.call_soon, list[object]()

        def call_soon_and_see(work: Callable[[], object]) -> None:
            begun = threading.Event()
            call_soon(lambda: (begun.set(), work()))
            if threading.current_thread() is threading.main_thread() and not told:
                told.append(work)
                assert begun.wait(PATIENCE_S)

        monkeypatch.setattr(reactor, "call_soon", call_soon_and_see)
        with pytest.raises(NoServer, match="knows these services: none"):
            service.create_client("test", timeout_s=0.0)
        assert told


def test_shards_belong_to_the_job_of_their_service_and_have_its_lease() -> None:
    with (
        Master() as master,
        RpcService(master=master.address, shards=1, root="one", lease_s=60.0) as sharded,
        RpcService(master=master.address, root="one") as peer,
        RpcService(master=master.address, root="two") as two,
    ):
        sharded.create_server("test", Plain, sharded=True)
        assert peer.create_client("test", timeout_s=PATIENCE_S).call("echo", 1) == 1
        assert two.master_client.get_rpc_service_info("RpcService") == []
        sessions = registry_of(master).tree.sessions.values()
        assert sorted((one.record.root, one.record.lease_s) for one in sessions) == [
            ("one", 5.0),
            ("one", 60.0),
            ("one", 60.0),
            ("two", 5.0),
        ]


def test_a_node_that_stands_still_beyond_its_lease_is_gone_and_watchers_are_told() -> None:
    told: queue.SimpleQueue[TreeEvent] = queue.SimpleQueue()
    with Master() as master, RpcService(master=master.address) as service:
        node = Program("tests.prpc_engine.test_leases_and_roots", master.address)
        try:
            assert node.read_line() == "ready"
            client = service.create_client("test", timeout_s=PATIENCE_S, retry=STUBBORN)
            assert client.call("echo", 1) == 1
            service.master_client.watch_node(told.put)
            halt(node.pid)
            while (event := told.get(timeout=PATIENCE_S)).value is not None:
                pass  # on a busy machine it may have been silent for too long before, and come back
            assert event.path == "/_node_/1"
            wait_until(lambda: seen.ranks(service) == [0], "its end, now that it stands still")
            wait_until(lambda: client.server_ids == (), "its client, that is told too")
            node.process.send_signal(signal.SIGCONT)
            wait_until(lambda: seen.ranks(service) == [0, 1], "the node, that joins anew")
            wait_until(lambda: client.server_ids == (0,), "its server")
            assert client.call("echo", 2) == 2
        finally:
            node.process.send_signal(signal.SIGCONT)
            node.end()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"lease_s": 0.01}, r"lease_s=0\.01: 0\.1 to 3600 seconds are allowed"),
        ({"lease_s": 1e6}, r"lease_s=1000000\.0: 0\.1 to 3600"),
        ({"root": ""}, "root='': a str of 1 to 256 characters is allowed"),
        ({"root": "r" * 257}, "root='rrr.*: a str of 1 to 256"),
    ],
)
def test_what_makes_no_sense_is_refused_alike_everywhere(
    settings: dict[str, Any], said: str
) -> None:
    for make in (RpcService, MasterClient):
        with pytest.raises(ConfigError, match=said):
            make("127.0.0.1:1", **settings)


def main(master: str) -> None:
    """What the process runs."""
    with RpcService(master=master, lease_s=LEASE_S) as service:
        service.create_server("test", Plain())
        print("ready", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""What is dropped without close() says so and is closed; what is still in use is not."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from prpc_engine import Master, MasterClient, RpcClient, RpcServer, RpcService
from tests.program import ROOT
from tests.prpc_engine.handlers import Plain
from tests.prpc_engine.processes import PATIENCE_S, wait_until

# Around each of these tests nothing may be left behind: no thread, no descriptor (tests/leaks.py).


SAID = r"(RpcService|MasterClient) of .* was dropped without close\(\)"


def drop(act: Callable[[], object], master: Master, sessions: int) -> None:
    """Let act() drop services, and wait until they have left: a thread that began before may hold
    one for a moment.
    """
    act()
    wait_until(
        lambda: gc.collect() is not None and master.statistics().sessions == sessions,
        "the end of their sessions",
    )


def use_service(address: str) -> None:
    RpcService(address)


def use_server(address: str) -> None:
    RpcService(address).create_server("dropped", Plain())


def use_client(address: str) -> None:
    assert (
        RpcService(address)
        .create_client("test", timeout_s=PATIENCE_S)
        .call("echo", 1, timeout_s=PATIENCE_S)
        == 1
    )


def use_master_client_of_service(address: str) -> None:
    service = RpcService(address)
    service.master_client.watch_node(print)
    service.master_client.generate_id("key")


def use_master_client(address: str) -> None:
    MasterClient(address).generate_id("key")


@pytest.mark.parametrize(
    "use", [use_service, use_server, use_client, use_master_client_of_service, use_master_client]
)
def test_what_is_dropped_is_closed_and_says_so(master: Master, use: Callable[[str], None]) -> None:
    with RpcService(master.address) as other:
        other.create_server("test", Plain())
        before = master.statistics().sessions
        with pytest.warns(ResourceWarning, match=SAID):
            drop(lambda: use(master.address), master, before)


def test_a_master_that_is_dropped_is_closed_and_says_so() -> None:
    with pytest.warns(ResourceWarning, match=r"Master at .* was dropped without close\(\)"):
        Master()


def make_client(address: str) -> RpcClient:
    return RpcService(address).create_client("test", timeout_s=PATIENCE_S)


def make_server(address: str) -> RpcServer:
    return RpcService(address).create_server("kept", Plain())


def make_master_client(address: str) -> MasterClient:
    return RpcService(address).master_client


def test_a_service_lives_as_long_as_what_it_made_is_held(master: Master) -> None:
    with RpcService(master.address) as other:
        other.create_server("test", Plain())
        before = master.statistics().sessions
        client, server, master_client = (
            make_client(master.address),
            make_server(master.address),
            make_master_client(master.address),
        )
        gc.collect()
        assert client.call("echo", 1, timeout_s=PATIENCE_S) == 1
        assert (
            other.create_client("kept", timeout_s=PATIENCE_S).call("echo", 2, timeout_s=PATIENCE_S)
            == 2
        )
        assert master_client.generate_id("key") >= 0
        kept = [client, server, master_client]
        del client, server, master_client
        with pytest.warns(ResourceWarning, match=SAID):
            drop(kept.clear, master, before)


def test_what_was_closed_or_never_came_to_be_says_nothing(
    master: Master, recwarn: pytest.WarningsRecorder
) -> None:
    with RpcService(master.address), MasterClient(master.address), Master():
        pass
    for make in (
        lambda: RpcService("nowhere"),
        lambda: RpcService(master.address, secret="x" * 40, timeout_s=PATIENCE_S),
    ):
        with pytest.raises(Exception, match=r"nowhere|secret"):
            make()
    gc.collect()
    assert [str(one.message) for one in recwarn if one.category is ResourceWarning] == []


def test_the_end_of_the_interpreter_neither_waits_nor_complains(master: Master) -> None:
    program = (
        f"from prpc_engine import RpcService; service = RpcService({master.address!r}); "
        "service.create_client('x', 0)"
    )
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=ROOT,
        env=dict(os.environ),
        capture_output=True,
        timeout=PATIENCE_S,
    )
    assert (ran.returncode, ran.stderr) == (0, b"")

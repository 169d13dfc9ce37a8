"""Memory without room for segments: a named error at once or the way over tcp, never SIGBUS, and
the service works after it.

Each test runs a program whose segments have little memory; the last one a program with a small
/dev/shm, which bounds nothing.
"""

from __future__ import annotations

import pytest

from tests.shard.small_memory import end_with_memory
from tests.shard.small_shm import run_with_own_shm

BEGIN = """
import numpy as np
import prpc_engine, shard
from prpc_engine import Master, RpcService, errors

class Handlers:
    def echo(self, value):
        return value
    def last(self, array):
        return float(array.flat[-1])
    def grow(self, count):
        return np.ones(count)

def refused(act, *words):
    try:
        act()
    except errors.RpcError as error:
        assert isinstance(error, errors.ShmFull) and isinstance(error, shard.ShmFull), type(error)
        assert all(word in str(error) for word in words), str(error)
    else:
        raise AssertionError("no ShmFull")

MASTER = []

def run():
    with Master() as master, RpcService(master=master.address, transports=TRANSPORTS) as serving, \\
            RpcService(master=master.address, transports=TRANSPORTS) as service:
        MASTER.append(master.address)
        serving.create_server("test", Handlers())
        test(service, service.create_client("test"))
    print("all is well")
"""
END = """
if __name__ == "__main__":
    run()
"""


def run_with_small_memory(size_bytes: int, program: str, transports: list[str]) -> None:
    script = f"TRANSPORTS = {transports!r}\n{BEGIN}\n{program}\n{END}"
    returncode, output = end_with_memory(size_bytes, script)
    assert (returncode, output.splitlines()[-1:]) == (0, ["all is well"]), output


@pytest.mark.slow
def test_an_array_that_does_not_fit_goes_over_a_socket_and_only_empty_is_shm_full() -> None:
    program = """
def test(service, client):
    words = (
        "no memory for a segment of 80.0 MiB",
        "of the 24.0 MiB of a small machine",
        "PRPC_SLAB_BYTES_MAX",
    )
    refused(lambda: prpc_engine.empty((10_000_000,), np.float64), *words)
    assert client.call("last", np.ones(10_000_000)) == 1
    assert client.submit("last", np.full(10_000_000, 2.0)).result(60.0) == 2
    client.notify("last", np.ones(10_000_000))
    assert client.call("grow", 10_000_000).sum() == 10_000_000, "an answer, too"
    for _ in range(20):
        assert client.call("last", np.ones(100_000)) == 1
        assert client.call("echo", 1) == 1
"""
    run_with_small_memory(24 << 20, program, ["shm"])


def test_a_slab_that_fills_up_is_no_sigbus_and_takes_arrays_again_when_others_are_gone() -> None:
    program = """
def test(service, client):
    kept = []
    client.call("echo", 1)  # connected while there is room for rings
    def fill():
        while True:
            kept.append(prpc_engine.empty((250_000,), np.float32))
            kept[-1][:] = len(kept)
    refused(fill, "no memory for a segment")
    assert len(kept) > 4
    assert all(client.call("last", array) == number for number, array in enumerate(kept, 1))
    kept.clear()
    for _ in range(20):
        assert client.call("last", np.ones(250_000, np.float32)) == 1
"""
    run_with_small_memory(24 << 20, program, ["shm"])


def test_without_room_for_rings_the_peers_talk_over_tcp() -> None:
    program = """
def test(service, client):
    assert client.call("echo", "hello") == "hello"
    answer = client.call("last", np.ones(1_000_000))
    assert answer == 1, "a received block goes to ordinary memory then"
    (way,) = [text for text in service.transports.values() if "no memory" in text]
    assert way.startswith("tcp to "), way
"""
    run_with_small_memory(1 << 20, program, ["shm", "tcp"])


def test_without_room_for_rings_and_without_tcp_nothing_is_sent_and_the_reason_is_named() -> None:
    program = """
def test(service, client):
    try:
        client.call("echo", 1, timeout_s=1.0)
    # by whether the deadline meets an attempt
    except (errors.NotSent, errors.DeadlineExceeded) as error:
        assert "no memory for a segment" in str(error), str(error)
    else:
        raise AssertionError("it was sent")
"""
    run_with_small_memory(1 << 20, program, ["shm"])


def test_a_container_with_little_dev_shm_sends_arrays_of_any_size_over_shared_memory() -> None:
    program = """
def test(service, client):
    assert client.call("last", np.ones(10_000_000)) == 1
    assert client.call("grow", 10_000_000).sum() == 10_000_000
"""
    run_with_own_shm("size=1m", f"TRANSPORTS = ['shm']\n{BEGIN}\n{program}\n{END}")


def test_a_client_that_stops_reading_is_held_back_and_takes_nothing_from_the_others() -> None:
    """It was given 300 MB, and every other client's answers failed."""
    program = """
import os, signal, subprocess, sys, time

STOPPING = '''
import os, signal, sys
from prpc_engine import RpcService
with RpcService(sys.argv[1], transports=["shm"]) as service:
    client = service.create_client("test")
    assert client.call("echo", 1) == 1
    calls = [client.submit("grow", 1_000_000, timeout_s=None) for _ in range(100)]
    os.kill(os.getpid(), signal.SIGSTOP)
'''

def test(service, client):
    assert client.call("grow", 1_000_000).sum() == 1_000_000
    stopping = subprocess.Popen([sys.executable, "-c", STOPPING, MASTER[0]])
    try:
        os.waitid(os.P_PID, stopping.pid, os.WSTOPPED)
        for _ in range(30):
            assert client.call("grow", 1_000_000, timeout_s=30.0).sum() == 1_000_000
    finally:
        stopping.kill()
        stopping.wait()
"""
    run_with_small_memory(200 << 20, program, ["shm"])

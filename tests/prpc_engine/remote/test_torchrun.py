"""Workers that torchrun starts: env:// is its own store's address, and a worker may be started
again. torchrun is the real one, where torch is installed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prpc_engine import errors
from prpc_engine import remote as rpc
from prpc_engine.remote.rendezvous import parse
from tests.program import ROOT, UNTIL_S, wait_until

needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed"
)
OF_AGENT = {
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "RANK": "0",
    "WORLD_SIZE": "4",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


@contextlib.contextmanager
def torchrun(*arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Its agent, which ends its workers when it is asked to end."""
    agent = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--monitor-interval=0.05", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield agent
    finally:
        agent.terminate()
        agent.communicate(timeout=UNTIL_S)


def run(scenario: str, folder: Path, *arguments: str, **environment: str) -> dict[str, Any]:
    """What the workers have said, by rank, agent and generation."""
    there = "tests.prpc_engine.remote.torchrun_there"
    with torchrun(*arguments, "-m", there, scenario, str(folder), **environment) as agent:
        said, _ = agent.communicate(timeout=UNTIL_S)
    assert agent.returncode == 0, said
    return read(folder)


def read(folder: Path) -> dict[str, Any]:
    return {path.name: json.loads(path.read_text()) for path in folder.glob("*.*.*")}


def a_group_of(size: int, seen: list[Any]) -> bool:
    """Whether one worker has called all of them, each in a process of its own."""
    ranks, processes, known = zip(*seen, strict=True)
    names = [f"worker{rank}" for rank in range(size)]
    return (
        list(ranks) == list(range(size))
        and len(set(processes)) == size
        and all(each == names for each in known)
    )


@needs_torch
def test_env_works_under_torchrun_beside_torchs_own_and_again(tmp_path: Path) -> None:
    said = run("again", tmp_path, "--nproc-per-node=3")
    assert said.keys() == {"0.0.0", "1.0.0", "2.0.0"}
    for first, total, second in said.values():
        assert a_group_of(3, first) and a_group_of(3, second)
        assert total == [3]
        assert first == second == said["0.0.0"][0]  # the same processes


@needs_torch
def test_env_works_where_the_agent_keeps_its_store_to_itself(tmp_path: Path) -> None:
    """MASTER_PORT is free then, and the group's master is there."""
    said = run(
        "once", tmp_path, "--standalone", "--nproc-per-node=2",
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
    )  # fmt: skip
    assert a_group_of(2, said["0.0.0"]) and a_group_of(2, said["1.0.0"])


@needs_torch
@pytest.mark.parametrize("scenario", ["restart", "unanswered"])
def test_workers_that_are_started_again_meet_nothing_of_those_before(
    tmp_path: Path, scenario: str
) -> None:
    said = run(scenario, tmp_path, "--nproc-per-node=3", "--max-restarts=1")
    now = [said[f"{rank}.0.1"] for rank in range(3)]
    assert all(a_group_of(3, seen) for seen in now)
    if scenario == "restart":
        before = {process for _, process, _ in said["0.0.0"]}
        assert before.isdisjoint(process for _, process, _ in now[0])


@needs_torch
def test_agents_that_count_restarts_differently_form_one_group(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    two = (
        "--nnodes=2", "--nproc-per-node=1", "--max-restarts=1", "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=two", "--local-addr=127.0.0.1",
        "-m", "tests.prpc_engine.remote.torchrun_there", "of_two_agents", str(tmp_path),
    )  # fmt: skip
    with torchrun(*two) as first, torchrun(*two) as second:
        ended = [
            (agent.communicate(timeout=UNTIL_S)[0], agent.returncode) for agent in (first, second)
        ]
    assert [code for _, code in ended] == [0, 0], "\n".join(text for text, _ in ended)
    said = read(tmp_path)
    assert sorted(name.rpartition(".")[2] for name in said) == ["0", "1"]  # as they count
    assert all(a_group_of(2, seen) for seen in said.values())


def test_the_agents_store_says_the_port_of_the_master() -> None:
    of_two = parse("env://", None, None, {**OF_AGENT, "GROUP_WORLD_SIZE": "2"})
    assert (str(of_two.address), str(of_two.store)) == ("node0:0", "node0:29500")
    assert of_two.serves and "torchrun's store at node0:29500" in of_two.named
    of_one = parse("env://", 1, None, {**OF_AGENT, "GROUP_WORLD_SIZE": "1"})
    assert (str(of_one.address), of_one.serves) == ("127.0.0.1:0", False)
    own = parse("env://", None, None, {**OF_AGENT, "TORCHELASTIC_USE_AGENT_STORE": "False"})
    assert (str(own.address), own.store) == ("node0:29500", None)
    elsewhere = parse("tcp://node1:5", 0, 4, OF_AGENT)
    assert (str(elsewhere.address), elsewhere.store) == ("node1:5", None)


def test_under_torchrun_a_world_size_is_needed() -> None:
    environment = {name: value for name, value in OF_AGENT.items() if name != "WORLD_SIZE"}
    with pytest.raises(errors.ConfigError, match="under torchrun needs a world size"):
        parse("env://", None, None, environment)


def set_agent(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    for name, value in {**OF_AGENT, "GROUP_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))


@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="torch is installed")
def test_without_torch_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    set_agent(monkeypatch, 1)
    with pytest.raises(errors.ConfigError, match="needs torch for that; or pass another"):
        rpc.init_rpc("here")


@needs_torch
def test_ctrl_c_ends_the_wait_for_a_store_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    set_agent(monkeypatch, 1)
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        wait_until(lambda: "waiting for torchrun's store at 127.0.0.1:1," in caplog.text)
        signal.pthread_kill(main, signal.SIGINT)

    # ignored where the tests run in the background of a shell
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            rpc.init_rpc("here")
    finally:
        interrupter.join()
        signal.signal(signal.SIGINT, before)


@needs_torch
def test_a_store_that_is_not_there_and_a_rank_0_that_does_not_come_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch import distributed

    options = rpc.Options(init_timeout_s=0.2)
    set_agent(monkeypatch, 1)
    with pytest.raises(errors.MasterUnreachable, match=r"torchrun's store at 127\.0\.0\.1:1,"):
        rpc.init_rpc("here", options=options)
    # libuv would keep a pipe of the process
    store = distributed.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=False
    )
    set_agent(monkeypatch, store.port)
    with pytest.raises(errors.MasterUnreachable, match="rank 0 has not told torchrun's store"):
        rpc.init_rpc("here", 1, options=options)
    with pytest.raises(errors.DeadlineExceeded, match=r"'here' \(rank 0\)"):
        rpc.init_rpc("here", 0, options=options)

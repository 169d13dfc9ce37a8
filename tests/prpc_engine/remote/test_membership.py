"""Who is in the group: joining, waiting, leaving, dying; and workers of an allow list."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prpc_engine import Master, errors
from prpc_engine import remote as rpc
from prpc_engine.master.client import MasterClient
from prpc_engine.remote import worker
from shard import ForkedError
from tests.ports import address_of, hold_port
from tests.program import PATIENCE_S, Program, halt, wait_until
from tests.prpc_engine.remote import functions_there as there
from tests.prpc_engine.remote.conftest import Group


def test_all_that_are_in_the_group_are_known_when_init_returns(three: Group) -> None:
    assert rpc.get_worker_info() == rpc.WorkerInfo("here", 0)
    assert rpc.get_worker_info("elsewhere") == rpc.WorkerInfo("elsewhere", 2)
    assert rpc.get_worker_infos() == [("here", 0), ("there", 1), ("elsewhere", 2)]
    assert rpc.rpc_sync("there", rpc.get_worker_infos) == rpc.get_worker_infos()


def test_shutdown_waits_for_all_and_serves_meanwhile(three: Group) -> None:
    for name in ("there", "elsewhere"):
        three.programs[name].write_line("leave")
    assert rpc.rpc_sync("there", there.add, args=(1, 2)) == 3
    assert rpc.rpc_sync("there", there.add_elsewhere, args=("elsewhere", 1, 2, 3)) == 6
    rpc.shutdown()
    assert [three.programs[name].read_line() for name in ("there", "elsewhere")] == ["left"] * 2


def test_shutdown_waits_for_calls_that_are_under_way(pair: Group) -> None:
    answer = rpc.rpc_async("there", there.wait_for_event)
    pair.programs["there"].write_line("leave")
    leaving = threading.Thread(target=rpc.shutdown)
    leaving.start()
    rpc.rpc_sync("there", there.set_event)
    leaving.join(there.PATIENCE_S)
    assert answer.wait() is True
    assert pair.programs["there"].read_line() == "left"


def test_shutdown_waits_for_calls_that_functions_make_and_do_not_wait_for(
    three: Group, tmp_path: Path
) -> None:
    """One function calls the next, thirty in a row, of which nobody but the last says a word."""
    told = tmp_path / "told"
    ways = ["elsewhere", "here", "there"] * 10
    rpc.rpc_async("there", there.relay, args=(str(told), ways))
    for name in ("there", "elsewhere"):
        three.programs[name].write_line("leave")
    rpc.shutdown()
    assert told.read_text() == "passed on"
    assert [three.programs[name].read_line() for name in ("there", "elsewhere")] == ["left"] * 2


@pytest.mark.slow
def test_shutdown_keeps_its_time_though_a_function_blocks_in_this_worker(pair: Group) -> None:
    there.clear_event()
    there.have_waited.clear()
    ended: list[BaseException] = []

    def leave() -> None:
        try:
            rpc.shutdown(timeout=1.0)
        except errors.DeadlineExceeded as error:
            ended.append(error)

    leaving = threading.Thread(target=leave)
    leaving.start()
    while leaving.is_alive():  # some of them come while it waits
        rpc.rpc_sync("there", there.begin_to_wait, args=("here",))
        leaving.join(0.05)
    assert len(ended) == 1
    assert not there.have_waited
    there.set_event()
    pair.programs["there"].write_line("leave")
    rpc.shutdown()
    assert pair.programs["there"].read_line() == "left"


def test_shutdown_in_a_function_is_refused_as_it_would_wait_for_itself(pair: Group) -> None:
    with pytest.raises(errors.ConfigError, match="'there' in a function that a worker called"):
        rpc.rpc_sync("there", rpc.shutdown)
    assert rpc.rpc_sync("there", there.add, args=(1, 2)) == 3
    pair.programs["there"].write_line("leave")
    rpc.shutdown()
    assert pair.programs["there"].read_line() == "left"


def test_a_function_goes_on_after_its_callers_time_and_shutdown_waits_for_it(pair: Group) -> None:
    with pytest.raises(errors.DeadlineExceeded):
        rpc.rpc_sync("there", there.wait_for_event, timeout=0.5)
    pair.programs["there"].write_line("leave")
    with pytest.raises(errors.DeadlineExceeded, match=r"shutdown\(\) of 'here' .*: .*'there'"):
        rpc.shutdown(timeout=0.2)
    rpc.rpc_sync("there", there.set_event)
    rpc.shutdown()
    assert pair.programs["there"].read_line() == "left"


def test_rank_0_of_a_group_without_a_size_waits_for_no_others_to_leave(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others of such a group do not leave with it: it would wait for all of that time."""
    monkeypatch.setattr(worker, "LEFT_S", 200.0)
    group.join("there", size=None)
    rpc.shutdown()
    with pytest.raises(rpc.NoWorker):
        rpc.get_worker_info()
    group.programs["there"].kill()


def test_shutdown_waits_for_none_that_has_died(three: Group) -> None:
    three.programs["there"].kill()
    three.programs["elsewhere"].write_line("leave")
    rpc.shutdown()
    assert three.programs["elsewhere"].read_line() == "left"


@pytest.mark.slow  # rank 0 has 15 s to answer
def test_without_rank_0_a_worker_that_is_not_known_is_refused_in_time_and_shutdown_ends(
    group: Group, caplog: pytest.LogCaptureFixture
) -> None:
    """It has the group's master, which nobody starts again."""
    for rank, name in enumerate(("there", "elsewhere")):
        group.start(name, rank, 3)
    rpc.init_rpc("here", 2, 3, group.init_method)
    for program in group.programs.values():
        assert program.read_line() == "up"
    group.programs["there"].kill()
    with pytest.raises(
        rpc.UnknownWorker, match=r"has not said within 0\.2 s whether it has joined"
    ):
        rpc.rpc_sync("nobody", there.here, timeout=0.2)
    assert rpc.rpc_sync("elsewhere", there.here) == "elsewhere"
    group.programs["elsewhere"].write_line("leave")
    rpc.shutdown()
    assert group.programs["elsewhere"].read_line() == "left"
    assert "counts as dead: leaving without waiting" in caplog.text


def test_shutdown_that_is_over_before_rank_0_counts_as_dead_says_that_it_does_not_answer(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "MASTER_LOOK_S", 0.1)
    group.start("there", 0, 2)
    rpc.init_rpc("here", 1, 2, group.init_method)
    assert group.programs["there"].read_line() == "up"
    group.programs["there"].kill()
    with pytest.raises(RuntimeError, match="rank 0, which has the group's master") as caught:
        rpc.shutdown(timeout=1.0)
    assert isinstance(caught.value, errors.DeadlineExceeded)
    assert "--journal" not in str(caught.value)  # nobody starts that master again
    rpc.shutdown(graceful=False)


@pytest.mark.slow  # longer than a rank 0 that has died is waited for
def test_a_rank_0_that_stands_still_for_less_than_its_lease_is_waited_for(group: Group) -> None:
    group.start("first", 0, 2, lease_s=300.0)
    rpc.init_rpc("here", 1, 2, group.init_method, rpc.Options(lease_s=300.0))
    first = group.programs["first"]
    assert first.read_line() == "up"
    halt(first.process.pid)
    leaving = threading.Thread(target=rpc.shutdown)
    leaving.start()
    leaving.join(worker.MASTER_GONE_S + 5.0)
    assert leaving.is_alive()
    first.process.send_signal(signal.SIGCONT)
    first.write_line("leave")
    leaving.join(there.PATIENCE_S)
    assert not leaving.is_alive()
    assert first.read_line() == "left"


def test_shutdown_that_takes_too_long_names_who_is_missing(pair: Group) -> None:
    with pytest.raises(errors.DeadlineExceeded, match="'there' have not called it"):
        rpc.shutdown(timeout=0.05)
    assert rpc.rpc_sync("there", there.add, args=(1, 2)) == 3
    rpc.shutdown(graceful=False)


def test_several_threads_may_call_shutdown(pair: Group) -> None:
    ended: list[BaseException | None] = []

    def leave() -> None:
        try:
            rpc.shutdown()
        except BaseException as error:
            ended.append(error)
        else:
            ended.append(None)

    threads = [threading.Thread(target=leave) for _ in range(4)]
    for thread in threads:
        thread.start()
    pair.programs["there"].write_line("leave")
    for thread in threads:
        thread.join(there.PATIENCE_S)
    assert ended == [None] * 4
    assert pair.programs["there"].read_line() == "left"


def test_a_group_can_be_made_again_in_the_same_process(group: Group) -> None:
    for name in ("first", "second"):
        group.join(name)
        assert rpc.rpc_sync(name, there.here) == name
        group.programs[name].write_line("leave")
        rpc.shutdown()
        assert group.programs[name].read_line() == "left"
    rpc.shutdown()  # again: does nothing


@pytest.fixture
def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.mark.parametrize("scheme", ["tcp", "file"])
def test_groups_are_made_one_after_another_at_one_place(
    tmp_path: Path, free_port: str, scheme: str
) -> None:
    """Who has left a group is back before rank 0 has ended it."""
    method = f"tcp://127.0.0.1:{free_port}" if scheme == "tcp" else f"file://{tmp_path}/meet"
    module = "tests.prpc_engine.remote.rounds_there"
    with contextlib.ExitStack() as stack:
        programs = [
            stack.enter_context(Program(module, str(rank), "3", method, "12")) for rank in range(3)
        ]
        assert [program.read_line() for program in programs] == ["groups 12"] * 3


def test_who_comes_to_a_group_that_is_complete_is_told_so(group: Group, free_port: str) -> None:
    method = f"tcp://127.0.0.1:{free_port}"
    for rank in range(2):
        group.start(f"worker{rank}", rank, 2, method)
    for program in group.programs.values():
        assert program.read_line() == "up"
    # the deadline finds it asking for the node, connecting again, or in between
    for init_timeout_s in np.linspace(0.1, 0.15, 20):
        with pytest.raises(errors.MasterUnreachable, match="is complete: all of its workers"):
            rpc.init_rpc("here", 1, 2, method, rpc.Options(init_timeout_s=init_timeout_s))
    with pytest.raises(rpc.NoWorker):
        rpc.get_worker_info()


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_an_ipv6_address_of_env_needs_no_brackets(
    group: Group, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    with socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        port = probe.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", host)
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setenv("WORLD_SIZE", "2")
    group.start("there", 1, None, "env://")
    rpc.init_rpc("here", rank=0)
    assert rpc.rpc_sync("there", there.here) == "there"


@pytest.mark.parametrize("size", [2, None])
def test_the_file_is_gone_when_all_have_come_and_stays_where_more_may(
    group: Group, size: int | None
) -> None:
    """One that leaves and joins again must not find the group that is ending."""
    meet = Path(group.init_method.removeprefix("file://"))
    group.join("there", size=size)
    assert meet.exists() == (size is None)
    group.programs["there"].write_line("leave")
    assert size is None or meet.write_text("of another group")
    rpc.shutdown()
    assert meet.exists() == (size is not None)


def test_workers_come_and_go_where_there_is_no_world_size(group: Group) -> None:
    group.join(size=None)
    for round_number in range(2):
        program = group.start(f"late{round_number}", 7, None)
        assert program.read_line() == "up"
        assert rpc.rpc_sync(f"late{round_number}", there.here) == f"late{round_number}"
        assert rpc.get_worker_infos()[-1] == (f"late{round_number}", 7)
        program.write_line("leave")
        assert program.read_line() == "left"
        wait_until(lambda: len(rpc.get_worker_infos()) == 1)
        with pytest.raises(rpc.UnknownWorker, match="has left or died"):
            rpc.rpc_sync(f"late{round_number}", there.here)
    rpc.shutdown()


def test_a_worker_that_dies_is_named_in_the_log_and_one_that_leaves_is_not(
    group: Group, caplog: pytest.LogCaptureFixture
) -> None:
    group.join("dies", "leaves", size=None)
    group.programs["leaves"].write_line("leave")
    assert group.programs["leaves"].read_line() == "left"
    group.programs["dies"].kill()
    wait_until(lambda: "'dies' (rank 1) has left the group without" in caplog.text)
    assert len(rpc.get_worker_infos()) == 1  # members.py removes it, then logs
    assert "'leaves'" not in caplog.text


def test_a_running_master_gives_ranks_and_outlives_each_worker(group: Group) -> None:
    with Master() as master:
        method = f"prpc://{master.address}/jobs"
        rpc.init_rpc("here", init_method=method)
        assert rpc.get_worker_info() == ("here", 0)
        program = group.start("there", None, None, method)
        assert program.read_line() == "up"
        assert rpc.rpc_sync("there", there.here) == "there"
        assert rpc.get_worker_info("there").id == 1
        rpc.shutdown()
        rpc.init_rpc("again", init_method=method)
        assert rpc.rpc_sync("there", there.here) == "there"
        rpc.shutdown()


def test_env_is_the_default_rendezvous(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setenv("WORLD_SIZE", "2")
    group.start("there", 1, None, "env://")
    rpc.init_rpc("here", rank=0)
    assert rpc.rpc_sync("there", there.here) == "there"


@pytest.mark.parametrize(
    ("name", "rank", "text"),
    [("there", 2, "has a worker named 'there' already"), ("other", 1, "rank 1 .* is taken")],
)
def test_names_and_ranks_are_unique(group: Group, name: str, rank: int, text: str) -> None:
    with Master() as master:
        method = f"prpc://{master.address}"
        program = group.start("there", 1, None, method)
        assert program.read_line() == "up"
        with pytest.raises(errors.ConfigError, match=text):
            rpc.init_rpc(name, rank, init_method=method)
        with pytest.raises(rpc.NoWorker):
            rpc.get_worker_info()
        group.programs["there"].kill()


def test_who_does_not_come_is_missed_by_name(tmp_path: Path) -> None:
    options = rpc.Options(init_timeout_s=0.2)
    with pytest.raises(errors.DeadlineExceeded, match=r"'here' \(rank 0\)"):
        rpc.init_rpc("here", 0, 2, f"file://{tmp_path / 'meet'}", options)
    assert not os.listdir(tmp_path)
    with pytest.raises(errors.MasterUnreachable, match="rank 0 has not written"):
        rpc.init_rpc("here", 1, 2, f"file://{tmp_path / 'meet'}", options)
    with pytest.raises(errors.MasterUnreachable, match=r"127\.0\.0\.1:1"):
        rpc.init_rpc("here", 1, 2, "tcp://127.0.0.1:1", options)


def test_two_ranks_0_of_one_file_hear_of_each_other(tmp_path: Path) -> None:
    meet, other = tmp_path / "meet", "127.0.0.1:1"
    meet.write_text(other)
    with pytest.raises(errors.DeadlineExceeded, match=r"meet was there before: .* another rank 0"):
        rpc.init_rpc("here", 0, 2, f"file://{meet}", rpc.Options(init_timeout_s=0.2))
    assert not meet.exists()

    def come() -> None:
        wait_until(meet.exists, "the first rank 0")
        meet.write_text(other)

    second = threading.Thread(target=come)
    second.start()
    with pytest.raises(errors.DeadlineExceeded, match="meet was written by another rank 0, or"):
        rpc.init_rpc("here", 0, 2, f"file://{meet}", rpc.Options(init_timeout_s=1.0))
    second.join()
    assert meet.read_text() == other


@pytest.mark.slow  # rank 0 gives up after 3 s
def test_who_comes_late_hears_who_has_come_and_that_rank_0_has_given_up(group: Group) -> None:
    group.start("there", 0, 3, init_timeout_s=3.0)
    wait_until(lambda: os.path.exists(group.init_method.removeprefix("file://")), "rank 0")
    text = (
        r"1 of 3 workers are in .*: 'here' \(rank 1\); came and left: 'there' \(rank 0\); waited "
        "for .* rank 0 has given up, or died"
    )
    with pytest.raises(errors.DeadlineExceeded, match=text):
        rpc.init_rpc("here", 1, 3, group.init_method, rpc.Options(init_timeout_s=5.0))
    group.programs["there"].kill()


def test_another_world_size_is_told_as_that() -> None:
    with Master() as master, MasterClient(master.address) as other:
        other.submit("barrier", "prpc.remote.init", 2, "'there' (rank 1)", [])
        other.count_up("after it")
        with pytest.raises(errors.ConfigError, match=r"the world_size 3 of 'here' \(rank 0\)"):
            rpc.init_rpc("here", 0, 3, f"prpc://{master.address}")


@pytest.mark.slow  # rank 0 gives up after 5 s
def test_rank_0_hears_of_who_came_with_another_world_size_and_left(group: Group) -> None:
    text = (
        r"1 of 3 workers are in .*: 'here' \(rank 0\); came and left: 'there' \(rank 1\); not with "
        r"the world_size 3 came 'there' with 4; waited for .*\. Give all workers of a group the "
        "same world_size$"
    )
    with Master() as master, MasterClient(master.address) as other, ThreadPoolExecutor(1) as pool:
        method, options = f"prpc://{master.address}", rpc.Options(init_timeout_s=5.0)
        other.submit("barrier", "prpc.remote.init", 3, "a third", [])
        here = pool.submit(rpc.init_rpc, "here", 0, 3, method, options)
        other.tree_wait("/_remote_/here", there.PATIENCE_S)
        group.start("there", 1, 4, method)
        with pytest.raises(errors.DeadlineExceeded, match=text):
            here.result(there.PATIENCE_S)
        group.programs["there"].kill()


@pytest.mark.slow  # a file is read again after 3 s
def test_a_file_that_a_killed_rank_0_has_left_is_read_again(group: Group) -> None:
    with socket.create_server(("127.0.0.1", 0)) as old:
        meet = Path(group.init_method.removeprefix("file://"))
        meet.write_text(f"127.0.0.1:{old.getsockname()[1]}")
        there = group.start("there", 1, 2)
        old.accept()[0].close()
    rpc.init_rpc("here", 0, 2, group.init_method)
    assert there.read_line() == "up"


@pytest.mark.parametrize("data", [b"\xff\xfe", b"hello world"])
def test_a_file_without_an_address_is_named(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "meet").write_bytes(data)
    with pytest.raises(errors.ConfigError, match=rf"{tmp_path}/meet has no address in it"):
        rpc.init_rpc("here", 1, 2, f"file://{tmp_path / 'meet'}")


def test_a_fifo_in_place_of_the_file_is_not_waited_for(fifo: str) -> None:
    with pytest.raises(errors.MasterUnreachable, match="rank 0 has not written"):
        rpc.init_rpc("here", 1, 2, f"file://{fifo}", rpc.Options(init_timeout_s=0.2))


def test_a_port_of_the_environment_that_is_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "junk")
    with pytest.raises(errors.ConfigError, match="MASTER_ADDR:MASTER_PORT of the environment"):
        rpc.init_rpc("here", 0, 1)


def test_numpys_integers_are_ranks(tmp_path: Path) -> None:
    rpc.init_rpc("here", np.int64(0), np.int32(1), f"file://{tmp_path / 'meet'}")  # type: ignore[arg-type]
    assert rpc.get_worker_info().id == 0
    rpc.shutdown()


def test_a_fork_of_a_worker_is_told_so(pair: Group) -> None:
    child = os.fork()
    if not child:
        try:
            rpc.init_rpc("other", 5, None, pair.init_method)
        except ForkedError as error:
            os._exit(0 if "forked from worker 'here'" in str(error) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("name", ["", "x" * 300])
def test_names_that_no_worker_can_have_are_of_none(pair: Group, name: str) -> None:
    with pytest.raises(rpc.UnknownWorker, match="no worker has the name"):
        rpc.rpc_sync(name, there.here)


def test_a_file_that_cannot_be_one_is_told_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for path, said in (
        (folder, "Is a directory; init_method=file:///path names a file"),
        (tmp_path / "none" / "meet", "No such file or directory"),
    ):
        with pytest.raises(errors.ConfigError, match=f"rank 0 cannot write {path}.*{said}"):
            rpc.init_rpc("here", 0, 1, f"file://{path}")
    with pytest.raises(errors.ConfigError, match=f"{folder}, which rank 0 writes, cannot be read"):
        rpc.init_rpc("here", 1, 2, f"file://{folder}")
    assert list(tmp_path.rglob("*")) == [folder]


def test_a_worker_is_asked_for_by_its_name(pair: Group) -> None:
    for number in (1, 5):
        with pytest.raises(errors.ConfigError, match=f"worker_name={number}: .*there are 'here'"):
            rpc.get_worker_info(number)  # type: ignore[arg-type]


def test_a_port_that_is_taken_is_told_with_what_to_try() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(errors.AddressInUse, match="pass another init_method"):
            rpc.init_rpc("here", 0, 1, f"tcp://127.0.0.1:{taken.getsockname()[1]}")


def test_a_process_is_one_worker_at_a_time(pair: Group) -> None:
    with pytest.raises(errors.ConfigError, match="is worker 'here' already"):
        rpc.init_rpc("other", 5, None, pair.init_method)


@pytest.mark.parametrize("name", ["", "a b", "x" * 128, "näme", None, 5])
def test_names_are_torchs(tmp_path: Path, name: Any) -> None:
    with pytest.raises(errors.ConfigError, match="worker name"):
        rpc.init_rpc(name, 0, 1, f"file://{tmp_path / 'meet'}")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_worker_threads": 0}, "num_worker_threads=0"),
        ({"rpc_timeout": -1.0}, "rpc_timeout=-1.0"),
        ({"device_maps": {"there": {0: 1, 1: 1}}}, "both go to its cuda:1"),
        ({"lease_s": 0.0}, "lease_s=0.0: 0.1 to 3600 seconds"),
        ({"lease_s": -1}, "lease_s=-1: 0.1 to 3600 seconds"),
        ({"only_exposed": "no"}, "only_exposed='no': True or False"),
        ({"share_devices": 1}, "share_devices=1: True or False"),
    ],
)
def test_options_that_make_no_sense_are_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(errors.ConfigError, match=text):
        rpc.Options(**options)


def test_torchs_names_and_arguments_are_taken(tmp_path: Path) -> None:
    rpc.init_rpc(
        name="here",
        backend=rpc.BackendType.TENSORPIPE,
        rank=0,
        world_size=1,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
            num_worker_threads=8, rpc_timeout=20, init_method=f"file://{tmp_path / 'meet'}"
        ),
    )
    assert rpc.rpc_sync("here", there.add, args=(1, 2)) == 3
    rpc.shutdown()
    with pytest.raises(errors.ConfigError, match="options="):
        rpc.init_rpc("here", 0, 1, options={"rpc_timeout": 3})  # type: ignore[arg-type]


def test_a_worker_of_an_allow_list_serves_what_is_exposed_and_unpickles_nothing(
    group: Group,
) -> None:
    group.join("there", only_exposed=True)
    array = np.arange(10)
    np.testing.assert_array_equal(rpc.rpc_sync("there", there.allowed, args=(array,)), array)
    with pytest.raises(errors.NotAllowed, match=r"add' is not exposed.*allowed"):
        rpc.rpc_sync("there", there.add, args=(1, 2))
    with pytest.raises(errors.RpcError):
        rpc.rpc_sync("there", lambda: 1)
    with pytest.raises(errors.BadArguments):
        rpc.rpc_sync("there", there.allowed, args=(there.Model(1),))
    with pytest.raises(errors.NotAllowed):
        rpc.rpc_sync("there", os.system, args=("true",))
    rref = rpc.remote("there", there.Counter)
    assert rref.rpc_sync().up(2) == 2
    assert rref.rpc_sync().up(by=3) == 5
    methods = rref.rpc_sync()
    for hidden in ("_hidden", "__sizeof"):
        with pytest.raises(errors.NotAllowed, match=rf"Counter\.{hidden}"):
            getattr(methods, hidden)()
    with pytest.raises(ZeroDivisionError, match="as told"):
        rref.rpc_sync().fail()
    with pytest.raises(errors.NotAllowed):
        rpc.remote("there", there.Model, args=(1,)).to_here()


@pytest.mark.parametrize("way", ["rpc_sync", "rpc_async", "remote"])
def test_only_what_exposed_classes_define_is_served_of_their_objects(
    group: Group, way: str
) -> None:
    """The methods, by each way to them, and nothing else that an object can be asked for."""
    group.join("there", only_exposed=True)

    def call(rref: rpc.RRef[Any], name: str, *args: Any) -> Any:
        answer = getattr(getattr(rref, way)(), name)(*args)
        if isinstance(answer, rpc.RRef):
            return answer.to_here()
        return answer.wait() if isinstance(answer, rpc.Future) else answer

    model = rpc.remote("there", there.Served)
    for name in ("plain", "later", "static", "cached"):
        assert call(model, name, 3) == 3
    assert call(model, "of_class") == "Served"
    assert call(model, "of_base") == "base"
    assert call(model, "marked") == "marked"
    assert call(model, "wrapping") == "wrapper"
    with pytest.raises(TypeError, match="yields its results"):
        call(model, "many")
    refused = {name for name in vars(there.Served) if name.startswith(("runs", "Nested"))}
    assert len(refused) == 7
    refused |= {"runs", "runs_bound", "shadowed", "inherited", "replaced", "nowhere", "__call__"}
    for name in sorted(refused):
        with pytest.raises(errors.NotAllowed, match=rf"Served\.{name} is not exposed"):
            call(model, name)
    for kind in ("deeper", "imitation", "holder"):
        rref = rpc.remote("there", there.made, args=(kind,))
        for name in ("of_base", "plain", "method", "__call__"):
            with pytest.raises(errors.NotAllowed, match=rf"\.{name} is not exposed"):
                call(rref, name)


@pytest.mark.parametrize(
    "function",
    [
        functools.partial(there.allowed, 1),
        there.Counter().up,
        there.Holder(),
        there.Served.of_class,
        there.Served.static,
        there.around_allowed,
        there.Unexposed.inherited,
        lambda: 1,
    ],
)
def test_no_function_but_one_that_is_exposed_gets_to_run_in_a_worker_of_an_allow_list(
    group: Group, function: Any
) -> None:
    group.join("there", only_exposed=True)
    for call in (
        lambda: rpc.rpc_sync("there", function),
        lambda: rpc.rpc_async("there", function).wait(),
        lambda: rpc.remote("there", function).to_here(),
    ):
        with pytest.raises((errors.NotAllowed, errors.BadArguments)):
            call()


def test_what_an_exposed_function_returned_is_not_sent_unless_the_archive_takes_it(
    group: Group,
) -> None:
    group.join("there", only_exposed=True)
    for kind in ("deeper", "holder"):
        with pytest.raises(errors.RpcError):
            rpc.remote("there", there.made, args=(kind,)).to_here()
        with pytest.raises(errors.RpcError):
            rpc.rpc_sync("there", there.made, args=(kind,))


def test_what_is_no_function_cannot_be_exposed() -> None:
    with pytest.raises(errors.ConfigError, match="expose"):
        rpc.expose(5)  # type: ignore[type-var]


def test_a_program_that_ends_without_shutdown_is_missed_at_once(group: Group) -> None:
    group.join("there", size=None)
    assert rpc.rpc_sync("there", there.here) == "there"
    rpc.rpc_sync("there", _end_soon)
    wait_until(lambda: len(rpc.get_worker_infos()) == 1)
    group.programs["there"].kill()


def _end_soon() -> None:
    threading.Timer(0.01, lambda: os.kill(os.getpid(), 15)).start()


def test_a_worker_that_was_silent_for_longer_than_its_lease_joins_again_as_the_same(
    group: Group,
) -> None:
    group.join("there", size=None, lease_s=0.3)
    rref = rpc.remote("there", there.Model, args=(3,))
    assert rref.rpc_sync().times(2) == 6
    halt(group.programs["there"].pid)
    wait_until(lambda: len(rpc.get_worker_infos()) == 1)
    group.programs["there"].process.send_signal(signal.SIGCONT)
    wait_until(lambda: len(rpc.get_worker_infos()) == 2)
    assert rpc.rpc_sync("there", there.here) == "there"
    assert rref.rpc_sync().times(3) == 9
    assert rpc.remote("there", there.add, args=(1, 2)).to_here() == 3


def test_workers_of_a_master_that_begins_anew_without_a_journal_join_again(group: Group) -> None:
    with hold_port() as port:
        method = f"prpc://{address_of(port)}"
        with Master(address_of(port)):
            rpc.init_rpc("here", init_method=method)
            assert group.start("there", None, None, method).read_line() == "up"
            rref = rpc.remote("there", there.Model, args=(3,))
            assert rref.rpc_sync().times(2) == 6
        with Master(address_of(port)) as master, MasterClient(master.address) as client:
            for name in ("here", "there"):
                client.tree_wait(f"/_remote_/{name}", PATIENCE_S)
            wait_until(lambda: len(rpc.get_worker_infos()) == 2)
            assert rref.rpc_sync().times(3) == 9
            assert group.start("late", None, None, method).read_line() == "up"
            assert rpc.rpc_sync("late", there.here) == "late"
            rpc.shutdown()


@pytest.mark.slow
def test_32_processes_join_and_call_each_other(group: Group) -> None:
    names = [f"worker{number}" for number in range(1, 32)]
    group.join(*names)
    futures = [rpc.rpc_async(name, _call_next, args=(names,)) for name in names]
    assert rpc.wait_all(futures) == [names[(at + 1) % 31] for at in range(31)]
    for name in names:
        group.programs[name].write_line("leave")
    rpc.shutdown()
    assert [group.programs[name].read_line() for name in names] == ["left"] * 31


def _call_next(names: list[str]) -> str:
    at = names.index(rpc.get_worker_info().name)
    return str(rpc.rpc_sync(names[(at + 1) % len(names)], there.here))

"""Who gets which core, and when there are too few."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from shard.group import cpu
from shard.group.topology import Core, Topology

ROOT = Path(__file__).parents[2]
PATIENCE_S = 30.0


def machine(nodes: int, cores: int, threads: int, quota: float | None = None) -> Topology:
    """`nodes` x `cores` physical cores x `threads`; the first threads are numbered through before
    the second ones.
    """
    physical = nodes * cores
    return Topology(
        tuple(
            Core(
                number,
                number % physical // cores,
                tuple(range(number % physical, physical * threads, physical)),
            )
            for number in range(physical * threads)
        ),
        quota,
    )


# -- placing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("cores", [1, 2, 4])
def test_on_a_plain_machine_the_last_core_comes_first_and_the_applications_last(cores: int) -> None:
    assert cpu.placing_order(machine(1, cores, 1)) == list(range(cores))[::-1]


def test_physical_cores_come_before_hyper_threads_and_the_applications_own_last() -> None:
    assert cpu.placing_order(machine(1, 4, 2)) == [3, 2, 1, 7, 6, 5, 4, 0]


def test_the_applications_node_is_filled_before_the_next_one() -> None:
    order = cpu.placing_order(machine(2, 4, 2))
    assert order[:7] == [3, 2, 1, 7, 6, 5, 4]  # physical cores of node 0, then of node 1
    # their second threads; the application's sibling; the application
    assert order[7:] == [11, 10, 9, 15, 14, 13, 12, 8, 0]


def test_threads_numbered_side_by_side_are_told_apart_as_well() -> None:
    siblings = [(0, 1), (0, 1), (2, 3), (2, 3), (4, 5), (4, 5)]
    order = cpu.placing_order(
        Topology(tuple(Core(number, 0, both) for number, both in enumerate(siblings)), None)
    )
    assert order == [4, 2, 5, 3, 1, 0]


def test_the_application_keeps_the_first_core_that_it_may_use_wherever_that_is() -> None:
    order = cpu.placing_order(
        Topology((Core(5, 1, (5,)), Core(6, 1, (6,)), Core(9, 0, (9,))), None)
    )
    assert order == [6, 9, 5]


def test_more_shards_than_cores_take_turns() -> None:
    assert [cpu.place(count, machine(1, 2, 1)) for count in range(6)] == [
        [],
        [1],
        [1, 0],
        [1, 0, 1],
        [1, 0, 1, 0],
        [1, 0, 1, 0, 1],
    ]


def test_on_this_machine_shards_are_placed_on_usable_cores_and_on_each_once() -> None:
    usable = cpu.usable_cores()
    assert sorted(cpu.place(len(cpu.topology().cores))) == [
        core.number for core in cpu.topology().cores
    ]
    assert set(cpu.place(3)) <= set(usable)


def test_what_taskset_leaves_is_what_there_is() -> None:
    core = cpu.usable_cores()[-1]
    program = (
        "from shard.group import cpu\nprint(cpu.usable_cores(), cpu.place(2), cpu.auto_shards())"
    )
    ran = subprocess.run(
        [
            sys.executable,
            "-W",
            "error",
            "-c",
            f"import os; os.sched_setaffinity(0, {{{core}}})\n{program}",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ran.stdout == f"[{core}] [{core}, {core}] 1\n", ran.stderr


# -- how many --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("there_is", "shards"),
    [
        (machine(1, 1, 1), 1),
        (machine(1, 2, 1), 1),
        (machine(1, 2, 2), 1),
        (machine(1, 8, 1), 7),
        (machine(2, 4, 2), 7),
        (machine(2, 4, 2, quota=4.0), 3),
        (machine(2, 4, 2, quota=2.9), 1),
        (machine(2, 4, 2, quota=0.5), 1),
        (machine(1, 4, 1, quota=64.0), 3),
    ],
)
def test_auto_is_a_shard_for_each_physical_core_that_the_quota_feeds_less_the_applications(
    there_is: Topology, shards: int
) -> None:
    assert cpu.auto_shards(there_is) == shards


def test_as_many_that_poll_as_there_are_cores_need_no_warning() -> None:
    assert cpu.oversubscribed(2, machine(1, 2, 1)) is None
    assert cpu.oversubscribed(8, machine(2, 2, 2, quota=8.0)) is None


@pytest.mark.parametrize(
    ("pollers", "there_is", "words"),
    [
        (3, machine(1, 2, 1), ["3 busy-polling processes", "2 usable cores", "at most 2"]),
        (
            3,
            machine(1, 8, 1, quota=2.5),
            ["3 busy-polling processes", "CPU quota of 2.5 cores", "at most 2"],
        ),
        (
            1,
            machine(1, 8, 1, quota=0.5),
            ["1 busy-polling processes", "CPU quota of 0.5 cores", "polling off"],
        ),
        (3, machine(1, 2, 1, quota=4.0), ["3 busy-polling processes", "2 usable cores"]),
    ],
)
def test_more_that_poll_than_can_run_is_told_with_both_numbers_and_what_to_do(
    pollers: int, there_is: Topology, words: list[str]
) -> None:
    text = cpu.oversubscribed(pollers, there_is)
    assert text is not None
    assert all(word in text for word in words), text


# -- pinning ---------------------------------------------------------------------------------------


def test_pinning_is_for_the_calling_thread_alone_and_can_be_undone() -> None:
    core = cpu.usable_cores()[-1]
    seen: dict[str, set[int]] = {}

    def pinned() -> None:
        before = cpu.pin(core)
        seen["pinned"] = os.sched_getaffinity(0)
        cpu.restore(before)
        seen["restored"] = os.sched_getaffinity(0)

    here = os.sched_getaffinity(0)
    thread = threading.Thread(target=pinned)
    thread.start()
    thread.join()
    assert seen == {"pinned": {core}, "restored": here}
    assert os.sched_getaffinity(0) == here


@pytest.mark.parametrize("core", [1 << 20, -1, 1 << 70, "0"])
def test_a_core_that_is_not_ours_is_named_with_those_that_are(core: int) -> None:
    with pytest.raises(ValueError, match="is not among the cores this process may use") as caught:
        cpu.pin(core)
    assert str(cpu.usable_cores()) in str(caught.value)


# -- memory ----------------------------------------------------------------------------------------

# node 0 is everywhere, node 1023 hardly anywhere
TWO_NODES = Topology((Core(0, 0, (0,)), Core(1, 1023, (1,))), None)


def policy_of_new_memory(core: int) -> str:
    """What bind_memory(core) answers on TWO_NODES, and the kernel's word for the policy then, in a
    process of its own.
    """
    program = f"""
from shard.group import cpu
from shard.group.topology import Core, Topology
done = cpu.bind_memory({core}, {TWO_NODES!r})
print(done, open("/proc/self/numa_maps").readline().split()[1])
"""
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


@pytest.mark.skipif(
    platform.machine() != "x86_64" or not Path("/proc/self/numa_maps").exists(),
    reason="this kernel knows no NUMA policies",
)
def test_memory_is_preferred_on_the_cores_own_node() -> None:
    assert policy_of_new_memory(0) == "True prefer:0"


@pytest.mark.skipif(
    not Path("/proc/self/numa_maps").exists(), reason="this kernel knows no NUMA policies"
)
def test_a_node_that_the_kernel_refuses_changes_nothing() -> None:
    assert policy_of_new_memory(1) == "False default"


def test_on_one_node_and_for_a_core_that_is_not_ours_nothing_is_done() -> None:
    assert not cpu.bind_memory(0, machine(1, 4, 2))
    assert not cpu.bind_memory(77, TWO_NODES)

"""Tests that reach for what is private in another object, or put something else in its place, pin
the inside of it: how many such places each file has, which only falls.

A place of the first kind is a name with one underscore that is taken from anything but self, cls or
super(), or that setattr (also pytest's) names. Names of Python and of libraries are none of ours.
A place of the second kind is a call of setattr, delattr, setitem or delitem of pytest's
MonkeyPatch, whatever the test calls it. Environment variables and the working directory do not
count.

    python -m tests.habits.test_private_names    both tables, as they would be now
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

import pytest

from tests.imports import modules_of

# Names of others, and whose: documented in spite of their look, or the only way there is.
FOREIGN = {
    "_asdict": "collections.namedtuple",
    "_children": "multiprocessing.process",
    "_current_frames": "sys",
    "_exit": "os",
    "_fields": "collections.namedtuple",
    "_forkserver": "multiprocessing.forkserver",
    "_forkserver_alive_fd": "multiprocessing.forkserver",
    "_forkserver_pid": "multiprocessing.forkserver",
    "_getframe": "sys",
    "_invoke_callbacks": "concurrent.futures.Future",
    "_log_destroy_pending": "asyncio.Task",
    "_make_callable_from_options": "tensorflow.Session",
    "_replace": "collections.namedtuple",
}

# A new place is a reason to look for a public face, a decider, or something to hand in; where there
# is none, its number rises here with the change that says why.
PRIVATE: dict[str, int] = {
    "tests/faults/group_application.py": 1,
    "tests/faults/group_load.py": 1,
    "tests/leaks.py": 1,
    "tests/perf/test_child.py": 2,
    "tests/prpc_engine/accumulator/test_counter.py": 1,
    "tests/prpc_engine/accumulator/test_failing_servers.py": 1,
    "tests/prpc_engine/cli/test_config_command.py": 1,
    "tests/prpc_engine/cluster/test_late.py": 9,
    "tests/prpc_engine/cluster/test_relay.py": 10,
    "tests/prpc_engine/demo/test_data.py": 1,
    "tests/prpc_engine/demo/test_demo_cluster.py": 1,
    "tests/prpc_engine/inside.py": 28,
    "tests/prpc_engine/kv/checkpoint/test_incremental.py": 1,
    "tests/prpc_engine/kv/checkpoint/test_save_waits.py": 1,
    "tests/prpc_engine/kv/pslite/test_postoffice.py": 1,
    "tests/prpc_engine/kv/test_index.py": 1,
    "tests/prpc_engine/kv/test_replicas_are_equal.py": 4,
    "tests/prpc_engine/kv/test_lane.py": 1,
    "tests/prpc_engine/kv/test_session.py": 1,
    "tests/prpc_engine/kv/test_stopped_servers.py": 1,
    "tests/prpc_engine/roles.py": 10,
    "tests/prpc_engine/test_allow.py": 1,
    "tests/prpc_engine/test_bulk.py": 1,
    "tests/prpc_engine/test_dealer.py": 3,
    "tests/prpc_engine/test_figures.py": 2,
    "tests/prpc_engine/test_flow_control.py": 3,
    "tests/prpc_engine/test_liars.py": 1,
    "tests/prpc_engine/test_locks_and_barriers.py": 1,
    "tests/prpc_engine/test_master_client.py": 2,
    "tests/prpc_engine/test_master_races.py": 1,
    "tests/prpc_engine/test_master_stale.py": 1,
    "tests/prpc_engine/test_metrics.py": 3,
    "tests/prpc_engine/test_sending_races.py": 2,
    "tests/prpc_engine/test_streams_over_lanes.py": 1,
    "tests/prpc_engine/test_timing.py": 2,
    "tests/prpc_engine/test_user_secret.py": 1,
    "tests/prpc_engine/test_who_runs_handlers.py": 2,
    "tests/prpc_engine/workloads/test_detection.py": 1,
    "tests/rdma/inside.py": 3,
    "tests/rdma/test_device_memory.py": 10,  # what is registered; a bound made small; a lie
    "tests/rdma/test_iwarp.py": 13,  # a write that no connection does, and where to
    "tests/rdma/test_locked_memory.py": 1,  # a segment that its sender has lent before
    "tests/rdma/test_rails.py": 3,  # a queue pair that is put into error; a lie
    "tests/rdma/test_verbs.py": 14,
    "tests/shard/group_functions.py": 1,
    "tests/shard/lead.py": 2,
    "tests/shard/test_asyncio_bridge.py": 2,
    "tests/shard/test_counters.py": 2,
    "tests/shard/test_frame.py": 1,
    "tests/shard/test_future.py": 2,
    "tests/shard/test_group.py": 5,
    "tests/shard/test_group_births.py": 4,
    "tests/shard/test_interrupts.py": 5,
    "tests/shard/test_leases.py": 1,
    "tests/shard/test_mesh.py": 2,
    "tests/shard/test_park.py": 1,
    "tests/shard/test_segment.py": 1,
    "tests/shard/test_sharded.py": 2,
    "tests/shard/test_shares.py": 1,
    "tests/shard/test_slab.py": 1,
    "tests/shard/test_tcp_cost.py": 1,
    "tests/shard/test_time_of_turns.py": 1,
    "tests/shard/test_timers.py": 1,
    "tests/shard/test_transport_memory.py": 2,
    "tests/shard/test_transport_tcp.py": 1,
    "tests/simulation/scenarios_recovery.py": 1,  # no verb names the epochs of tables
    "tests/tensorflow/exchanges.py": 5,
    "tests/tensorflow/imports.py": 1,
    "tests/tensorflow/kills.py": 1,
    "tests/tensorflow/scenarios.py": 1,
    "tests/tensorflow/test_races.py": 18,
    "tests/tensorflow/test_waiting.py": 6,
    "tests/transport_contract.py": 7,
}

# The same of what is replaced while a test runs: argue for a new one here.
PATCHED: dict[str, int] = {
    "tests/disk.py": 2,
    "tests/network/test_service.py": 2,  # what a name stands for
    "tests/perf/test_bench_history.py": 4,
    "tests/perf/test_child.py": 1,
    "tests/prpc_engine/accumulator/test_failing_servers.py": 1,
    "tests/prpc_engine/cli/test_commands.py": 2,
    "tests/prpc_engine/cli/test_config_command.py": 3,
    "tests/prpc_engine/cli/test_doctor_peer.py": 1,
    "tests/prpc_engine/cli/test_run.py": 1,
    "tests/prpc_engine/cluster/test_late.py": 1,
    "tests/prpc_engine/cluster/test_link.py": 1,
    "tests/prpc_engine/cluster/test_link_states.py": 1,
    "tests/prpc_engine/cluster/test_relay.py": 3,
    "tests/prpc_engine/cluster/test_verbs.py": 1,
    "tests/prpc_engine/conftest.py": 3,
    "tests/prpc_engine/demo/test_data.py": 1,
    "tests/prpc_engine/demo/test_demo_cluster.py": 1,
    "tests/prpc_engine/endpoint_map/test_command.py": 2,
    "tests/prpc_engine/endpoint_map/test_endpoint_map_file.py": 1,
    "tests/prpc_engine/kv/checkpoint/test_incremental.py": 1,
    "tests/prpc_engine/kv/checkpoint/test_rows_that_come_and_go.py": 4,
    "tests/prpc_engine/kv/checkpoint/test_save_and_restore.py": 1,
    "tests/prpc_engine/kv/checkpoint/test_save_waits.py": 2,
    "tests/prpc_engine/kv/elastic_processes.py": 1,
    "tests/prpc_engine/kv/pslite/test_jobs.py": 1,
    "tests/prpc_engine/kv/pslite/test_postoffice.py": 1,
    "tests/prpc_engine/kv/test_cache.py": 1,
    "tests/prpc_engine/kv/test_consistency_over_the_wire.py": 2,
    "tests/prpc_engine/kv/test_divided_pushes.py": 1,
    "tests/prpc_engine/kv/test_elastic.py": 2,
    "tests/prpc_engine/kv/test_epochs.py": 2,
    "tests/prpc_engine/kv/test_paced_tables_begin_again.py": 1,
    "tests/prpc_engine/kv/test_replicas_are_equal.py": 1,
    "tests/prpc_engine/remote/test_membership.py": 2,
    "tests/prpc_engine/test_archive_compression.py": 1,
    "tests/prpc_engine/test_archive_pickle.py": 1,
    "tests/prpc_engine/test_archive_tensors.py": 1,
    "tests/prpc_engine/test_cancelled_handlers.py": 2,
    "tests/prpc_engine/test_client_races.py": 1,
    "tests/prpc_engine/test_dealers_at_an_end.py": 3,
    "tests/prpc_engine/test_dispatcher_life.py": 2,
    "tests/prpc_engine/test_failover.py": 1,
    "tests/prpc_engine/test_flow_control.py": 1,
    "tests/prpc_engine/test_identity.py": 1,
    "tests/prpc_engine/test_job_state.py": 1,
    "tests/prpc_engine/test_journal.py": 1,
    "tests/prpc_engine/test_journal_damage.py": 2,
    "tests/prpc_engine/test_leases_and_roots.py": 1,  # between two steps of one thread
    "tests/prpc_engine/test_master_client.py": 1,
    "tests/prpc_engine/test_master_races.py": 1,
    "tests/prpc_engine/test_metrics.py": 1,
    "tests/prpc_engine/test_node_config.py": 3,
    "tests/prpc_engine/test_on_disk.py": 2,
    "tests/prpc_engine/test_roles.py": 1,
    "tests/prpc_engine/test_rpc_sharded.py": 1,
    "tests/prpc_engine/test_selection.py": 4,
    "tests/prpc_engine/test_sending_races.py": 1,
    "tests/prpc_engine/test_session_states.py": 1,
    "tests/prpc_engine/test_sleeping_peer.py": 2,
    "tests/prpc_engine/test_slow_path.py": 3,
    "tests/prpc_engine/test_user_secret.py": 2,
    "tests/prpc_engine/test_watch_callbacks.py": 2,
    "tests/prpc_engine/test_who_runs_handlers.py": 1,
    "tests/prpc_engine/vllm/test_message_queue.py": 1,  # of the minute after which the log says
    "tests/rdma/neighbours.py": 1,  # what a peer says of itself that is not so
    "tests/rdma/test_rails.py": 2,  # what it says of its rails
    "tests/rdma/test_verbs.py": 2,
    "tests/shard/test_asyncio_bridge.py": 1,
    "tests/shard/test_connecting.py": 1,
    "tests/shard/test_future.py": 1,
    "tests/shard/test_group.py": 4,
    "tests/shard/test_group_births.py": 1,
    "tests/shard/test_group_end.py": 2,
    "tests/shard/test_huge_pages.py": 2,
    "tests/shard/test_segment.py": 2,
    "tests/shard/test_interrupts.py": 3,
    "tests/shard/test_liars.py": 2,
    "tests/shard/test_mesh.py": 1,
    "tests/shard/test_sharded.py": 2,
    "tests/shard/test_slab.py": 1,
    "tests/shard/test_supervision.py": 2,
    "tests/shard/test_tcp_names.py": 1,
    "tests/shard/test_thrown.py": 2,
    "tests/shard/test_transport_memory.py": 1,
    "tests/shard/test_transport_shm.py": 1,
    "tests/shard/test_transport_unix.py": 2,
    "tests/shard/test_unheld.py": 3,
    # three tables are asked beside their owners, which do not ask while the engine runs
    "tests/simulation/beside.py": 1,
    "tests/simulation/test_linearizability.py": 1,
    "tests/simulation/test_misuse.py": 1,  # how long a seed waits for what is real
    "tests/tensorflow/test_public_scripts.py": 1,
    "tests/tensorflow/test_races.py": 2,
    "tests/tensorflow/test_waiting.py": 2,
}

PATCHES = ("setattr", "delattr", "setitem", "delitem")


def patches(tree: ast.Module) -> Iterator[str]:
    """What is called to replace something, a name for each place."""
    for node in ast.walk(tree):
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(called, ast.Attribute) and called.attr in PATCHES:
            yield called.attr


def private_names(tree: ast.Module) -> Iterator[str]:
    """Those of other objects, a name for each place."""
    for node in ast.walk(tree):
        name = ""
        if isinstance(node, ast.Attribute):
            name = "" if _is_own(node.value) else node.attr
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "setattr"
            and len(node.args) > 1
            and isinstance(node.args[1], ast.Constant)
        ):
            name = str(node.args[1].value)
        if name.startswith("_") and not name.startswith("__") and name not in FOREIGN:
            yield name


def _is_own(owner: ast.expr) -> bool:
    called = owner.func if isinstance(owner, ast.Call) else owner
    own = ("super",) if called is not owner else ("self", "cls")
    return isinstance(called, ast.Name) and called.id in own


def counted(places: Callable[[ast.Module], Iterator[str]]) -> dict[str, int]:
    """How many places each file of the tests has; those without are left out."""
    found = {module.path: len(list(places(module.tree))) for module in modules_of("tests")}
    return {path: count for path, count in found.items() if count}


@pytest.mark.parametrize(
    ("places", "stated"),
    [
        pytest.param(private_names, PRIVATE, id="private names"),
        pytest.param(patches, PATCHED, id="what is replaced"),
    ],
)
def test_each_file_has_as_many_places_as_are_stated(
    places: Callable[[ast.Module], Iterator[str]], stated: dict[str, int]
) -> None:
    found = counted(places)
    wrong = [
        f"{path}: {found.get(path, 0)} places, {stated.get(path, 0)} stated"
        for path in sorted(found.keys() | stated.keys())
        if found.get(path, 0) != stated.get(path, 0)
    ]
    assert not wrong, (
        "more: ask a public face, test the decider, or hand in what is patched; "
        "fewer: state the lower number in the table:\n" + "\n".join(wrong)
    )


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("other._at", ["_at"]),
        ("self.server._at._relays", ["_relays", "_at"]),
        ("self._at, cls._at, super()._at, other.__class__, other.at", []),
        ('monkeypatch.setattr(other, "_at", 1)', ["_at"]),
        ('monkeypatch.setattr(other, "at", 1)', []),
        ("os._exit(0); row._replace(at=1); sys._getframe()", []),
        ("make()._at", ["_at"]),
    ],
)
def test_what_counts(source: str, names: list[str]) -> None:
    assert list(private_names(ast.parse(source))) == names


@pytest.mark.parametrize(
    ("source", "calls"),
    [
        ('monkeypatch.setattr(other, "at", 1)', ["setattr"]),
        ('patched.delitem(other, "at")', ["delitem"]),
        ('monkeypatch.setenv("AT", "1"); monkeypatch.chdir(tmp_path)', []),
        ('setattr(other, "at", 1)', []),
    ],
)
def test_what_counts_as_replaced(source: str, calls: list[str]) -> None:
    assert list(patches(ast.parse(source))) == calls


if __name__ == "__main__":
    for table, search in (("PRIVATE", private_names), ("PATCHED", patches)):
        print(f"{table}: dict[str, int] = {{")
        for file, count in counted(search).items():
            print(f'    "{file}": {count},')
        print("}")

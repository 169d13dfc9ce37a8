"""`prpc top`: what it shows of two looks, and the command on a job of real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from prpc_engine import Master, RpcService
from prpc_engine.cli.top_table import HEADINGS, ClassRow, NodeAnswer, Row, cells, rows
from shard import BULK, in_class
from tests.prpc_engine.cli.test_commands import ROOT, prpc
from tests.prpc_engine.processes import PATIENCE_S, ServerProcess, wait_until

SERVER = {"requests": 10, "failures": 1, "rejected": 2, "tasks": 3, "queued": 4, "timings": {}}
SLAB = {"leases": 2, "leased_bytes": 3_000_000, "lease_age_s_max": 1.5}


def figures(
    requests: int = 0,
    made: int = 0,
    in_flight: int = 0,
    moved: int = 0,
    ended: int = 0,
    **server: Any,
) -> dict[str, Any]:
    peer = {
        "peer": "tcp://here:1",
        "choice": {"node": "tcp://there:2"},
        "requests": made,
        "in_flight": in_flight,
        "outbox_messages": 5,
        "traffic": {"bytes_sent": moved, "bytes_received": 2 * moved},
    }
    return {
        "process": "host/ns/4711/99",
        "peers": [peer],
        "ended": {
            "tcp": {"requests": ended, "traffic": {"bytes_sent": ended, "bytes_received": ended}}
        }
        if ended
        else {},
        "servers": {"kv/0": {**SERVER, "requests": requests, **server}},
        "slab": SLAB,
        "classes": [class_figures("LATENCY")],
    }


def class_figures(name: str, steps: int = 0, busy_ns: int = 0, waiting: int = 0) -> dict[str, Any]:
    return {"name": name, "steps": steps, "busy_ns": busy_ns, "waiting": waiting}


ONE = ("memory://1", "tcp://here:1")


def test_rates_are_what_grew_between_two_looks() -> None:
    before = [NodeAnswer("rank 0", ONE, figures(100, 10, moved=1_000_000))]
    (row,) = rows(before, [NodeAnswer("rank 0", ONE, figures(300, 50, moved=5_000_000))], 2.0)
    assert (row.served_per_s, row.made_per_s, row.in_mb_s, row.out_mb_s) == (100.0, 20.0, 4.0, 2.0)
    assert (row.process, row.failures, row.rejected, row.running, row.queued, row.outbox) == (
        4711,
        1,
        2,
        3,
        4,
        5,
    )
    assert (row.leases, row.leased_mb, row.lease_age_s) == (2, 3.0, 1.5)


def test_a_process_that_is_new_or_was_started_again_has_no_rates_yet() -> None:
    (row,) = rows(
        [NodeAnswer("rank 0", ONE, figures(100))],
        [NodeAnswer("rank 0", ("memory://2",), figures(3))],
        1.0,
    )
    assert (row.served_per_s, row.made_per_s, row.in_mb_s) == (None, None, None)


def test_what_went_over_a_connection_that_closed_between_the_looks_is_counted() -> None:
    before = figures(made=50, moved=50)
    (row,) = rows(
        [NodeAnswer("rank 0", ONE, before)],
        [NodeAnswer("rank 0", ONE, figures(ended=6_000_100))],
        1.0,
    )
    assert (row.made_per_s, row.out_mb_s, row.in_mb_s) == (6_000_050.0, 6.00005, 6.0)


def test_percentiles_are_of_the_handlers_between_the_looks_alone() -> None:
    old = {"old": {"buckets": [0] * 10 + [1000] + [0] * 53}}
    new = {
        "old": {"buckets": [0] * 10 + [1000] + [0] * 3 + [99, 1] + [0] * 48},
        "other": {"buckets": [0] * 64},
    }
    (row,) = rows(
        [NodeAnswer("rank 0", ONE, figures(timings=old))],
        [NodeAnswer("rank 0", ONE, figures(timings=new))],
        1.0,
    )
    assert (row.p50_us, row.p99_us) == (2**14 / 1e3, 2**14 / 1e3)
    (quiet,) = rows(
        [NodeAnswer("rank 0", ONE, figures(timings=new))],
        [NodeAnswer("rank 0", ONE, figures(timings=new))],
        1.0,
    )
    assert (quiet.p50_us, quiet.p99_us) == (None, None)


def test_classes_of_work_have_their_part_of_the_time_their_steps_and_what_waits() -> None:
    before, now = figures(), figures()
    before["classes"] += [class_figures("BULK", 100, 2_000_000_000, 7), class_figures("mine")]
    now["classes"] = [
        class_figures("LATENCY", 500, 100_000_000),
        class_figures("BULK", 300, 3_500_000_000, 4),
        class_figures("mine"),
        class_figures("new", 1, 20_000_000),
    ]
    (row,) = rows([NodeAnswer("rank 0", ONE, before)], [NodeAnswer("rank 0", ONE, now)], 2.0)
    assert row.classes == {
        "LATENCY": ClassRow(5.0, 250.0, 0),
        "BULK": ClassRow(75.0, 100.0, 4),
        "new": ClassRow(1.0, 0.5, 0),
    }
    (shown,) = [cell for cell in cells(row) if "BULK" in cell]
    assert "LATENCY (5.0 %, 250/s, 0 wait), BULK (75.0 %, 100/s, 4 wait)" in shown
    (new,) = rows([], [NodeAnswer("rank 0", ONE, now)], 2.0)
    assert new.classes["BULK"] == ClassRow(None, None, 4)


@in_class(BULK)
def one() -> int:
    return 1


def test_classes_of_a_job_are_those_of_its_processes(master: Master) -> None:
    with RpcService(master.address) as service, RpcService(master.address) as calling:
        service.create_server("bulk", {"one": one})
        assert calling.create_client("bulk").call("one") == 1
        (line,) = one_look(master, "--json").splitlines()
        found = {row["who"]: row["classes"] for row in json.loads(line)["rows"]}
    assert found["rank 0"].keys() >= {"bulk"}
    assert found["rank 0"]["bulk"].keys() == {"busy_pct", "steps_per_s", "waiting"}
    assert found["master"] == {}


def test_who_waits_for_whom_is_told_by_rank_where_it_is_known() -> None:
    now = [
        NodeAnswer("rank 0", ONE, figures(in_flight=7)),
        NodeAnswer("rank 1", ("memory://9", "tcp://there:2"), figures()),
    ]
    waiting, other = rows([], now, 1.0)
    assert (waiting.waits_for, other.waits_for) == ({"rank 1": 7}, {})
    assert cells(waiting)[-1] == "rank 1 (7)"
    (alone,) = rows([], now[:1], 1.0)
    assert alone.waits_for == {"tcp://here:1": 7}, "a stranger by its address"


def test_a_silent_process_keeps_its_row_with_the_reason() -> None:
    (row,) = rows([], [NodeAnswer("rank 0", ONE, error="NotSent: nobody listens")], 1.0)
    assert row == Row("rank 0", error="NotSent: nobody listens")
    assert cells(row)[:2] == ["rank 0", "silent"]
    assert len(cells(row)) == len(HEADINGS)


# -- the command -----------------------------------------------------------------------------------


def one_look(master: Master, *options: str, **env: str) -> str:
    """What it shows."""
    ran = prpc("top", master.address, "--once", "--interval", "0.1", *options, **env)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_one_look_as_json_has_every_process_of_the_job(master: Master) -> None:
    with (
        ServerProcess(master.address, "test", "shm,tcp") as server,
        RpcService(master.address) as service,
    ):
        service.create_client("test", 1, PATIENCE_S).call("echo", 1, timeout_s=PATIENCE_S)
        found: dict[str, dict[str, Any]] = {}

        def all_answer() -> bool:  # in both looks: who is late is listed as silent
            (line,) = one_look(master, "--json").splitlines()
            found.update({row["who"]: row for row in json.loads(line)["rows"]})
            return all(
                row["error"] == "" and row["made_per_s"] is not None for row in found.values()
            )

        wait_until(all_answer, "an answer of everybody in time")
        assert list(found) == ["master", "rank 0", "rank 1"]
        assert found["rank 0"]["process"] == server.pid
        assert found["rank 1"]["process"] == os.getpid()
        assert set(found["rank 0"]) == {name for name, _ in HEADINGS} | {"error"}


@pytest.mark.slow
def test_a_process_that_is_stopped_is_listed_though_its_lease_ends_meanwhile(
    master: Master,
) -> None:
    with ServerProcess(master.address, "test", "shm,tcp") as server:
        os.kill(server.pid, signal.SIGSTOP)
        try:
            found = {row["who"]: row for row in json.loads(one_look(master, "--json"))["rows"]}
        finally:
            os.kill(server.pid, signal.SIGCONT)
    assert found["rank 0"]["error"]
    assert found["master"]["error"] == ""


@pytest.mark.slow
def test_shards_have_rows_of_their_own_beside_their_nodes(master: Master) -> None:
    with RpcService(master.address, shards=2):
        found = [row["who"] for row in json.loads(one_look(master, "--json"))["rows"]]
    assert found == ["master", "rank 0", "rank 0, shard", "rank 0, shard"]


def test_one_look_for_people_is_one_table(master: Master) -> None:
    with RpcService(master.address):
        shown = one_look(master, COLUMNS="40")  # of a terminal, which this is not
    table = [line.split() for line in shown.splitlines()]
    assert all(heading in shown for _, heading in HEADINGS)
    assert [line[:2] for line in table].count(["rank", "0"]) == 1


@pytest.mark.slow
def test_looks_go_on_until_it_is_interrupted(master: Master) -> None:
    command = [
        sys.executable,
        "-m",
        "prpc_engine.cli",
        "top",
        master.address,
        "--json",
        "--interval",
        "0.1",
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        times = [json.loads(process.stdout.readline())["time_s"] for _ in range(3)]
        process.send_signal(2)
        _, told = process.communicate(timeout=PATIENCE_S)
    assert times == sorted(times)
    assert (process.returncode, told) == (130, "prpc: interrupted\n")


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["127.0.0.1:1", "--once"], 1, "prpc: no master answers at 127.0.0.1:1"),
        (["nowhere"], 2, "prpc: "),
        (
            ["127.0.0.1:1", "--interval", "0"],
            2,
            "prpc: --interval 0.0: 0.1 to 3600 seconds are allowed",
        ),
        (
            ["127.0.0.1:1", "--secret-file", "/nowhere"],
            2,
            "prpc: secret file '/nowhere' cannot be read",
        ),
    ],
)
def test_what_is_wrong_is_told_in_one_line(arguments: list[str], code: int, text: str) -> None:
    ran = prpc("top", *arguments)
    assert ran.returncode == code, ran.stderr
    lines = [
        line for line in ran.stderr.splitlines() if not line.startswith("waiting for the master at")
    ]
    assert len(lines) == 1
    assert lines[0].startswith(text)

"""Functions that run again and again in one thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from prpc_engine.errors import Closed, ConfigError
from prpc_engine.support import Monitor, ThreadGroup
from prpc_engine.support.monitor import next_due
from tests.program import waiting_in
from tests.prpc_engine.processes import PATIENCE_S, wait_until

LATER_S = 3600.0  # not within a test


@pytest.fixture
def monitor() -> Iterator[Monitor]:
    with Monitor() as one:
        yield one


def runs(monitor: Monitor, name: str) -> int:
    found = monitor.query(name)
    assert found is not None
    return found.runs


def test_a_task_runs_after_its_delay_and_then_every_period(monitor: Monitor) -> None:
    threads: set[str] = set()
    monitor.submit("often", 0, 0.001, lambda: threads.add(threading.current_thread().name))
    monitor.submit("later", LATER_S, 0.001, lambda: threads.add("too early"))
    wait_until(lambda: runs(monitor, "often") >= 5)
    assert threads == {"prpc-monitor"}
    found = monitor.query("later")
    assert found is not None
    assert (found.runs, found.is_running) == (0, False)
    assert LATER_S - PATIENCE_S < found.next_in_s <= LATER_S


def test_a_shorter_delay_submitted_later_does_not_wait_for_the_longer_one(monitor: Monitor) -> None:
    monitor.submit("later", LATER_S, LATER_S, lambda: None)
    monitor.submit("now", 0, LATER_S, lambda: None)
    wait_until(lambda: runs(monitor, "now") == 1)
    assert runs(monitor, "later") == 0


@pytest.mark.parametrize(
    ("now", "due", "skipped"),
    [
        (10.0, 12.0, 0),
        (11.9, 12.0, 0),
        (12.0, 14.0, 1),
        (12.5, 14.0, 1),
        (19.9, 20.0, 4),
        (9.0, 12.0, 0),
    ],
)
def test_a_late_run_does_not_move_the_next_ones(now: float, due: float, skipped: int) -> None:
    assert next_due(10.0, 2.0, now) == (due, skipped)


def test_what_raises_is_logged_by_name_and_runs_again(
    monitor: Monitor, caplog: pytest.LogCaptureFixture
) -> None:
    monitor.submit("broken", 0, 0.001, lambda: {}["lost"])
    monitor.submit("exits", 0, 0.001, lambda: exit("enough"))
    wait_until(lambda: runs(monitor, "broken") >= 3 and runs(monitor, "exits") >= 3)
    assert "task 'broken' of prpc-monitor raised" in caplog.text
    assert "KeyError: 'lost'" in caplog.text
    found = monitor.query("broken")
    assert found is not None
    assert found.failures == found.runs


def test_destroy_waits_for_the_run_in_progress(monitor: Monitor) -> None:
    began, gate = threading.Event(), threading.Event()
    ended: list[str] = []

    def work() -> None:
        began.set()
        gate.wait(PATIENCE_S)
        ended.append("work")

    monitor.submit("work", 0, 0.001, work)
    assert began.wait(PATIENCE_S)
    with pytest.raises(TimeoutError, match="'work' of prpc-monitor still runs"):
        monitor.destroy("work", timeout_s=0)
    with ThreadGroup(1) as group:
        destroyed = group.async_exec(monitor.destroy, "work")
        wait_until(lambda: waiting_in(Monitor.destroy) == 1, "its wait")
        assert not destroyed.done()
        gate.set()
        assert destroyed.result(PATIENCE_S) is True
        assert ended == ["work"]
    assert monitor.query("work") is None
    assert not monitor.destroy("work")


def test_a_task_that_waits_is_destroyed_at_once_and_its_name_is_free(monitor: Monitor) -> None:
    monitor.submit("later", LATER_S, 1, lambda: None)
    with pytest.raises(ConfigError, match="'later' already"):
        monitor.submit("later", 0, 1, lambda: None)
    assert monitor.destroy("later")
    monitor.submit("later", 0, LATER_S, lambda: None)
    wait_until(lambda: runs(monitor, "later") == 1)


def test_an_additional_run_of_a_task_that_waits_is_the_only_one(monitor: Monitor) -> None:
    ran: list[int] = []
    monitor.submit("flush", LATER_S, LATER_S, lambda: ran.append(1))
    assert monitor.destroy_with_additional_run("flush", PATIENCE_S)
    assert ran == [1]
    assert monitor.query("flush") is None
    assert not monitor.destroy_with_additional_run("flush")


def test_an_additional_run_begins_after_the_run_in_progress(monitor: Monitor) -> None:
    began, gate = threading.Event(), threading.Event()
    order: list[str] = []

    def work() -> None:
        began.set()
        order.append("begin")
        gate.wait(PATIENCE_S)
        order.append("end")

    monitor.submit("work", 0, LATER_S, work)
    assert began.wait(PATIENCE_S)
    with ThreadGroup(1) as group:
        destroyed = group.async_exec(monitor.destroy_with_additional_run, "work")
        wait_until(lambda: waiting_in(Monitor.destroy_with_additional_run) == 1, "its wait")
        gate.set()
        assert destroyed.result(PATIENCE_S)
    assert order == ["begin", "end"] * 2


def test_an_additional_run_is_made_although_somebody_else_destroys_the_task_already(
    monitor: Monitor,
) -> None:
    gate = threading.Event()
    ran: list[int] = []
    monitor.submit("work", 0, LATER_S, lambda: (ran.append(1), gate.wait(PATIENCE_S)))
    wait_until(lambda: ran)
    with ThreadGroup(2) as group:
        destroyed = group.async_exec(monitor.destroy, "work")
        wait_until(lambda: waiting_in(Monitor.destroy) == 1, "its wait")
        flushed = group.async_exec(monitor.destroy_with_additional_run, "work")
        wait_until(lambda: waiting_in(Monitor.destroy_with_additional_run) == 1, "its wait")
        gate.set()
        assert destroyed.result(PATIENCE_S) and flushed.result(PATIENCE_S)
    assert ran == [1, 1]


def test_an_additional_run_that_the_end_of_the_monitor_prevents_is_told(monitor: Monitor) -> None:
    gate = threading.Event()
    ran: list[int] = []
    monitor.submit("work", 0, LATER_S, lambda: (ran.append(1), gate.wait(PATIENCE_S)))
    wait_until(lambda: ran)
    with ThreadGroup(1) as group:
        flushed = group.async_exec(monitor.destroy_with_additional_run, "work")
        wait_until(lambda: waiting_in(Monitor.destroy_with_additional_run) == 1, "its wait")
        with pytest.raises(TimeoutError):
            monitor.close(timeout_s=0)
        gate.set()
        with pytest.raises(
            Closed, match="prpc-monitor was closed before the last run of task 'work'"
        ):
            flushed.result(PATIENCE_S)
    assert ran == [1]


def test_a_task_may_destroy_itself(monitor: Monitor) -> None:
    ran: list[int] = []

    def once() -> None:
        ran.append(1)
        assert monitor.destroy("once")

    monitor.submit("once", 0, 0.001, once)
    monitor.submit("other", 0, 0.001, lambda: None)
    wait_until(lambda: runs(monitor, "other") >= 3 and monitor.query("once") is None)
    assert ran == [1]


def test_closing_ends_all_tasks_and_waits_for_the_one_that_runs() -> None:
    began, gate = threading.Event(), threading.Event()
    monitor = Monitor()
    monitor.submit("work", 0, 0.001, lambda: (began.set(), gate.wait(PATIENCE_S)))
    assert began.wait(PATIENCE_S)
    with pytest.raises(TimeoutError, match="still runs"):
        monitor.close(timeout_s=0)
    gate.set()
    monitor.close()
    assert monitor.query("work") is None
    with pytest.raises(Closed):
        monitor.submit("work", 0, 1, lambda: None)


@pytest.mark.parametrize(
    ("delay_s", "period_s"), [(-1, 1), (0, 0), (0, float("nan")), (float("inf"), 1)]
)
def test_times_that_make_no_sense_are_refused(
    monitor: Monitor, delay_s: float, period_s: float
) -> None:
    with pytest.raises(ConfigError, match="seconds are allowed"):
        monitor.submit("x", delay_s, period_s, lambda: None)

"""The requests of one server that are answered later: those that have a place among its tasks, and
those that wait for one. What follows what is a table (job_state.py); here are its actions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from prpc_engine.rpc.job import Job
from prpc_engine.rpc.job_state import JOB_STATES, JobAction, JobEvent
from prpc_engine.rpc.message import END, TO_CALLER, Status
from shard import CancelledError, Gate

Report = Callable[..., object]
_REPORT = (
    JobAction.REPORT
)  # to look up a member of an enumeration costs as much as to ask the table


class Jobs:
    """The jobs of one server, and the places that they have or wait for. Owned by a ServedObject;
    called in the reactor's thread.

    service    its name, for texts
    gate       all jobs are inside until nothing of them is left
    has_place  whether one more may run now
    start      calls a job's handler
    drop       forgets a job that never ran
    tell       answers with an error, the handler's own or that by which the job was ended
    """

    def __init__(
        self,
        service: str,
        gate: Gate,
        has_place: Callable[[], bool],
        start: Callable[[Job], None],
        drop: Callable[[Job], None],
        tell: Callable[[Job, BaseException], None],
    ) -> None:
        self.tasks = self.queue_bytes = self.expired = 0
        self.cancelled_in_queue = 0
        self.queue: deque[Job] = deque()
        self.open: dict[Job, None] = {}  # those inside the gate
        self._service, self._gate, self._has_place = service, gate, has_place
        self._tell = tell
        self._starting = False
        self._do: dict[JobAction, Callable[[Job], object]] = {
            JobAction.QUEUE_UP: self._queue_up,
            JobAction.LEAVE_QUEUE: self._leave_queue,
            JobAction.TAKE_PLACE: self._take_place,
            JobAction.START: start,
            JobAction.WATCH_DEADLINE: _watch_deadline,
            JobAction.DROP: drop,
            JobAction.FORGET: _forget,
            JobAction.LEAVE_GATE: self._leave_gate,
            JobAction.LEAVE: self._leave,
            JobAction.TELL_END: self._tell_end,
            JobAction.TELL_STOPPING: self._tell_stopping,
            JobAction.TELL_TOO_LATE: self._tell_too_late,
            JobAction.COUNT_CANCELLED: self._count_cancelled,
            JobAction.END_AGAIN: _end_again,
            JobAction.THROW: _throw,
        }

    def enter(self, job: Job) -> None:
        """It is taken on; follow() says then where it goes."""
        self._gate.enter()
        self.open[job] = None
        job.follow = self.follow
        if job.call_id:
            job.peer.running[job.call_id] = job

    def follow(
        self, job: Job, event: JobEvent, report: Report | None = None, *arguments: Any
    ) -> None:
        """That has happened to it. `report`: with RETURNED; report(*arguments) answers, or logs
        what nobody is told any more.
        """
        job.state, actions = JOB_STATES.after(job.state, event)
        do = self._do
        for action in actions:
            if action is not _REPORT:
                do[action](job)
            else:
                assert report is not None
                report(*arguments)

    def cut(self, again: bool) -> int:
        """End all, those in the queue first; how many. `again`: those that clean up, too."""
        # queued ones first: or they would begin yet
        jobs = sorted(
            (job for job in self.open if again or not job.is_over),
            key=lambda job: not job.is_queued,
        )
        for job in jobs:
            if job.is_queued:
                self.follow(job, JobEvent.SERVER_CLOSED)
            else:
                job.end(CancelledError(f"{self._service!r} was closed before it was done"))
        return len(jobs)

    # -- the actions of the table ------------------------------------------------------------------

    def _queue_up(self, job: Job) -> None:
        self.queue.append(job)
        self.queue_bytes += job.nbytes
        _watch_deadline(job)

    def _leave_queue(self, job: Job) -> None:
        self.queue.remove(job)
        self.queue_bytes -= job.nbytes
        _forget_deadline(job)

    def _take_place(self, job: Job) -> None:
        self.tasks += 1

    def _leave_gate(self, job: Job) -> None:
        job.cancel = job.follow = job.task = None
        self.open.pop(job, None)
        self._gate.leave()

    def _leave(self, job: Job) -> None:
        self.tasks -= 1
        self._leave_gate(job)
        if self._starting:
            return  # one that began below ended at once
        self._starting = True
        try:
            self._start_waiting()
        finally:
            self._starting = False

    def _start_waiting(self) -> None:
        while self.queue and self._has_place():
            job = self.queue[0]
            is_late = job.timeout_ms and job.deadline <= job.peer.reactor.clock()
            self.follow(job, JobEvent.TOO_LATE if is_late else JobEvent.PLACE)

    def _tell_end(self, job: Job) -> None:
        assert job.ended_by is not None
        if job.window is not None and job.window.sent:
            # ahead of the answer, which may overtake items
            job.peer.send_note(END, job.call_id, TO_CALLER, job.window.sent)
        self._tell(job, job.ended_by)

    def _tell_stopping(self, job: Job) -> None:
        text = f"{self._service!r} is stopping here"
        job.peer.fail(job.call_id, Status.STOPPING, "", text, "")

    def _tell_too_late(self, job: Job) -> None:
        self.expired += 1
        count = self.tasks + self._starting  # of which one has just ended, then
        text = f"it waited {job.timeout_ms} ms for one of {count} tasks to end, and did not run"
        job.peer.fail(job.call_id, Status.DEADLINE, "DeadlineExceeded", text, "")

    def _count_cancelled(self, job: Job) -> None:
        self.cancelled_in_queue += 1


def _watch_deadline(job: Job) -> None:
    if job.timeout_ms:
        job.timer = job.peer.reactor.timers.call_at(job.deadline, job.late)


def _forget_deadline(job: Job) -> None:
    if job.timer is not None:
        job.timer.cancel()
        job.timer = None


def _forget(job: Job) -> None:
    if job.call_id:
        job.peer.running.pop(job.call_id, None)
    _forget_deadline(job)
    if job.inbox is not None:
        job.inbox.finish(CancelledError("the call is over"))
    if job.window is not None:
        job.window.close(CancelledError("the call is over"))


def _end_again(job: Job) -> None:
    assert job.ended_by is not None
    job.end(job.ended_by)


def _throw(job: Job) -> None:
    assert job.task is not None
    job.task.cancel(job.ended_by)
    job.task.step()

"""Events of DI-engine between two of its workers: `--mq-type prpc` beside its own queue over nng.

Both are the same program by DI-engine's own runner, over ipc, which is nng's fastest: a worker
emits an event of so many bytes, and the other one's callback emits an empty one back. Then it emits
a burst, as fast as emit() returns, and the other one says how many of these came.

Expected:
    64 B      DI-engine's own part, a pickle and two thread pools at each side, is some 0.1 ms of
              both; the queue itself is 0.02 ms here, and 0.05 ms over nng.
    1.25 MB   nng takes four copies at 1 GB/s and two of a pickle; here a pickle goes by shared
              memory: half of it.
    40 MB     as before; nng has 100 ms of fresh pages.
    a burst   nng drops what its 16 places cannot hold, some 85 % of small events, and says nothing;
              here emit() waits, and none is lost.

    python -m perf.bench_ding [--json] [--quick]        DI-engine 0.5.3 is needed
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from prpc_engine.ding.cli import find_hook

from . import machine
from .harness import Result, Role
from .targets import Target
from .timing import FULL, TINY, Effort

NAME = "ding"
OURS, NNG = "prpc", "nng"  # as --mq-type has them
ROOT = Path(__file__).resolve().parents[len(__package__.split("."))]
ROLES: dict[str, Role] = {OURS: "ours", NNG: "peer"}
WARM_EVENTS = 3
TICK_S = 0.05  # between two events for who is not there yet, or has lost one
LOST_S = 10.0  # an event whose answer has not come by then is lost
QUIET_S = 2.0  # nothing has come for so long: nothing more of a burst will
ANSWER_S_MAX = 120.0  # the longest is importing torch and DI-engine on a busy machine
END_S_MAX = 30.0  # of a launch that may end


@dataclass(frozen=True, slots=True)
class Emit:
    """Events of so many bytes, and how many a burst has."""

    size_bytes: int
    burst: int

    def __str__(self) -> str:
        size = (
            f"{self.size_bytes} B" if self.size_bytes < 1e6 else f"{self.size_bytes / 2**20:g} MB"
        )
        return f"an event of {size} and its answer, {self.burst} at once"


CASES = [Emit(64, 5000), Emit(1_310_720, 200), Emit(40 << 20, 10)]
TARGETS = [
    *(Target(str(case), OURS, "lost_events", "at most", 0) for case in CASES),
    *(Target(str(case), OURS, "p50_ns", "at most", 1.0, against=NNG) for case in CASES),
]


def run(
    case: Emit,
    effort: Effort = FULL,
    progress: Callable[[str], None] | None = None,
    pinned: bool = True,
) -> list[Result]:
    """Measure one case by both queues. Nothing is pinned: each worker has threads for two cores."""
    if not machine.is_installed("ding"):
        return [
            Result(NAME, str(case), name, role, "not installed", "no module ding")
            for name, role in ROLES.items()
        ]
    with _launches() as ends:
        return _measured(case, ends, effort, progress)


@contextlib.contextmanager
def _launches() -> Iterator[dict[str, Launch]]:
    """One by each queue."""
    with (
        tempfile.TemporaryDirectory(prefix="prpc-bench-") as folder,
        contextlib.ExitStack() as jobs,
    ):
        ends = {name: Launch(Path(folder), name) for name in ROLES}
        for end in ends.values():
            jobs.callback(end.close)
        yield ends


def _measured(
    case: Emit,
    ends: dict[str, Launch],
    effort: Effort,
    progress: Callable[[str], None] | None,
) -> list[Result]:
    """By these workers: some events by the one queue, then by the other, and so on."""
    is_tiny = effort == TINY
    rounds = effort.ops_min if is_tiny or case.size_bytes > 1e7 else 10 * effort.ops_min
    burst = min(case.burst, 20) if is_tiny else case.burst
    repeats: dict[str, list[dict[str, Any]]] = {name: [] for name in ROLES}
    for number in range(effort.repeats):
        for name, end in ends.items():
            if progress is not None:
                progress(f"{NAME}  {case}  {name}  {number + 1}/{effort.repeats}")
            repeats[name].append(end.ask([case.size_bytes, rounds, burst]))
    return [
        _result(case, name, rounds, burst, [seen for seen in told if seen["p50_ns"] is not None])
        for name, told in repeats.items()
    ]


def _result(case: Emit, name: str, rounds: int, burst: int, told: list[dict[str, Any]]) -> Result:
    if not told:
        return Result(NAME, str(case), name, ROLES[name], "failed", "no event was answered")
    p50_ns = [seen["p50_ns"] for seen in told]
    each = {
        "p50_ns": p50_ns,
        "lost_events": [float(burst - seen["came"] + seen["unanswered"]) for seen in told],
        "emitted_per_s": [burst / seen["burst_s"] for seen in told],
    }
    return Result(
        bench=NAME,
        case=str(case),
        candidate=name,
        role=ROLES[name],
        state="ok",
        repeats=len(told),
        ops=rounds,
        ops_per_s=1e9 / statistics.median(p50_ns),  # one after the other
        p50_ns=statistics.median(p50_ns),
        p50_ns_low=min(p50_ns),
        p50_ns_high=max(p50_ns),
        bytes_per_op=case.size_bytes,
        work={key: sum(seen[key] for seen in told) for key in ("came", "unanswered")},
        figures={key: statistics.median(each[key]) for key in ("lost_events", "emitted_per_s")},
        each=each,
    )


class Launch:
    """Two workers of DI-engine, which do what they are asked. Owned by a run: close() it."""

    def __init__(self, folder: Path, queue: str) -> None:
        path = str(folder / f"{queue}.sock")
        self._queue = queue
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen()
        self._commands: TextIO | None = None  # once the first worker is there
        self._log = folder / f"{queue}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", f"{__package__}.bench_ding", queue, path],
                cwd=folder,  # DI-engine leaves files
                env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that its workers end with it
            )

    def ask(self, what: Any) -> Any:
        """What the first worker answers. Raises RuntimeError with what was logged."""
        try:
            if self._commands is None:
                self._listener.settimeout(ANSWER_S_MAX)
                connection, _ = self._listener.accept()
                connection.settimeout(ANSWER_S_MAX)
                with connection:  # the file keeps it
                    self._commands = connection.makefile("rw")
            self._commands.write(json.dumps(what) + "\n")
            self._commands.flush()
            return json.loads(self._commands.readline())
        except (OSError, ValueError) as error:
            said = self._log.read_text(errors="replace")[-4000:]
            raise RuntimeError(f"two workers by {self._queue}: {error}\n{said}") from error

    def close(self) -> None:
        """End them: by the end of what they are asked, else by force."""
        if self._commands is not None:
            self._commands.close()
        self._listener.close()
        try:
            self._process.wait(END_S_MAX if self._commands is not None else 0)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


# -- the program -----------------------------------------------------------------------------------


class Heard:
    """What one worker's callbacks have heard. They run in threads of DI-engine."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._last: dict[str, int] = {}

    def hear(self, what: str, value: int) -> None:
        """Keep it."""
        with self._changed:
            self._last[what] = value
            self._changed.notify_all()

    def count(self, what: str) -> None:
        """One more."""
        with self._changed:
            self._last[what] = self._last.get(what, 0) + 1
            self._changed.notify_all()

    def last(self, what: str) -> int:
        """The last value of that, or 0."""
        return self._last.get(what, 0)

    def wait_for(self, what: str, value: int, patience_s: float | None) -> bool:
        """Whether it is that value, or comes to be in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._last.get(what) == value, patience_s)


class Events:
    """Events from the first worker to the second, and what comes back."""

    def __init__(self, router: Any) -> None:
        self._router, self._heard, self._number = router, Heard(), 0
        router.on("pong", lambda number: self._heard.hear("pong", number))
        router.on("told", self._told)
        while not self._ping(b"", TICK_S):  # until the other one is there
            pass

    def _told(self, number: int, came: int) -> None:
        self._heard.hear("came", came)
        self._heard.hear("told", number)

    def _ping(self, data: bytes, patience_s: float) -> bool:
        self._number += 1
        self._router.emit("ping", self._number, data)
        return self._heard.wait_for("pong", self._number, patience_s)

    def measure(self, size_bytes: int, rounds: int, burst: int) -> dict[str, Any]:
        """The median time of an event and its answer; what came of a burst."""
        data, took_ns = os.urandom(size_bytes), []
        for _ in range(WARM_EVENTS + rounds):
            began = time.perf_counter_ns()
            is_answered = self._ping(data, LOST_S)
            took_ns.append(time.perf_counter_ns() - began if is_answered else None)
        before = self._came(None)
        began = time.perf_counter_ns()
        for _ in range(burst):
            self._router.emit("count", data)
        burst_s = (time.perf_counter_ns() - began) / 1e9
        times = [one for one in took_ns[WARM_EVENTS:] if one is not None]
        return {
            "p50_ns": statistics.median(times) if times else None,
            "unanswered": took_ns.count(None),
            "came": self._came(before + burst) - before,
            "burst_s": burst_s,
        }

    def _came(self, expected: int | None) -> int:
        """How many events of bursts have come in all: so many, or as many as there are when none
        has come for a while. None: as many as now.
        """
        came, give_up_at = -1, time.monotonic() + ANSWER_S_MAX
        while came != expected and time.monotonic() < give_up_at:
            self._number += 1
            self._router.emit("ask", self._number)
            if not self._heard.wait_for("told", self._number, QUIET_S):
                continue  # nng has lost it, or its answer
            if expected is None:
                return self._heard.last("came")
            if self._heard.last("came") != came:
                came, give_up_at = self._heard.last("came"), time.monotonic() + QUIET_S
            time.sleep(TICK_S)
        return max(0, came)

    def quit(self) -> None:
        """The other one may end."""
        while not self._heard.wait_for("told", 0, TICK_S):
            self._router.emit("quit")


def work(path: str) -> None:
    """In both workers: the first measures what that socket asks for, the second answers."""
    router: Any = importlib.import_module("ding.framework").Parallel()
    if router.node_id == 0:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(path)
            events = Events(router)
            with connection.makefile("rw") as commands:
                for line in commands:
                    commands.write(json.dumps(events.measure(*json.loads(line))) + "\n")
                    commands.flush()
        events.quit()
        return
    heard = Heard()

    def end() -> None:
        router.emit("told", 0, 0)
        heard.hear("quit", 1)

    router.on("ping", lambda number, data: router.emit("pong", number))
    router.on("count", lambda data: heard.count("came"))
    router.on("ask", lambda number: router.emit("told", number, heard.last("came")))
    router.on("quit", end)
    heard.wait_for("quit", 1, None)
    time.sleep(TICK_S)  # for what it has said last


def launch(queue: str, path: str) -> None:
    """Both workers, by DI-engine's own runner."""
    parallel: Any = importlib.import_module("ding.framework").Parallel
    parallel.runner(2, mq_type=queue, protocol="ipc", startup_interval=0)(work, path)


def test_no_event_is_lost_and_all_are_answered() -> None:
    if not machine.is_installed("ding"):
        for result in run(CASES[0], TINY):
            assert (result.state, result.note) == ("not installed", "no module ding")
        return
    with _launches() as ends:
        for case in CASES[:2]:
            ours, nng = _measured(case, ends, TINY, None)
            assert ours.state == nng.state == "ok", ours.note or nng.note
            assert ours.work == {"came": 20, "unanswered": 0}
            assert ours.figures["lost_events"] == 0
            assert 0 <= nng.work["came"] <= 20


def test_every_target_has_something_to_judge() -> None:
    for target in TARGETS:
        assert target.case in map(str, CASES)
        assert {name for name in (target.candidate, target.against) if name} <= {OURS, NNG}


if __name__ in ("__main__", "__mp_main__"):  # here, and in the workers that are spawned
    find_hook().install()  # as the wheel has it done where it is installed
if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in ROLES:
        launch(*sys.argv[1:])
        raise SystemExit(0)
    from . import cli_bench

    raise SystemExit(cli_bench.command_line(NAME))

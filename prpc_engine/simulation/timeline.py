"""What happened in a simulation, event by event: a digest of all, and, where it is kept, a text and
a trace for Perfetto (ui.perfetto.dev).

    kind   what
    run    a thread was given the baton
    send, arrive, hang up, lost   of a message or a connection
    fault  what the nemesis, or the test, did
    note   what a process said by Simulation.note()
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

TEXT_COLUMN = 12 + 2 + 32 + 2 + 8 + 2  # where the text of a line begins
NOT_KEPT = "no events were kept: Simulation(seed, keep=True) keeps them"


@dataclass(frozen=True)
class Happening:
    """One event: when, in seconds of the simulation, in which process and thread, what."""

    time_s: float
    process: str
    thread: str
    kind: str
    text: str

    def __str__(self) -> str:
        where = f"{self.process}/{self.thread}" if self.thread else self.process
        text = self.text.replace("\n", "\n" + " " * TEXT_COLUMN)
        return f"{self.time_s:12.6f}  {where:32}  {self.kind:8}  {text}"


class Timeline:
    """All events in their order. `keep`: not only their digest."""

    def __init__(self, keep: bool) -> None:
        self.happenings: list[Happening] | None = [] if keep else None
        self._digest = hashlib.blake2b(digest_size=16)

    @property
    def digest(self) -> str:
        """Equal for two runs in which the same happened in the same order, at the same times."""
        return self._digest.hexdigest()

    def thread(self, time_s: float, number: int, process: str, name: str) -> None:
        """A thread goes on."""
        self._digest.update(b"%r %d\n" % (time_s, number))
        if self.happenings is not None:
            self.happenings.append(Happening(time_s, process, name, "run", "goes on"))

    def note(self, time_s: float, process: str, kind: str, text: str) -> None:
        """Something else."""
        self._digest.update(f"{time_s!r} {process} {kind} {text}\n".encode())
        if self.happenings is not None:
            self.happenings.append(Happening(time_s, process, "", kind, text))

    def text(self, runs: bool = False) -> str:
        """A line an event; those of threads that go on only where `runs` says so. One line that
        says so where none were kept.
        """
        if self.happenings is None:
            return NOT_KEPT
        kept = self.happenings
        return "\n".join(str(each) for each in kept if runs or each.kind != "run")

    def write_trace(self, path: str | Path) -> None:
        """A file that Perfetto and chrome://tracing show: a track for each thread."""
        kept = self.happenings or []
        processes: dict[str, int] = {}
        threads: dict[tuple[str, str], int] = {}
        events: list[dict[str, object]] = []
        for each in kept:
            pid = processes.setdefault(each.process, len(processes) + 1)
            tid = threads.setdefault((each.process, each.thread), len(threads) + 1)
            events.append(
                {
                    "name": each.text,
                    "cat": each.kind,
                    "ph": "i",
                    "s": "t",
                    "ts": each.time_s * 1e6,
                    "pid": pid,
                    "tid": tid,
                }
            )
        for name, pid in processes.items():
            events.append({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}})
        for (process, name), tid in threads.items():
            events.append(
                {
                    "name": "thread_name",
                    "ph": "M",
                    "pid": processes[process],
                    "tid": tid,
                    "args": {"name": name or "events"},
                }
            )
        Path(path).write_text(json.dumps({"traceEvents": events}))

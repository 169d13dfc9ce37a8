"""Where tensors wait for their receivers: one table at each source. No I/O, no clock; whoever owns
it hands the lock in.

    step -> (destination, key) -> entry         destination: the number of a task (names.py)

    entry   put()      ask()      its request ends unanswered  all tensors of its request are there
    (none)  ready      wanted
    ready   Duplicate  held
    wanted  held       replaces   (none)
    held    Duplicate  replaces   ready                        taken: the tensors go, the entry
                                                               stays
    taken   Duplicate  Duplicate

A request names one key or more and is answered when all their tensors are there: one that comes
early waits. Then take() takes them, in the thread that also ends requests: so what ends unanswered
has taken nothing. A tensor is taken at most once; that of a request that ended before it was
answered (deadline, lost or cancelled receiver) is ready again.

One that names a key of another that still waits replaces it: a receiver whose deadline has passed
may ask again before the end of its first request is known here. Should somebody wait for the first
one still, that is told Duplicate.

    step  abort()    every request in it ends with the error, its tensors go, and what comes later
                     gets the error too
          cleanup()  the same for requests; then the step is forgotten, and its number may be used
                     anew
          met()      remembers which incarnation of a task took part: another one later is
                     TaskRestarted

Bounds: what waits (tensors and wanted keys) by count, tensors by bytes, entries in all and steps by
constants. Where there are too many steps or entries, the oldest steps in which nothing waits are
forgotten: what goes with them is the refusal of their duplicates, and that they were aborted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from prpc_engine.cluster.errors import Duplicate, StepAborted, TaskRestarted
from prpc_engine.errors import Backpressure
from shard import Future

TENSORS_MAX = 65536  # that wait: far beyond the cross edges of one step of one graph
BYTES_MAX = 8 << 30  # of them: as much as the slab may hold
STEPS_MAX = 4096  # remembered
ENTRIES_MAX = 1 << 20  # some 200 MiB of those that were taken

Tensor = NDArray[Any] | None  # None: a dead one


class TensorEntry:
    """What a step has under one key for one destination: its tensor, the request for it, or that it
    was taken.

    Changed by its Rendezvous alone, under the guard. States: the table at the file's head.
    """

    __slots__ = ("is_ready", "is_taken", "request", "tensor")

    def __init__(self) -> None:
        self.is_ready = self.is_taken = False  # ready and held ones have their tensor
        self.tensor: Tensor = None
        self.request: TensorRequest | None = None  # of wanted and held ones


class TensorRequest:
    """One receiver's request for tensors of one step. `answer` is not touched here: its owner
    completes it.
    """

    __slots__ = ("answer", "asker", "destination", "entries", "keys", "missing", "step")

    def __init__(self, step: int, destination: int, keys: Sequence[str], asker: object) -> None:
        self.step, self.destination, self.keys, self.asker = step, destination, keys, asker
        self.entries: list[TensorEntry] = []  # empty when it has ended
        self.missing = len(keys)
        self.answer = Future()


@dataclass
class Step:
    """What a rendezvous holds of one step: its tensors and receives by key, the incarnations of the
    tasks that take part, and why it was aborted, if it was.
    """

    entries: dict[tuple[int, str], TensorEntry] = field(default_factory=dict)
    incarnations: dict[int, int] = field(default_factory=dict)  # by number of the task
    error: str | None = None  # why it was aborted
    waiting: int = 0  # entries that are not taken


class Rendezvous:
    """Holds a task's tensors until their receivers ask for them, and requests until their tensors
    are there.

    guard        the lock of the table
    tensors_max  tensors and wanted keys that wait, in all steps
    bytes_max    of the tensors that wait

    Owned by a Server; thread-safe. put() and ask() raise Duplicate, StepAborted and Backpressure,
    met() TaskRestarted; met() and abort() raise Backpressure where STEPS_MAX steps all have
    something that
    waits. States: the tables at the file's head.
    """

    def __init__(
        self,
        guard: AbstractContextManager[Any],
        tensors_max: int = TENSORS_MAX,
        bytes_max: int = BYTES_MAX,
        steps_max: int = STEPS_MAX,
        entries_max: int = ENTRIES_MAX,
    ) -> None:
        self._guard = guard
        self._steps_max, self._entries_max = steps_max, entries_max
        self._tensors_max, self._bytes_max = tensors_max, bytes_max
        self._steps: dict[int, Step] = {}  # oldest first
        self._entries = 0
        self.waiting = 0  # tensors, and keys that are wanted
        self.nbytes = 0  # of the tensors

    @property
    def steps(self) -> int:
        """How many are remembered."""
        return len(self._steps)

    def met(self, step: int, number: int, incarnation: int, name: str) -> None:
        """That incarnation of a task takes part in the step. Raises TaskRestarted when it was
        another one before.
        """
        with self._guard:
            before = self._step(step).incarnations.setdefault(number, incarnation)
        if before != incarnation:
            raise restarted(step, name, before, incarnation)

    def put(self, step: int, destination: int, key: str, tensor: Tensor) -> TensorRequest | None:
        """A tensor is there. The request that can be answered now, if there is one: by take()."""
        size = 0 if tensor is None else tensor.nbytes
        with self._guard:
            there = self._living(step)
            entry = there.entries.get((destination, key))
            if entry is not None and (entry.is_ready or entry.is_taken):
                raise Duplicate(
                    f"{key!r} of step {step} was sent before: send one tensor a key and step, "
                    f"or cleanup({step})"
                )
            if size and self.nbytes + size > self._bytes_max:
                raise Backpressure(
                    f"{key!r} of step {step}, {size} bytes, was not sent: "
                    f"{self.nbytes} bytes wait for their receivers, "
                    f"{self._bytes_max} may; receive them, or cleanup() steps that are over, "
                    "or allow more by bytes_max"
                )
            if entry is None:
                self._make_room(there, step, key, 1)
                entry = self._enter(there, destination, key)
            entry.tensor, entry.is_ready = tensor, True
            self.nbytes += size
            request = entry.request
            if request is None:
                return None
            request.missing -= 1
            return None if request.missing else request

    def take(self, request: TensorRequest) -> list[Tensor] | None:
        """The tensors of a request that put() gave; None when it has ended since."""
        with self._guard:
            return self._take(request) if request.entries and not request.missing else None

    def ask(
        self, step: int, destination: int, keys: Sequence[str], asker: object
    ) -> tuple[TensorRequest, list[Tensor] | None, Iterable[TensorRequest]]:
        """A receiver wants these. The tensors when all are there, else None: put() will give them;
        and the requests that this one replaces, to be ended with Duplicate."""
        with self._guard:
            there = self._living(step)
            found = [there.entries.get((destination, key)) for key in keys]
            replaced: dict[TensorRequest, None] = {}
            for key, entry in zip(keys, found, strict=True):
                if entry is not None:
                    if entry.is_taken:
                        raise Duplicate(
                            f"{key!r} of step {step} was sent to its receiver before, "
                            "and a tensor is received once; if it did "
                            "not come there, as its connection was lost on the way, it is lost: "
                            "begin another step"
                        )
                    if entry.request is not None:
                        replaced[entry.request] = None
            if len(set(keys)) < len(keys):
                raise Duplicate(f"step {step}: one key twice in one request: {list(keys)!r:.100}")
            self._make_room(there, step, keys[0], found.count(None))
            if replaced:  # they have room for what this one takes over
                for one in replaced:
                    self._release(there, one)
                found = [there.entries.get((destination, key)) for key in keys]
            request = TensorRequest(step, destination, keys, asker)
            for key, entry in zip(keys, found, strict=True):
                entry = entry or self._enter(there, destination, key)
                entry.request = request
                request.entries.append(entry)
                request.missing -= entry.is_ready
            return request, None if request.missing else self._take(request), replaced

    def give_up(self, request: TensorRequest) -> None:
        """Nobody waits for its answer any more; again, or when it was answered: does nothing."""
        with self._guard:
            if request.entries:
                self._release(self._steps[request.step], request)

    def give_up_all(self, asker: object) -> list[TensorRequest]:
        """The same for all requests of one asker, which are returned."""
        with self._guard:
            found = dict.fromkeys(
                entry.request
                for there in self._steps.values()
                if there.waiting
                for entry in there.entries.values()
                if entry.request is not None and entry.request.asker is asker
            )
            for request in found:
                self._release(self._steps[request.step], request)
            return list(found)

    def abort(self, step: int, error: str) -> list[TensorRequest]:
        """The requests to end with it; none when it was aborted before."""
        with self._guard:
            there = self._step(step)
            if there.error is not None:
                return []
            ended = self._empty(there)
            there.error = error
            return ended

    def cleanup(self, step: int) -> list[TensorRequest]:
        """Forget a step; the requests in it, to be ended."""
        with self._guard:
            there = self._steps.pop(step, None)
            return [] if there is None else self._empty(there)

    def error(self, step: int) -> StepAborted | None:
        """Of a step that was aborted."""
        there = self._steps.get(step)
        return None if there is None or there.error is None else StepAborted(there.error)

    # -- under the guard ---------------------------------------------------------------------------

    def _step(self, step: int) -> Step:
        there = self._steps.get(step)
        if there is None:
            if len(self._steps) >= self._steps_max:
                self._forget_oldest()
            there = self._steps[step] = Step()
        return there

    def _living(self, step: int) -> Step:
        there = self._step(step)
        if there.error is not None:
            raise StepAborted(there.error)
        return there

    def _forget_oldest(self) -> None:
        oldest = next((number for number, one in self._steps.items() if not one.waiting), None)
        if oldest is None:
            raise Backpressure(
                f"tensors or requests wait in {len(self._steps)} steps, "
                f"and in {self._entries} entries in all; {self._steps_max} steps "
                f"and {self._entries_max} entries may: cleanup() steps that are over"
            )
        self._entries -= len(self._steps.pop(oldest).entries)

    def _make_room(self, there: Step, step: int, key: str, more: int) -> None:
        if self.waiting + more > self._tensors_max:
            raise Backpressure(
                f"{key!r} of step {step}: {self.waiting} tensors and requests wait already, "
                f"{self._tensors_max} may; receive them, or cleanup() steps that are over"
            )
        there.waiting += 1  # so that it is not what is forgotten
        try:
            while self._entries + more > self._entries_max:
                self._forget_oldest()
        finally:
            there.waiting -= 1

    def _enter(self, there: Step, destination: int, key: str) -> TensorEntry:
        there.waiting += 1
        self.waiting += 1
        self._entries += 1
        entry = there.entries[destination, key] = TensorEntry()
        return entry

    def _take(self, request: TensorRequest) -> list[Tensor]:
        tensors = [entry.tensor for entry in request.entries]
        for entry in request.entries:
            entry.is_taken, entry.is_ready, entry.tensor, entry.request = True, False, None, None
        there = self._steps[request.step]
        there.waiting -= len(tensors)
        self.waiting -= len(tensors)
        self.nbytes -= sum(tensor.nbytes for tensor in tensors if tensor is not None)
        request.entries = []
        return tensors

    def _release(self, there: Step, request: TensorRequest) -> None:
        for key, entry in zip(request.keys, request.entries, strict=True):
            entry.request = None
            if not entry.is_ready:
                del there.entries[request.destination, key]
                there.waiting -= 1
                self.waiting -= 1
                self._entries -= 1
        request.entries = []

    def _empty(self, there: Step) -> list[TensorRequest]:
        requests = list(
            dict.fromkeys(
                entry.request for entry in there.entries.values() if entry.request is not None
            )
        )
        for request in requests:
            request.entries = []
        self._entries -= len(there.entries)
        self.waiting -= there.waiting
        self.nbytes -= sum(
            entry.tensor.nbytes for entry in there.entries.values() if entry.tensor is not None
        )
        there.entries.clear()
        there.waiting = 0
        return requests


def restarted(step: int, name: str, before: int, now: int) -> TaskRestarted:
    """Two incarnations of one task in one step."""
    return TaskRestarted(
        f"step {step}: {name} was started again (incarnation {before:x} then, {now:x} now), "
        "and what the first one held is lost: "
        "begin another step"
    )

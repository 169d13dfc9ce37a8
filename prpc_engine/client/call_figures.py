"""What became of one client's calls: counted when a call fails, and for one in SAMPLE_EVERY when it
is answered, so that a call that just succeeds pays nothing for it.

    errors   {name of the error: calls, streams and notifications that ended with it}: after all
             attempts that were made
    latency  of one answered call in SAMPLE_EVERY, from when it was sent to when its answer was
             here, by powers of two
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from prpc_engine.rpc.timing import BUCKETS, MethodTiming
from shard import VALUE, Future, runtime

# a power of two. Noting one takes some 2 us: so 10 ns a call, where a call takes 4 us and more
SAMPLE_EVERY = 256


class CallFigures:
    """Counts the calls of one client that fail, by error, and times the answered ones that time()
    is given.

    clock: of the reactor that the calls are sent and timed by, in seconds. Owned by the client's
    Directory. Thread-safe: calls end in any thread. Units: the list at the file's head.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._guard = runtime.Lock()  # calls fail, and end, in any thread
        self._errors: Counter[str] = Counter()
        self._buckets = [0] * BUCKETS
        self._total_ns = 0

    def failed(self, error: BaseException) -> None:
        """A call has ended with it."""
        with self._guard:
            self._errors[type(error).__name__] += 1

    def time(self, call: Future) -> None:
        """Note how long a call took, once it is done."""
        call.when_done(self._note)

    def _note(self, call: Future) -> None:
        sent = getattr(call, "sent", 0.0)
        if call.finished != VALUE or not sent:
            return
        taken_ns = max(0, int((self._clock() - sent) * 1e9))
        with self._guard:
            self._buckets[min(taken_ns.bit_length(), BUCKETS - 1)] += 1
            self._total_ns += taken_ns

    @property
    def errors(self) -> dict[str, int]:
        """A snapshot, sorted by name."""
        with self._guard:
            return dict(sorted(self._errors.items()))

    @property
    def latency(self) -> MethodTiming:
        """A snapshot."""
        with self._guard:
            return MethodTiming(self._total_ns / 1e9, 0, tuple(self._buckets))

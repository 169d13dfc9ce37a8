"""How often a task did what: a counter for each verb, and the line that its log gets from them. No
I/O, no clock.

verb      counts
send      tensors that were sent here
receive   tensors that were asked for here
fused     of those, the ones that left with others in one request
request   requests for tensors that left here
answer    requests of other tasks that were answered here
abort     steps that were aborted here, by whichever task
"""

from __future__ import annotations

from dataclasses import dataclass, replace

# of the line: rates of a training job are steady for longer, and a log of a day has 1,440 of them
PERIOD_S = 60.0


@dataclass
class TensorVerbs:
    """Counts what one task has done, verb by verb, since it was made. Owned by a Server, which
    counts without a lock.

    What each verb counts: the table at the file's head.
    """

    send: int = 0
    receive: int = 0
    fused: int = 0
    request: int = 0
    answer: int = 0
    abort: int = 0

    def copy(self) -> TensorVerbs:
        """As it is now."""
        return replace(self)

    def rates_since(self, before: TensorVerbs, seconds: float) -> str:
        """Each verb's rate since then, "2.5 send/s, 0.1 abort/s"; "" when there was none."""
        counts = {verb: count - getattr(before, verb) for verb, count in vars(self).items()}
        return ", ".join(
            f"{count / seconds:.3g} {verb}/s" for verb, count in counts.items() if count
        )

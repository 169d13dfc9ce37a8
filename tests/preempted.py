"""One thread stands still between two bytecodes of its step, at each in turn, while another runs
its own: what random sleeps before statements find by luck or, within a statement, never.

    for case in preempted("prpc_engine.rpc.flow_control"):
        inbox = Inbox(...)
        case.run(lambda: inbox.put(0, "a"), lambda: taken(inbox))
        assert ...

Cases follow until the first step has fewer bytecodes than are to be let by. Only those of the
modules that are named count. A step that waits for a lock which the other one holds goes on with
it.

Python 3.10 changes threads at nearly any bytecode, later ones at calls and at the ends of loops.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

# After that the other thread is taken to wait for a lock: then both go on. One that is only late
# does so, too, which is a case like any.
BLOCKED_S = 0.05


class Preempted:
    """One run: the step stands still after so many bytecodes."""

    def __init__(self, after: int, modules: tuple[str, ...]) -> None:
        self.after = after
        self.was_reached = False
        self._modules = modules
        self._left = after
        self._other: threading.Thread | None = None
        self._errors: list[BaseException] = []

    def run(self, step: Callable[[], object], other: Callable[[], object]) -> None:
        """Run step() in this thread and other() in another one, which begins where step() stands
        still; after it, where it has no such place. Raises what either raises.
        """

        def run_other() -> None:
            try:
                other()
            except BaseException as error:
                self._errors.append(error)

        self._other = threading.Thread(target=run_other)
        before = sys.gettrace()
        sys.settrace(self._call)
        try:
            step()
        finally:
            sys.settrace(before)
            if not self.was_reached:
                self._other.start()
            self._other.join()
        for error in self._errors:
            raise error

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        if self.was_reached or frame.f_globals.get("__name__") not in self._modules:
            return None
        frame.f_trace_opcodes = True
        return self._step

    def _step(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "opcode" and not self.was_reached:
            if not self._left:
                self.was_reached = True
                assert self._other is not None
                self._other.start()
                self._other.join(BLOCKED_S)
            self._left -= 1
        return self._step


def preempted(*modules: str, every: int = 1, seed: int = 0) -> Iterator[Preempted]:
    """Cases until one was not reached: each is to be run once, with objects of its own. `every`: of
    so many places one, which the seed chooses.
    """
    after = seed % every
    while True:
        case = Preempted(after, modules)
        yield case
        if not case.was_reached:
            return
        after += every

"""An answer that comes later: a handler returns one, and whoever has the result answers, from any
thread or task.

    class Batches:
        def pull(self, batch):
            answer = prpc_engine.Deferred()
            self.waiting[batch] = answer
            return answer                         # the caller goes on waiting, by its own deadline

        def store(self, batch, rows):
            self.waiting.pop(batch).reply(rows)

One that is dropped unanswered is answered for it: its caller must not wait for nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

from prpc_engine.errors import BadArguments
from shard import Future, ShardError


class AnswerDropped(ShardError):
    """A handler returned a Deferred, and all references to it went without reply() or fail(). Or a
    function of a remote worker returned a future, and that happened to it. The caller gets a
    RemoteError, instead of waiting for ever.
    """


class Deferred(Future, weakref=True):
    """Stands for a handler's answer that comes later: the handler returns it, and reply() or fail()
    answers.

    ends_with_caller  it is cancelled when its caller's connection is lost, as nobody else gains by
                      the answer; else it goes on
    on_cancel         called with an error when its caller gives the call up, or the deadline
                      passes; True: it is answered nevertheless; None: it is cancelled
    if_dropped        the text of the error that its caller gets if it is dropped unanswered

    Any thread or task may answer. One that is dropped unanswered is answered with AnswerDropped.
    """

    ends_with_caller: bool = False
    on_cancel: Callable[[BaseException], bool] | None = None
    if_dropped: str = "the handler returned a Deferred and dropped it without reply() or fail()"

    def reply(self, value: Any) -> bool:
        """Answer with a value; False when it was answered or given up before."""
        return self.set_result(value)

    def fail(self, error: BaseException) -> bool:
        """Answer with an error, which the caller gets as RemoteError; False when it was answered or
        given up before. Raises BadArguments for what is no exception.
        """
        if not isinstance(error, BaseException):
            raise BadArguments(
                f"fail({error!r:.100}): an exception is allowed, such as RuntimeError('no room')"
            )
        return self.set_error(error)

    def __del__(self) -> None:
        if not self.done():
            self.set_error(AnswerDropped(self.if_dropped))


def canceller(
    answer: Future, cut: Callable[[BaseException], object]
) -> Callable[[BaseException], object]:
    """What ends a job by cut(error), and tells whoever holds its answer that nobody waits for it
    any more.

    It holds no Deferred itself: a handler may let go of its own, which is answered for then. An
    answer that is there already leaves: what it hands over was taken from where it was."""
    held: Callable[[], Future | None] = (
        ref(answer) if isinstance(answer, Deferred) else lambda: answer
    )

    def cancel(error: BaseException) -> None:
        there = held()
        if there is not None and there.finished:
            return
        if isinstance(there, Deferred) and there.on_cancel is not None and there.on_cancel(error):
            return
        cut(error)
        if there is not None:
            there.cancel(error)

    return cancel

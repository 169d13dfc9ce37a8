"""What a server does for its `once` methods: a call that comes again is answered, and not run.
once.py says which those are.

    the call                             what is done
    is of another method or peer         the server refuses it: Status.FORGOTTEN
    is running                           its answer goes over the newest connection that asked
    was answered                         the same bytes and blocks are sent again
    is not known, and may have run       the server refuses it: Status.FORGOTTEN
    is not known, and did not run        it runs
    waits in the queue and is dropped    that is as if it had never come

Connections of one caller are ordered by their number here: the caller made the later one after it
had lost those before.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prpc_engine.archive import handovers_in
from prpc_engine.errors import text_of
from prpc_engine.rpc.failure_codes import failure_message
from prpc_engine.rpc.job import Caller, Job, pass_on_interrupt
from prpc_engine.rpc.message import HEADER, REPLY, Status
from prpc_engine.rpc.once import Identity, OnceWindow
from shard import PeerIdentity, PeerLostError, ShardError

logger = logging.getLogger("prpc")
Answer = tuple[bytes, Sequence[NDArray[np.uint8]]]  # header and body, and blocks of our own


class Repeats:
    """Answers the calls of `once` methods that come again, and says which can neither be answered
    nor run.

    answers_max  answers kept, and `bytes_max` of them, as of OnceWindow

    Owned by one server; called in the reactor's thread. What is done with a call: the table at the
    file's head.
    """

    def __init__(self, answers_max: int, bytes_max: int) -> None:
        self.window: OnceWindow[Job, Answer] = OnceWindow(answers_max, bytes_max)
        self.answered = 0  # calls that came again and were not run again

    def answer(self, peer: Caller, call_id: int) -> bool:
        """Whether that call runs or ran here already: its caller has the answer, or will get it."""
        entry = self.window.find((peer.connection.peer_name, call_id))
        if entry is None:
            return False
        if entry.running is not None:
            _move(entry.running, peer)
        elif entry.answer is not None:
            _send(peer, *entry.answer)
        else:
            return False
        self.answered += 1
        return True

    def refusal(self, peer: Caller, call_id: int, key: int, is_repeat: bool) -> str | None:
        """Why that call can neither be run, since it may have been before, nor be answered; None:
        it can.
        """
        connection = peer.connection
        call = connection.peer_name, call_id
        entry = self.window.find(call)
        if entry is not None:
            first_key, first = entry.asked
            if first_key != key or not _is_the_same(first, connection.peer_identity):
                return (
                    f"call {call_id} was of another method, or of a peer that proved to be "
                    "somebody else"
                )
        return self.window.refusal(call, is_repeat)

    def begin(self, job: Job) -> None:
        """It is taken on."""
        job.is_once = True
        self.window.begin(_identity(job), job, (job.key, job.peer.connection.peer_identity))

    def drop(self, job: Job) -> None:
        """It will not run."""
        self.window.drop(_identity(job))


class WayBack:
    """How a job of a `once` method is answered: over the newest connection of its caller, and the
    answer is kept for when the call comes again.
    """

    def __init__(self, repeats: Repeats, job: Job) -> None:
        self._window = repeats.window
        self._job = job

    def reply(self, call_id: int, value: Any) -> bool:
        """Answer with a value; False when it cannot be sent, which the caller is told."""
        peer = self._job.peer
        try:
            body, blocks = peer.decoder.encode(value)
            message = HEADER.pack(REPLY, 0, call_id, 0, 0) + body
            answer, nbytes = self._kept(message, blocks)
            peer.connection.send(message, blocks)
        except PeerLostError:
            pass  # who asked comes again
        except BaseException as error:  # of what its class does to be sent, too
            self.fail(call_id, Status.BAD_RESULT, type(error).__qualname__, text_of(error), "")
            pass_on_interrupt(error, peer.reactor)
            return False
        self._window.answered(_identity(self._job), answer, nbytes, peer.reactor.clock())
        return True

    def fail(self, call_id: int, status: Status, name: str, text: str, more: str) -> None:
        """Answer that there is no value, and why."""
        peer = self._job.peer
        message = failure_message(peer.decoder, call_id, status, name, text, more)
        _send(peer, message, ())
        self._window.answered(_identity(self._job), *self._kept(message, ()), peer.reactor.clock())

    def _kept(
        self, message: bytes, blocks: Sequence[NDArray[np.uint8]]
    ) -> tuple[Answer | None, int]:
        """What to keep, and its bytes. The blocks are copied, as they are the handler's, and it may
        change them.
        """
        nbytes = len(message) + sum(block.nbytes for block in blocks)
        if nbytes > self._window.answer_bytes_max or handovers_in(blocks):
            return None, 0
        return (message, [block.copy() for block in blocks]), nbytes


def _is_the_same(one: PeerIdentity, other: PeerIdentity) -> bool:
    """Whether both proofs can be of one node, whose later connection may take another transport:
    only tcp has certificates.
    """
    return one.secret == other.secret and (
        one.subjects == other.subjects or not (one.subjects and other.subjects)
    )


def _identity(job: Job) -> Identity:
    return job.peer.connection.peer_name, job.call_id


def _move(job: Job, peer: Caller) -> None:
    """Its caller waits at that peer now, unless at a newer one."""
    if peer.number > job.peer.number:
        if job.peer.running.get(job.call_id) is job:
            del job.peer.running[job.call_id]
            peer.running[job.call_id] = job
        job.peer = peer


def _send(peer: Caller, message: bytes, blocks: Sequence[NDArray[np.uint8]]) -> None:
    try:
        peer.connection.send(message, blocks, True)
    except PeerLostError:
        pass  # it comes again
    except ShardError as error:
        logger.warning("%s was not told how a call ended: %s", peer.connection.peer, str(error))

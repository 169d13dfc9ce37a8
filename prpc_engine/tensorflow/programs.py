"""What a task runs of the steps of others in the plane "sendrecv": all of its part of a step for
one request.

    verb     arguments                         answer            what it does
    program  stages with what each gets and    [0, handle];      remembers them
             gives: see unpack_block()         [code, text]
    step     handle, step, timeout in          [0,               asks for all that its stages are
             seconds, steps that are over,     RunMetadata...];  fed, at once; runs each when it is
             RunOptions to trace it by or b""  [code, text]      all there, in their order
    give_up  steps                             [0]               those that go on end with Cancelled

    a step   begins                             ends
    goes on  step                               its last stage has run; a stage, or a value, failed;
                                                give_up; the task that began it is lost
    ended    its values may still be asked for  it is told to be over; give_up; the task that began
                                                it is lost

Nothing here waits in a thread: the future of what comes next goes on, in the reactor's turn where
the stage takes little time.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from numpy.typing import NDArray
from tensorflow.python.framework import errors_impl as tf_errors

from prpc_engine import errors as engine_errors
from prpc_engine.cluster.names import device
from prpc_engine.cluster.receipt import Receipt
from prpc_engine.cluster.server import Server
from prpc_engine.rpc.deferred import Deferred
from prpc_engine.rpc.peer import Peer, calling_peer
from prpc_engine.tensorflow import errors, tensors
from prpc_engine.tensorflow.stages import RUNS_AT_ONCE_MAX, Registered, Stages
from prpc_engine.tensorflow.threads import DaemonThreads, StageThreads
from prpc_engine.tensorflow.transfers import StageBlock
from shard import Future, ShardError

PROGRAM, STEP, GIVE_UP = "tf.program", "tf.step", "tf.give_up"


class _Block(NamedTuple):
    stage: Registered
    receives: list[tuple[str, list[str], list[str]]]  # of which task, which keys, their kinds
    feeds: list[str]
    fetches: list[str]
    sends: list[tuple[str, str, bool]]  # to which task, which key; a token


def pack_block(block: StageBlock, handle: int) -> list[Any]:
    """What program() is given of it; `handle`: of its stage."""
    receives = [[device(one.source), one.keys, one.kinds] for one in block.receives]
    return [
        handle,
        receives,
        block.feeds,
        block.fetches,
        [[device(to), key, token] for to, key, token in block.sends],
    ]


@dataclass(frozen=True)
class ProgramsStatistics:
    """A snapshot of the programs that a task runs for steps of other tasks' sessions."""

    programs: int
    steps: int
    running: int  # now


class Programs:
    """Runs a task's part of the steps of others, in the plane "sendrecv": all its stages of a step
    for one request.

    stages   where the stages of programs were registered
    engine   gives the task's Server, which exists only after this
    threads  run stages that take longer than a turn may; shut down by close(). None: of its own

    Owned by a task's server, which closes it; its verbs run in the reactor's thread. A verb that
    fails answers [code, text]. Verbs, and how a step ends: the tables at the file's head.
    """

    def __init__(
        self, stages: Stages, engine: Callable[[], Server], threads: StageThreads | None = None
    ) -> None:
        self._stages, self._engine = stages, engine
        self._threads = threads or DaemonThreads(RUNS_AT_ONCE_MAX, "prpc-program")
        self._handles = itertools.count(secrets.randbits(40) << 20)
        self._guard = threading.Lock()  # of the next three: stages are freed in another thread
        self._programs: dict[int, list[_Block]] = {}
        self._by_content: dict[str, int] = {}  # the next session of a worker has the same ones
        self._by_stage: dict[int, set[str]] = {}  # contents that a stage is part of
        self._running: dict[int, _Run] = {}  # by step
        self._ended: dict[int, Peer | None] = {}
        self._steps = 0

    @property
    def verbs(self) -> dict[str, Callable[..., Any]]:
        """By name, for the server."""
        return {PROGRAM: self.program, STEP: self.step, GIVE_UP: self.give_up}

    def statistics(self) -> ProgramsStatistics:
        """A snapshot."""
        return ProgramsStatistics(len(self._programs), self._steps, len(self._running))

    def program(self, packed: Sequence[Any]) -> list[Any]:
        """Remember the stages of a program; [0, its handle], or [code, text] where one is not
        registered here.
        """
        blocks = []
        content = repr(packed)
        with self._guard:  # a stage that is found here is forgotten later
            for handle, receives, feeds, fetches, sends in packed:
                stage = self._stages.find(handle)
                if stage is None:
                    return [
                        tf_errors.ABORTED,
                        f"no graph of handle {handle} is registered here: "
                        "the task was started again",
                    ]
                blocks.append(
                    _Block(
                        stage,
                        [tuple(one) for one in receives],
                        feeds,
                        fetches,
                        [tuple(one) for one in sends],
                    )
                )
            known = self._by_content.get(content)
            if known is None:
                known = self._by_content[content] = next(self._handles)
                self._programs[known] = blocks
                for one in packed:
                    self._by_stage.setdefault(one[0], set()).add(content)
        return [0, known]

    def forget(self, handles: Sequence[int]) -> None:
        """Stages are gone; programs of them are not told again to anybody. Those that run go on."""
        with self._guard:
            for handle in handles:
                for content in self._by_stage.pop(handle, ()):
                    known = self._by_content.pop(content, None)
                    if known is not None:
                        del self._programs[known]

    def step(
        self, handle: int, step: int, timeout_s: float, over: Sequence[int], options: bytes
    ) -> list[Any] | Deferred:
        """Run a program in a step; once its last stage has run [0, RunMetadata...], or [code, text]
        where it fails.

        timeout_s  that the step has left, in seconds
        over       steps that are over, and forgotten first
        options    RunOptions to trace it by; b"": it is not traced
        """
        self._forget(over)
        blocks = self._programs.get(handle)
        if blocks is None:
            return [
                tf_errors.ABORTED,
                f"no program of handle {handle} is registered here: the task was started again",
            ]
        self._steps += 1
        run = self._running[step] = _Run(
            blocks, step, self._engine(), self._threads, calling_peer(), options
        )
        run.answer.when_done(lambda _: self._over(run))
        run.start(timeout_s)
        return run.answer

    def _over(self, run: _Run) -> None:
        self._ended[run.step] = run.peer
        self._running.pop(run.step, None)
        run.ended()
        if run.is_forgotten:  # by who did not find it among those that have ended yet
            self._forget([run.step])

    def give_up(self, steps: Sequence[int]) -> list[Any]:
        """End those of these steps that go on with Cancelled, and forget them all; [0]."""
        for step in steps:
            run = self._running.get(step)
            if run is not None:
                run.is_forgotten = True
                run.end(tf_errors.CANCELLED, f"step {step} was given up by the task that began it")
        self._forget(steps)
        return [0]

    def _forget(self, steps: Sequence[int]) -> None:
        for step in steps:
            if self._ended.pop(step, self) is not self:
                _clean_up(self._engine(), step)

    def peer_lost(self, peer: Peer) -> None:
        """What it began is given up."""
        self.give_up([run.step for run in list(self._running.values()) if run.peer is peer])
        self._forget([step for step, beginner in self._ended.copy().items() if beginner is peer])

    def close(self) -> None:
        """Give up what goes on."""
        for run in list(self._running.values()):
            run.end(tf_errors.CANCELLED, f"step {run.step} was given up: its task was stopped")
        self._threads.shutdown(wait=False)


class _Run:
    """One step. One thread at a time goes on with it; any may end it."""

    def __init__(
        self,
        blocks: list[_Block],
        step: int,
        engine: Server,
        threads: StageThreads,
        peer: Peer | None,
        options: bytes,
    ) -> None:
        self.answer = Deferred()
        self.step, self.peer = step, peer
        self.is_forgotten = False  # its values are asked for no more
        self._options = options  # b"": it is not traced
        self._told: list[bytes] = []  # RunMetadata of its stages
        self._engine, self._threads = engine, threads
        self._blocks = blocks
        self._receipts: list[list[Receipt]] = []  # of each block
        self._next_block = self._next_receipt = 0
        self._values: dict[str, NDArray[Any]] = {}

    def start(self, timeout_s: float) -> None:
        """Ask for everything, and run what can be run at once."""
        ask = self._engine.submit_recv_many
        try:
            for block in self._blocks:
                receipts: list[Receipt] = []
                self._receipts.append(receipts)
                for source, keys, _ in block.receives:
                    receipts.append(ask(keys, source=source, step=self.step, timeout_s=timeout_s))
        except (engine_errors.RpcError, ShardError) as error:
            self._fail(error)
            return
        self._go_on(None)

    def _go_on(self, _: Future | None, in_pool: bool = False) -> None:
        try:
            while not self.answer.done():
                if self._next_block == len(self._blocks):
                    self.answer.reply([0, *self._told])
                    return
                block, receipts = self._blocks[self._next_block], self._receipts[self._next_block]
                while self._next_receipt < len(receipts):
                    receipt = receipts[self._next_receipt]
                    if not receipt.finished:
                        receipt.when_done(self._go_on)
                        return
                    self._take(block.receives[self._next_receipt], receipt.result())
                    self._next_receipt += 1
                if not in_pool and (self._options or not block.stage.is_quick):
                    self._threads.submit(self._go_on, None, True)
                    return
                try:
                    self._run(block)
                finally:
                    # it was ended meanwhile: nobody asks for what this block sent
                    if self.answer.done():
                        _clean_up(self._engine, self.step)
                self._next_block, self._next_receipt = self._next_block + 1, 0
        except Exception as error:
            self._fail(error)

    def _take(self, request: tuple[str, list[str], list[str]], arrays: list[Any]) -> None:
        for key, kind, array in zip(request[1], request[2], arrays, strict=True):
            if array is not None:  # a token has none
                self._values[key] = tensors.from_array(array, kind)

    def _run(self, block: _Block) -> None:
        values = self._values
        feeds = [values[key] for key in block.feeds]
        if self._options:
            fetched, metadata = block.stage.traced(feeds, self._options)
            self._told.append(metadata)
        else:
            fetched = block.stage.fetched(feeds)
        values.update(zip(block.fetches, fetched, strict=True))
        send, step = self._engine.send, self.step
        for to, key, is_token in block.sends:
            send(
                key,
                None if is_token else tensors.to_array(values[key]),
                to=to,
                step=step,
                is_dead=is_token,
            )

    def _fail(self, error: Exception) -> None:
        if isinstance(error, (engine_errors.RpcError, ShardError)):
            error = errors.from_engine(error)
        self.end(*errors.told(error))

    def end(self, code: int, text: str) -> None:
        """Before its time; after it: does nothing."""
        self.answer.reply([code, text])

    def ended(self) -> None:
        """It was answered, or given up by who asked: in the latter case, whoever waits for its
        values hears of it, too.
        """
        if self._next_block == len(self._blocks):
            return
        for receipt in itertools.chain.from_iterable(self._receipts):
            receipt.cancel()
        _clean_up(self._engine, self.step)


def _clean_up(engine: Server, step: int) -> None:
    # the server was stopped: nothing is left of the step
    with contextlib.suppress(engine_errors.Closed):
        engine.cleanup(step)

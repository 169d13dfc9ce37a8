"""A task of a cluster: it listens at its control and data address, and exchanges named tensors with
the other tasks.

    state     start()                      stop()      join(), send(), recv(), ...
    NEW       STARTED; NEW when it fails   STOPPED     Closed
    STARTED   STARTED                      STOPPED     what they do
    STOPPED   Closed                       STOPPED     Closed; join() returns

There is no master: the ClusterSpec is the registry, and who listens where is found by control.py
and link.py. All of it lives in this process, but for the communication shards that endpoint.py
starts where somebody asks for them.

Receive-driven: send() puts a tensor into the table here (rendezvous.py), where it waits until its
receiver asks for it. Arrays from prpc_engine.empty() are not copied, and over shared memory the
receiver reads that very memory; others are copied once.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import index
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prpc_engine import errors
from prpc_engine.cluster.config import ServerConfig
from prpc_engine.cluster.control import ABORT, RECEIVE, told_of
from prpc_engine.cluster.endpoint import Endpoint, Place, node_config, place_from
from prpc_engine.cluster.errors import Duplicate, StepAborted
from prpc_engine.cluster.fuse import FuseCollector
from prpc_engine.cluster.late import Late
from prpc_engine.cluster.link import Errand, Link, LinkStatistics, Settle
from prpc_engine.cluster.links import Links
from prpc_engine.cluster.names import Names, device, plan_of, who_am_i
from prpc_engine.cluster.receipt import Message, Receipt
from prpc_engine.cluster.rendezvous import TENSORS_MAX, Rendezvous, Tensor, TensorRequest, restarted
from prpc_engine.cluster.resumed import resume
from prpc_engine.cluster.verbs import PERIOD_S, TensorVerbs
from prpc_engine.node import slab
from prpc_engine.rpc.call import TIMEOUT_S
from prpc_engine.rpc.peer import Peer, calling_peer
from prpc_engine.service.shard_statistics import TIMEOUT_S as FIGURES_TIMEOUT_S
from prpc_engine.service.shard_statistics import NodeFigures, ShardFigures
from prpc_engine.settings.cluster_spec import ClusterSpec
from prpc_engine.settings.config import check_timeout
from prpc_engine.settings.endpoint_map_file import load_data_endpoints
from prpc_engine.settings.network import NetworkSettings
from shard import Future, SlabStatistics, runtime

PROTOCOLS = ("prpc", "grpc++")  # two names of one
STEP_MAX = (1 << 63) - 1
KEY_CHARS_MAX = 1024  # what TensorFlow makes of devices, edge, frame and iteration is some 200
KEYS_MAX = 4096  # of one request: as many arrays as one message may have
# up to here a copy of its own is cheaper than one on the slab: it travels within the message
COPY_BYTES_MAX = 16 << 10
ABORT_TIMEOUT_S = 5.0  # for all tasks to be told
JOIN_S_MAX = 2_000_000.0  # 23 days: what epoll can wait; None: for ever
ABORTS_AT_ONCE = 64  # each may need a connection, made by a thread

logger = logging.getLogger("prpc")


class State(enum.Enum):
    """Where a Server stands: before start(), after it, or after stop(). Events: the table at the
    file's head.
    """

    NEW = "new"
    STARTED = "started"
    STOPPED = "stopped"


@dataclass(frozen=True)
class ServerDef:
    """Which task of which cluster a Server is, and the protocol that was asked for."""

    cluster: ClusterSpec
    job_name: str
    task_index: int
    protocol: str


@dataclass(frozen=True)
class ServerStatistics:
    """What one asks first when it is stuck: what waits for whom, and what has gone where."""

    state: str
    rule: str  # by which data addresses are found: "file", "offset", "exchange"
    messages: int  # requests for tensors that left here
    tensors: int  # asked for by them
    fused: int  # of those, how many left with others in one message
    answers: int  # requests of other tasks that were answered here
    shards: int  # that answer those that come over tcp; 0: this process does
    shard_connections: tuple[int, ...]  # of each of them
    waiting: int  # tensors and requests in the table here
    waiting_bytes: int  # of the tensors
    # of tensors of others that came after their deadline here, and are kept for another recv() of
    # their step
    late_bytes: int
    steps: int  # remembered by the table
    links: Mapping[str, LinkStatistics]  # by device
    slab: SlabStatistics


class Server:
    """Makes this process one task of a cluster, which sends named tensors to the other tasks and
    receives theirs. Thread-safe. A context manager.

    cluster     a ClusterSpec, a dict as it takes, or None: as TF_CONFIG says
    job_name    which job this process is of; None: as TF_CONFIG says, or where only one is possible
    task_index  which of its tasks; None: as TF_CONFIG or TASK_INDEX says, or where only one is
                possible
    protocol    "prpc" or "grpc++", which mean the same
    config      see ServerConfig
    start       start() at once
    methods     more of what other tasks may ask(), by name; they run as the methods of any service

    Tasks are named by device, "/job:ps/task:0"; a step is a number from 0 on, and what the tasks do
    together under one. Raises ConfigError; and as start() does.

    States: the table at the file's head.
    """

    def __init__(
        self,
        cluster: ClusterSpec | Mapping[str, Any] | None = None,
        job_name: str | None = None,
        task_index: int | None = None,
        protocol: str = "prpc",
        config: ServerConfig | None = None,
        start: bool = True,
        methods: Mapping[str, Callable[..., Any]] | None = None,
    ) -> None:
        if protocol not in PROTOCOLS:
            raise errors.ConfigError(
                f"protocol={protocol!r}: {' and '.join(map(repr, PROTOCOLS))} are allowed, "
                "and mean the same"
            )
        config = ServerConfig() if config is None else config
        if not isinstance(config, ServerConfig):
            raise errors.ConfigError(
                f"config={config!r:.100}: ServerConfig(...) is expected, or None"
            )
        spec, task = who_am_i(cluster, job_name, task_index, os.environ)
        self.server_def = ServerDef(spec, task.job, task.index, protocol)
        node = node_config(config, task.job, len(spec.addresses))
        network = node.found_network()
        self.settings = NetworkSettings.for_task(spec, task.job, os.environ, network)
        for line in self.settings.unread:
            logger.warning("%s", line)
        self._endpoints, self._map_file = load_data_endpoints(
            spec, network["endpoint_map_folder"], self.settings.data_port_offset
        )
        self._names = Names(spec)
        self._task = device(task)
        self._number = self._names.number(self._task)
        plan, data = plan_of(spec, self._endpoints), self._endpoints.addresses.get(task)
        place = place_from(self._task, plan, spec.addresses[task], data, config, node)
        self._place = replace(place, tasks=told_of(spec, self._endpoints.addresses))
        self._fuses = self.settings.tensor_fuse
        self._changing = runtime.Lock()  # of the state
        self._table = Rendezvous(
            runtime.Lock(),  # any thread sends and receives, and so do handlers
            self.settings.flow_control_max or TENSORS_MAX,
            config.bytes_max,
        )
        self._late = Late(runtime.Lock(), config.bytes_max)  # receipts end in any thread
        self._methods: dict[str, Callable[..., Any]] = {
            **(methods or {}),
            RECEIVE: self._receive,
            ABORT: self._abort_here,
        }
        # whoever had asked for something is gone
        self.on_peer_lost: Callable[[Peer], None] = _ignore
        self._verbs = TensorVerbs()
        self._map_told = ""  # what was logged about the file last
        self.state = State.NEW
        if start:
            self.start()

    # -- life --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Listen. Raises AddressInUse, ConfigError, and Closed after stop()."""
        with self._changing:
            if self.state is State.STOPPED:
                raise self._stopped()
            if self.state is State.NEW:
                self._at = Endpoint(self._place, self._methods, self._peer_lost)
                self._links = Links(
                    self._names,
                    self._endpoints.addresses,
                    self._at,
                    self._number,
                    self.settings.connection_timeout_s,
                    self._look_at_map,
                    self._check_started,
                )
                # the lock is of what is collected: any thread asks, and waits
                guard = runtime.Lock()
                self._collector = FuseCollector(self._fuses, self._at.driver, guard, self._leave)
                self._at.serve()
                self.state = State.STARTED
                self._at.driver.reactor.call_soon(
                    partial(self._log_verbs_later, self._verbs.copy())
                )

    @property
    def target(self) -> str:
        """Where this server's control port is: "prpc://host:port"."""
        return f"prpc://{self._at.address if self.state is State.STARTED else self._place.control}"

    def join(self, timeout_s: float | None = None) -> bool:
        """Serve from this thread until stop(), for `timeout_s` seconds at most; whether it was
        stopped. Raises ConfigError.
        """
        if timeout_s is not None:
            check_timeout(timeout_s, JOIN_S_MAX)
        if self.state is State.NEW:
            raise self._not_started()
        if self.state is State.STARTED:
            self._at.run(timeout_s)
        return self.state is State.STOPPED

    def stop(self) -> None:
        """Hang up on all tasks: what they wait for here fails with TaskLost, what waits here with
        Closed. Again: does nothing.
        """
        with self._changing:
            before, self.state = self.state, State.STOPPED
            if before is not State.STARTED:
                return
            self._links.close()
            self._collector.end(None, self._stopped())
            self._at.driver.stop_running()
            self._at.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _stopped(self) -> errors.Closed:
        return errors.Closed(f"{self._task} was stopped here: make another Server")

    def _not_started(self) -> errors.Closed:
        return errors.Closed(f"{self._task} was not started: start() it first")

    def _check_started(self) -> None:
        if self.state is not State.STARTED:
            raise (self._stopped() if self.state is State.STOPPED else self._not_started())

    def statistics(self) -> ServerStatistics:
        """A snapshot."""
        return ServerStatistics(
            state=self.state.value,
            rule=self._endpoints.rule,
            messages=self._verbs.request,
            tensors=self._verbs.receive,
            fused=self._verbs.fused,
            answers=self._verbs.answer,
            shards=self._at.living_shards if self.state is State.STARTED else 0,
            shard_connections=self._at.shard_connections if self.state is State.STARTED else (),
            waiting=self._table.waiting,
            waiting_bytes=self._table.nbytes,
            late_bytes=self._late.nbytes,
            steps=self._table.steps,
            links={} if self.state is State.NEW else self._links.statistics(),
            slab=slab.default_slab().statistics(),
        )

    def figures(self) -> NodeFigures:
        """Of what this process does itself: whom it talks to about tensors, and what it answers.
        Raises Closed.
        """
        self._check_started()
        return NodeFigures.of(self._at.data)

    def figures_of_shards(self, timeout_s: float = FIGURES_TIMEOUT_S) -> tuple[ShardFigures, ...]:
        """The same of each communication shard: they are asked, for `timeout_s` seconds at most.
        Raises Closed, ConfigError.
        """
        self._check_started()
        check_timeout(timeout_s)
        return self._at.figures_of_shards(timeout_s)

    def _log_verbs_later(self, before: TensorVerbs) -> None:
        def log() -> None:
            now = self._verbs.copy()
            rates = now.rates_since(before, PERIOD_S)
            if rates:
                logger.info("%s: %s in the last %.0f s", self._task, rates, PERIOD_S)
            self._log_verbs_later(now)

        self._at.driver.reactor.call_later(PERIOD_S, log)

    # -- tensors -----------------------------------------------------------------------------------

    def send(self, key: str, tensor: object, *, to: str, step: int, is_dead: bool = False) -> None:
        """Have a tensor ready for a task that receives `key` in that step. Never waits.

        An array of prpc_engine.empty() is sent as it is when its receiver asks; anything else is
        copied here. A dead tensor is None, sent with is_dead=True. Raises Duplicate, StepAborted,
        Backpressure, BadArguments, ConfigError, ShmFull.
        """
        self._check_started()
        step = _whole(step)
        _check_key(key)
        number = self._names.number(to)
        if is_dead != (tensor is None):
            raise errors.BadArguments(
                f"{key!r}: a dead tensor is None with is_dead=True, "
                "a living one an array with is_dead=False"
            )
        ready = self._table.put(step, number, key, None if is_dead else self._kept(key, tensor))
        self._verbs.send += 1
        if ready is not None:
            self._at.driver.reactor.call_soon(partial(self._answer, ready))

    def recv(self, key: str, *, source: str, step: int, timeout_s: float = TIMEOUT_S) -> Tensor:
        """The tensor that `source` sends here under `key` in that step; None for a dead one. It is
        read-only.

        Waits for it, and for `source` to come up, for `timeout_s` seconds at most. A tensor that
        was on its way when that was over is received by the next recv() of the same key and step.
        Raises DeadlineExceeded, TaskLost, TaskUnreachable, TaskRestarted, StepAborted, Duplicate,
        ConfigError, AuthenticationFailed."""
        tensor: Tensor = self.submit_recv(
            key, source=source, step=step, timeout_s=timeout_s
        ).result()
        return tensor

    def submit_recv(
        self, key: str, *, source: str, step: int, timeout_s: float = TIMEOUT_S
    ) -> Receipt:
        """The future of recv(): .result(), .done(), .cancel(), or await. The timeout counts from
        when the request leaves: at once, or with others (fuse.py)."""
        number, step = self._check_receive(source, step, timeout_s)
        _check_key(key)
        # failpoint: cluster.receiving
        return self._collector.receive(number, step, key, timeout_s)

    def recv_many(
        self, keys: Sequence[str], *, source: str, step: int, timeout_s: float = TIMEOUT_S
    ) -> list[Tensor]:
        """As recv(), of several tensors by one request: in order of `keys`, as soon as all are
        there.
        """
        tensors: list[Tensor] = self.submit_recv_many(
            keys, source=source, step=step, timeout_s=timeout_s
        ).result()
        return tensors

    def submit_recv_many(
        self, keys: Sequence[str], *, source: str, step: int, timeout_s: float = TIMEOUT_S
    ) -> Receipt:
        """The future of recv_many()."""
        number, step = self._check_receive(source, step, timeout_s)
        if (
            isinstance(keys, str)
            or not isinstance(keys, Sequence)
            or not 1 <= len(keys) <= KEYS_MAX
        ):
            raise errors.BadArguments(
                f"keys={keys!r:.100}: a list of 1 to {KEYS_MAX} of them is allowed"
            )
        for key in keys:
            _check_key(key)
        return self._collector.receive_many(number, step, list(keys), timeout_s)

    @contextlib.contextmanager
    def fuse(self, step: int) -> Iterator[None]:
        """Receives of that step leave together, one request a source: at the end of this, or when
        somebody waits for one.
        """
        self._check_started()
        step = _whole(step)
        self._collector.open(step)
        try:
            yield
        finally:
            self._collector.close(step)

    def abort(
        self, step: int, error: BaseException | str, timeout_s: float = ABORT_TIMEOUT_S
    ) -> tuple[str, ...]:
        """Give a step up everywhere: what waits in it at any task ends with StepAborted, and so
        does what comes later.

        Returns the tasks that could not be told within `timeout_s` seconds, which the log names
        too: one that is not there, or comes up later, hears of it when it asks somebody here."""
        self._check_started()
        step = _whole(step)
        check_timeout(timeout_s)
        what = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        text = f"step {step} was aborted by {self._task}: {what}"
        self._abort_here(step, text)
        deadline = runtime.monotonic() + timeout_s
        others, untold = (
            [number for number in range(len(self._names.tasks)) if number != self._number],
            [],
        )
        for first in range(0, len(others), ABORTS_AT_ONCE):
            links = [self._link(number) for number in others[first : first + ABORTS_AT_ONCE]]
            left_s = max(0.0, deadline - runtime.monotonic())
            told = [
                (
                    link,
                    link.submit(
                        ABORT,
                        f"the abort of step {step}",
                        lambda _: (step, text),
                        left_s,
                        is_patient=False,
                    ),
                )
                for link in links
            ]
            for link, errand in told:
                failure = errand.error()
                if failure is not None:
                    untold.append(link.task)
                    logger.warning(
                        "%s does not know that step %d was aborted: %s",
                        link.task,
                        step,
                        str(failure),
                    )
        return tuple(untold)

    def cleanup(self, step: int) -> None:
        """Forget a step that is over here: its tensors go, what still waits in it ends with
        StepAborted. Its number may be used again once all tasks have cleaned up."""
        self._check_started()
        step = _whole(step)
        text = f"step {step} was cleaned up at {self._task} while this waited"
        self._end_requests(self._table.cleanup(step), text)
        self._collector.end(step, StepAborted(text))
        self._late.forget(step)

    def ask(
        self,
        task: str,
        method: str,
        what: str,
        arguments: Callable[[int], tuple[Any, ...]],
        timeout_s: float,
        is_patient: bool = True,
    ) -> Errand:
        """Ask a task, this one too, for one of the `methods` of its Server; `what` is for texts,
        `arguments` is told the incarnation of the task, and what is patient waits while the task
        does not come up. Never waits itself; the errand ends as that of Link.submit(). Raises
        Closed, Backpressure, ConfigError."""
        self._check_started()
        return self._links.ask(task, method, what, arguments, timeout_s, is_patient)

    def is_connected(self, incarnation: int) -> bool:
        """As Endpoint.is_connected(); not before start()."""
        return self._at.is_connected(incarnation)

    def place_beside(self, name: str) -> Place:
        """Where another process of this task listens, and how: at any ports, with this task's plan
        and settings. Those of other tasks reach it once they meet() it.
        """
        anywhere = replace(self._place.control, port=0)
        return replace(self._place, task=name, control=anywhere, data=anywhere)

    def meet(self, name: str, task: str, port: int) -> None:
        """From now on ask() knows `name` too, which is a process beside that task: its control
        port, at the task's host. Again, with another port: it was started again. Raises Closed,
        ConfigError.
        """
        self._check_started()
        self._links.meet(name, task, port)

    # -- what others ask, in the reactor's thread --------------------------------------------------

    def _receive(
        self, step: int, keys: list[str], number: int, incarnation: int, wanted: int
    ) -> list[Tensor] | Future:
        """Tensors of `step` for task `number`; `wanted` is the incarnation that it takes us for."""
        if wanted != self._at.me.incarnation:
            raise restarted(step, self._task, wanted, self._at.me.incarnation)
        self._table.met(step, number, incarnation, device(self._names.tasks[number]))
        request, tensors, replaced = self._table.ask(step, number, keys, calling_peer())
        for one in replaced:
            key = next(key for key in one.keys if key in keys)
            one.answer.set_error(
                Duplicate(f"{key!r} of step {step} was asked for again: a tensor is received once")
            )
        if tensors is not None:
            self._verbs.answer += 1
            return tensors
        request.answer.when_done(lambda _: self._table.give_up(request))
        return request.answer

    def _answer(self, request: TensorRequest) -> None:
        tensors = self._table.take(request)
        if tensors is not None:  # else it has ended since, and they are ready for another
            self._verbs.answer += 1
            request.answer.set_result(tensors)

    def _peer_lost(self, peer: Peer) -> None:
        if self.state is not State.STOPPED:  # else we hung up, on all of them
            for request in self._table.give_up_all(peer):
                request.answer.set_result([])  # nobody is there to hear it
            self.on_peer_lost(peer)

    def _abort_here(self, step: int, text: str) -> None:
        self._verbs.abort += 1
        self._end_requests(self._table.abort(step, text), text)
        self._collector.end(step, StepAborted(text))
        self._late.forget(step)

    def _end_requests(self, requests: Sequence[TensorRequest], text: str) -> None:
        for request in requests:
            self._at.driver.reactor.call_soon(partial(request.answer.set_error, StepAborted(text)))

    # -- what we ask -------------------------------------------------------------------------------

    def _check_receive(self, source: str, step: int, timeout_s: float) -> tuple[int, int]:
        """The number of the source, and the step."""
        self._check_started()
        step = _whole(step)
        check_timeout(timeout_s)
        return self._names.number(source), step

    def _leave(self, message: Message) -> None:
        message.leave(self._send)

    def _send(self, message: Message) -> Future:
        error = self._table.error(message.step)
        # looked at only now: whoever aborts the step later finds the message under way
        if error is not None:
            raise error
        late = self._late.waits_for(message.number, message.step, message.keys)
        if late is None:
            return self._ask_for(message.number, message.step, message.keys, message.timeout_s)
        number, step, keys = message.number, message.step, message.keys
        what = (
            f"{_named(keys)} of step {step}, which was on its way from {self._link(number).task} "
            "before,"
        )
        driver = self._at.driver
        return resume(
            driver,
            driver.reactor,
            self._late,
            late,
            number,
            step,
            keys,
            what,
            self._ask_for,
            message.timeout_s,
        )

    def _ask_for(self, number: int, step: int, keys: Sequence[str], timeout_s: float) -> Errand:
        count = len(keys)
        self._verbs.request += 1
        self._verbs.receive += count
        if count > 1:
            self._verbs.fused += count
        link = self._link(number)

        def arguments(incarnation: int) -> tuple[Any, ...]:
            self._table.met(step, number, incarnation, link.task)
            return step, keys, self._number, self._at.me.incarnation, incarnation

        what = f"{_named(keys)} of step {step}"
        return link.submit(
            RECEIVE,
            what,
            arguments,
            timeout_s,
            straggle=partial(self._straggle, number, step, keys),
        )

    def _straggle(self, number: int, step: int, keys: Sequence[str]) -> Settle:
        straggler = self._late.expect(number, step, keys)
        if self._table.error(step) is not None:  # aborted: nobody will want them
            self._late.settle(straggler, None)
            return _ignore
        return partial(self._late.settle, straggler)

    def _link(self, number: int) -> Link:
        return self._links.to(number)

    def _look_at_map(self) -> None:
        """A task cannot be reached, or has another plan: perhaps somebody has written other
        addresses into .endpoint_map.
        """
        try:
            self._map_file.check_unchanged()
        except errors.ConfigError as error:
            if str(error) != self._map_told:
                self._map_told = str(error)
                logger.warning("%s", str(error))

    def _kept(self, key: str, tensor: object) -> NDArray[Any]:
        """The tensor as it is now: its owner may change it once send() returns, unless it asked for
        shared memory.
        """
        array = _array(key, tensor)
        if array.flags.c_contiguous and self._at.data.slab.block_of(array) is not None:
            return array
        if array.nbytes <= COPY_BYTES_MAX:
            return array.copy(order="C")
        copied = self._at.data.slab.empty(array.shape, array.dtype)
        copied[...] = array
        return copied


def _ignore(told: object) -> None:
    """The default of a callback: does nothing."""


def _named(keys: Sequence[str]) -> str:
    return repr(keys[0]) if len(keys) == 1 else f"{keys[0]!r} and {len(keys) - 1} more"


def _array(key: str, tensor: object) -> NDArray[Any]:
    try:
        array = np.asarray(tensor)
        if not array.dtype.hasobject:
            return array
        why = "its elements are objects"
    except (ValueError, TypeError) as error:
        # rows of different lengths, and what does not want to be one
        why = str(error)
    raise errors.BadArguments(
        f"{key!r} is {type(tensor).__name__}, no tensor: an array of numbers is expected; {why}"
    )


def _whole(step: Any) -> int:
    """The step as an int: TensorFlow's global step comes as one of numpy's."""
    try:
        number = step if type(step) is int else -1 if isinstance(step, bool) else index(step)
    except TypeError:
        number = -1
    if not 0 <= number <= STEP_MAX:
        raise errors.BadArguments(f"step={step!r}: a whole number from 0 to {STEP_MAX} is allowed")
    return number


def _check_key(key: object) -> None:
    if not isinstance(key, str) or not 1 <= len(key) <= KEY_CHARS_MAX:
        raise errors.BadArguments(
            f"key={key!r:.100}: a str of 1 to {KEY_CHARS_MAX} characters is allowed"
        )

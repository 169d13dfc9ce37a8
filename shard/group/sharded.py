"""State cut into one instance per shard: made in each shard by one factory, touched by nobody but
its shard.

    counters = Sharded(Counter)                     # Counter() in every shard, and again in one
                                                    that is restarted
    counters.invoke_on(1, Counter.add, 5).result()  # the instance of shard 1 adds
    total = counters.map_reduce(Counter.get, operator.add).result()

A Sharded can be sent to the shards: there `.local` is the shard's own instance, and invoke_on()
reaches the others.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Mapping
from types import CoroutineType, FunctionType
from typing import Any, Generic, TypeVar

from shard.checks import is_finite
from shard.errors import ClosedError, PeerLostError, ShardError
from shard.group.functions import FUNCTIONS_MAX, is_found_by_name
from shard.group.group import ShardGroup, the_open_group
from shard.group.group_end import Submit
from shard.group.mesh import is_answered_later
from shard.group.payload import RemoteTraceback, pickle_function, unpickle_function
from shard.group.process import CLEAN_UP_S, this_shard
from shard.loop.future import Future, gather
from shard.loop.task_class import in_class, marked_class

T = TypeVar("T")
Method = Callable[..., Any] | str

# For start() or stop() of one instance: it may read a file of some GB, and is under the time that a
# shard has to be up again (supervisor.py).
HOOK_TIMEOUT_S = 30.0
# beyond the time of a hook and that to cancel it, for the answer of a shard that is busy
ANSWER_S = 5.0
_numbers = itertools.count(1)  # of this application's Sharded objects
_MISSING = object()


class Sharded(Generic[T]):
    """A Sharded keeps one instance of a class in every shard, and calls methods of them there.

    Owned by the process that made it; close() ends the instances. `factory(*args, **keywords)` runs
    in every shard, and again in one that is restarted. A method is named by a function that takes
    the instance first, or by its name. Raises ShardError where there is no instance, or where a
    shard closes it.

    An instance's start(), where there is one, runs before its shard has others call it; its stop(),
    and then its close(), when the Sharded is closed, or its group, which has the instances of the
    latest Sharded stop first. start() and stop() may be coroutine functions. One that takes longer
    than `hook_timeout_s` seconds in a shard is cancelled and raises TimeoutError here, with the
    names of both: after start() nothing is left of the Sharded, and stop() is followed by close().
    In a shard that is restarted start() has 60 s at most, with all that this runs before it is up.
    """

    def __init__(
        self,
        factory: Callable[..., T],
        *args: Any,
        group: ShardGroup | None = None,
        hook_timeout_s: float = HOOK_TIMEOUT_S,
        **keywords: Any,
    ) -> None:
        """In `group`, or in the one group that is open in this process. Raises what a factory or a
        start() raises, TimeoutError for a start() that does not end, ValueError.
        """
        if not is_finite(hook_timeout_s, 0.0) or not hook_timeout_s:
            raise ValueError(
                f"hook_timeout_s={hook_timeout_s!r:.100}: seconds, more than 0, are allowed"
            )
        self._group: ShardGroup | None = group or the_open_group()
        self._number = next(_numbers)
        self._calls: dict[Method, _Call] = {}
        self._hook_timeout_s = hook_timeout_s
        self._name = getattr(factory, "__qualname__", repr(factory))
        self.size = self._group.size
        try:
            self._group.at_start(_create, self._number, pickle_function(factory), args, keywords)
            self._start()
            self._group.at_close(self._stop)
        except BaseException:
            # of an instance's close(): what went wrong first is what counts
            with contextlib.suppress(Exception):
                self._end(CLEAN_UP_S)
            raise

    def _start(self) -> None:
        assert self._group is not None
        hook_s = self._hook_timeout_s
        try:
            self._group.at_start(
                _start_instance, self._number, hook_s, timeout_s=hook_s + CLEAN_UP_S + ANSWER_S
            )
        except TimeoutError as error:
            if isinstance(error.__cause__, RemoteTraceback):
                raise  # it was cancelled there
            raise self._silence("start", str(error)) from None

    def _silence(self, hook: str, what: str) -> TimeoutError:
        """Of a shard that has not even told that the hook's time is over."""
        return TimeoutError(
            f"{what}: {hook}() of {self._name}, or another function there that does not await, "
            f"holds its reactor for more than hook_timeout_s={self._hook_timeout_s:g} s: have it "
            "await (`shard.run_blocking` for what blocks), or give Sharded() a longer "
            "hook_timeout_s"
        )

    def __getstate__(self) -> tuple[int, int]:
        return self._number, self.size

    def __setstate__(self, state: tuple[int, int]) -> None:
        self._number, self.size = state
        self._group = None
        self._calls = {}

    @property
    def local(self) -> T:
        """This shard's instance. Raises ShardError outside a shard, and after close()."""
        instance: T = _instance(self._number)
        return instance

    def invoke_on(self, index: int, method: Method, *args: Any, **keywords: Any) -> Future:
        """method(instance, *args, **keywords) in shard `index`; the future of its result."""
        try:
            call = self._calls.get(method) or self._call(method)
        except TypeError:  # it has no hash, so it carries state
            call = _Call(self._number, method)
        if self._group is not None:
            return self._group.submit_to(index, call, *args, **keywords)
        return this_shard().submit_to(index, call, *args, **keywords)

    def _call(self, method: Method) -> _Call:
        """The method as a function. One that is found by name is kept, and so sent once; any other
        goes with each call.
        """
        if not isinstance(method, str) and not (
            type(method) is FunctionType and is_found_by_name(method)
        ):
            return _Call(self._number, method)
        if len(self._calls) >= FUNCTIONS_MAX:
            self._calls.clear()
        call = self._calls[method] = _KnownCall(self._number, method)
        return call

    def invoke_on_all(self, method: Method, *args: Any, **keywords: Any) -> Future:
        """The same in every shard at once; the future of the list of results, in order of index."""
        futures = [self.invoke_on(index, method, *args, **keywords) for index in range(self.size)]
        return gather(futures, self._group.driver if self._group is not None else None)

    def map_reduce(
        self, mapper: Method, reducer: Callable[[Any, Any], Any], initial: Any = _MISSING
    ) -> Future:
        """mapper(instance) in every shard, folded here from shard 0 on as functools.reduce()
        does, in an engine thread.
        """
        start = () if initial is _MISSING else (initial,)
        whole = Future(self._group.driver if self._group is not None else None)

        def fold(mapped: Future) -> None:
            try:
                whole.set_result(functools.reduce(reducer, mapped.result(), *start))
            except BaseException as error:
                whole.set_error(error)
                if isinstance(error, KeyboardInterrupt):
                    raise  # it was meant for whoever turns the reactor

        self.invoke_on_all(mapper).add_done_callback(fold)  # the reducer is the application's
        return whole

    def close(self) -> None:
        """Drop the instances; one with a stop() or close() method has these called first. Raises
        the first error of those, TimeoutError for a stop() that does not end.
        """
        if self._group is None:
            raise ShardError("the process that made a Sharded closes it, not a shard")
        self._end(self._hook_timeout_s + CLEAN_UP_S + ANSWER_S)

    def _end(self, timeout_s: float) -> None:
        group = self._group
        assert group is not None
        if not group.closed:
            group.not_at_close(self._stop)
            group.not_at_start(_start_instance, self._number)
            group.not_at_start(_create, self._number, undo=_drop)
            submits = {
                index: functools.partial(_submit, group, index) for index in range(self.size)
            }
            self._drop_all(submits, timeout_s)

    def _stop(self, submits: Mapping[int, Submit]) -> None:
        """Its group is closed."""
        self._drop_all(submits, self._hook_timeout_s + CLEAN_UP_S + ANSWER_S)

    def _drop_all(self, submits: Mapping[int, Submit], timeout_s: float) -> None:
        """Drop the instances of those shards. Raises the first error, once all were waited for."""
        deadline = time.monotonic() + timeout_s
        dropped = {}
        for index, submit in submits.items():
            # gone, and its instance with it
            with contextlib.suppress(PeerLostError, ClosedError):
                dropped[index] = submit(_drop, (self._number, self._hook_timeout_s))
        first: BaseException | None = None
        for index, future in dropped.items():
            try:
                error = future.error(max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                error = self._silence("stop", f"shard {index} has not answered in {timeout_s:g} s")
            except ClosedError:
                break  # whoever owns the driver has closed it
            if isinstance(error, PeerLostError | ClosedError) and not isinstance(
                error.__cause__, RemoteTraceback
            ):
                continue  # the shard is gone; else the instance's close() raised it
            first = first or error
        if first is not None:
            raise first

    def __enter__(self) -> Sharded[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Call:
    """A method of a Sharded as a function that a shard can be sent."""

    def __init__(self, number: int, method: Method) -> None:
        self.number = number
        self.method = method
        if not isinstance(method, str) and (marked := marked_class(method)) is not None:
            in_class(marked)(self)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        instance = _instance(self.number)
        if isinstance(self.method, str):
            return getattr(instance, self.method)(*args, **keywords)
        return self.method(instance, *args, **keywords)

    def __reduce__(self) -> tuple[Any, ...]:
        return _received_call, (
            self.number,
            self.method if isinstance(self.method, str) else pickle_function(self.method),
        )


class _KnownCall(_Call):
    """One whose method is found by name: sent once, and then known by number."""

    is_sent_once = True


def _received_call(number: int, method: str | bytes) -> _Call:
    return _Call(number, method if isinstance(method, str) else unpickle_function(method))


def _create(
    number: int, pickled_factory: bytes, args: tuple[Any, ...], keywords: dict[str, Any]
) -> None:
    this_shard().sharded[number] = unpickle_function(pickled_factory)(*args, **keywords)


async def _start_instance(number: int, hook_timeout_s: float) -> None:
    instances = this_shard().sharded
    instance = instances.get(number)
    try:
        await _call_hook(instance, "start", hook_timeout_s)
    except BaseException:
        if instances.get(number) is instance:  # else it was dropped meanwhile
            instances.pop(number, None)
        raise


async def _drop(number: int, hook_timeout_s: float = HOOK_TIMEOUT_S) -> None:
    instance = this_shard().sharded.pop(number, None)
    try:
        await _call_hook(instance, "stop", hook_timeout_s)
    finally:
        close = getattr(instance, "close", None)
        if close is not None:
            close()


async def _call_hook(instance: Any, name: str, timeout_s: float) -> None:
    """Call it, and cancel it when it takes longer than that. Raises TimeoutError then."""
    hook = getattr(instance, name, None)
    if hook is None:
        return
    done = hook()
    if not is_answered_later(done):
        return
    shard = this_shard()
    task: Future = shard.reactor.spawn(done) if type(done) is CoroutineType else done
    what = f"{name}() of {type(instance).__qualname__} in shard {shard.index}"
    error = TimeoutError(
        f"{what} did not end within hook_timeout_s={timeout_s:g} s and was cancelled: what it "
        "awaits does not come; or give Sharded() a longer hook_timeout_s"
    )
    ended = False
    try:
        ended = await _wait(task, timeout_s)
    finally:
        if not ended:  # in time, or this is cancelled itself
            task.cancel(error)
            await _wait(task, CLEAN_UP_S)
    if not ended:
        raise error
    task.result()


async def _wait(task: Future, timeout_s: float) -> bool:
    """Whether it is done within that time. It goes on where this is cancelled."""
    over = Future()
    timer = this_shard().reactor.call_later(timeout_s, lambda: over.set_result(None))
    task.when_done(lambda _: over.set_result(None))
    try:
        await over
    finally:
        timer.cancel()
    return task.done()


def _submit(
    group: ShardGroup, index: int, function: Callable[..., Any], args: tuple[Any, ...]
) -> Future:
    return group.submit_to(index, function, *args)


def _instance(number: int) -> Any:
    try:
        return this_shard().sharded[number]
    except KeyError:
        raise ShardError(
            f"shard {this_shard().index} has no instance of this Sharded: it was closed"
        ) from None

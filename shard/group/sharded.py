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
from collections.abc import Callable
from types import FunctionType
from typing import Any, Generic, TypeVar

from shard.errors import ClosedError, PeerLostError, ShardError
from shard.group.functions import FUNCTIONS_MAX, is_found_by_name
from shard.group.group import ShardGroup, the_open_group
from shard.group.mesh import is_answered_later
from shard.group.payload import RemoteTraceback, pickle_function, unpickle_function
from shard.group.process import this_shard
from shard.loop.future import Future, gather
from shard.loop.task_class import in_class, marked_class

T = TypeVar("T")
Method = Callable[..., Any] | str

_numbers = itertools.count(1)  # of this application's Sharded objects
_MISSING = object()


class Sharded(Generic[T]):
    """A Sharded keeps one instance of a class in every shard, and calls methods of them there.

    Owned by the process that made it; close() ends the instances. `factory(*args, **keywords)` runs
    in every shard, and again in one that is restarted. An instance's start(), where there is one,
    runs before its shard has others call it; its stop(), and then its close(), when the Sharded is
    closed. start() and stop() may be coroutine functions. A method is named by a function that
    takes the instance first, or by its name. Raises ShardError where there is no instance, or where
    a shard closes it.
    """

    def __init__(
        self,
        factory: Callable[..., T],
        *args: Any,
        group: ShardGroup | None = None,
        **keywords: Any,
    ) -> None:
        """In `group`, or in the one group that is open in this process. Raises what a factory or a
        start() raises.
        """
        self._group: ShardGroup | None = group or the_open_group()
        self._number = next(_numbers)
        self._calls: dict[Method, _Call] = {}
        self.size = self._group.size
        try:
            self._group.at_start(_create, self._number, pickle_function(factory), args, keywords)
        except BaseException:
            # of an instance's close(): what went wrong first is what counts
            with contextlib.suppress(Exception):
                self.close()
            raise

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
        does.
        """
        start = () if initial is _MISSING else (initial,)
        whole = Future(self._group.driver if self._group is not None else None)

        def fold(mapped: Future) -> None:
            try:
                whole.set_result(functools.reduce(reducer, mapped.result(), *start))
            except Exception as error:
                whole.set_error(error)

        self.invoke_on_all(mapper).add_done_callback(fold)
        return whole

    def close(self) -> None:
        """Drop the instances; one with a close() method has that called first. Raises the first
        error of those.
        """
        group = self._group
        if group is None:
            raise ShardError("the process that made a Sharded closes it, not a shard")
        if not group.closed:
            group.not_at_start(_create, self._number, undo=_drop)
            dropped = []
            for index in range(self.size):
                # gone, and its instance with it
                with contextlib.suppress(PeerLostError, ClosedError):
                    dropped.append(group.submit_to(index, _drop, self._number))
            for future in dropped:
                try:
                    future.result()
                except (PeerLostError, ClosedError) as error:
                    # it is not gone: the instance's close() raised it
                    if isinstance(error.__cause__, RemoteTraceback):
                        raise

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


async def _create(
    number: int, pickled_factory: bytes, args: tuple[Any, ...], keywords: dict[str, Any]
) -> None:
    instance = unpickle_function(pickled_factory)(*args, **keywords)
    this_shard().sharded[number] = instance
    try:
        await _call_hook(instance, "start")
    except BaseException:
        del this_shard().sharded[number]
        raise


async def _drop(number: int) -> None:
    instance = this_shard().sharded.pop(number, None)
    try:
        await _call_hook(instance, "stop")
    finally:
        close = getattr(instance, "close", None)
        if close is not None:
            close()


async def _call_hook(instance: Any, name: str) -> None:
    hook = getattr(instance, name, None)
    if hook is not None:
        done = hook()
        if is_answered_later(done):
            await done


def _instance(number: int) -> Any:
    try:
        return this_shard().sharded[number]
    except KeyError:
        raise ShardError(
            f"shard {this_shard().index} has no instance of this Sharded: it was closed"
        ) from None

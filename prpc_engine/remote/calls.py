"""Calls of functions at other workers: what is sent, whom it is for, and what comes of it."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from prpc_engine import errors
from prpc_engine.client.client import RpcClient
from prpc_engine.node.slab import default_slab
from prpc_engine.remote import functions
from prpc_engine.remote.current import ValueAddress
from prpc_engine.remote.device_maps import DeviceMap
from prpc_engine.remote.devices import Devices
from prpc_engine.remote.future import Future
from prpc_engine.remote.members import AGAIN_S, Members
from prpc_engine.remote.options import timeout_of
from prpc_engine.remote.outcomes import Raised
from prpc_engine.remote.references import NOBODY, ForkId
from prpc_engine.rpc.call import Call
from prpc_engine.settings.config import check_seconds
from shard import CONTEXT, Driver
from shard import Future as EngineFuture

Passed = tuple[ValueAddress, ForkId]
OF_FUNCTIONS = frozenset({"run", "create"})  # verbs; the others are of methods


class _Destination(threading.local):
    """Of what this thread encodes: the incarnation of a worker, and the references in it so far."""

    to = NOBODY

    def __init__(self) -> None:
        self.passed: list[Passed] = []


def _ignore(_: object) -> None:
    """The default of a callback: does nothing."""


class RemoteCalls:
    """Makes the calls of one worker. Owned by it. Any thread may call.

    client  of the service that all workers serve; server ids are ranks
    """

    def __init__(
        self,
        members: Members,
        driver: Driver,
        rpc_timeout: float,
        may_pickle: bool,
        maps: DeviceMap,
        share_devices: bool = True,
        gpu_direct: bool = False,
    ) -> None:
        self.members = members
        self._has_maps = bool(maps)  # looked at for each call
        self.devices = Devices(maps, share_devices, gpu_direct, members, self.tell, default_slab())
        self.driver = driver
        self.client: RpcClient | None = None  # until this worker has joined
        self._rpc_timeout = rpc_timeout
        self._limit_s = timeout_of(None, rpc_timeout)
        self._may_pickle = may_pickle
        self._destination = _Destination()
        # told of references that were not sent after all, and of those in calls that failed
        self.take_back: Callable[[Sequence[Passed]], object] = _ignore
        self.may_be_lost: Callable[[Sequence[Passed]], object] = _ignore
        self._by_value: set[tuple[int, str]] = set()
        # A mark of each call that is under way: to add one and to take it out cost no lock. `begun`
        # need not be exact where threads count at a time, but is another number after each call.
        self._under_way: set[object] = set()
        self.begun = 0

    @property
    def under_way(self) -> int:
        """Calls of this worker that have not ended."""
        return len(self._under_way)

    @property
    def destination(self) -> int:
        """The incarnation of the worker that what this thread encodes is for; NOBODY: it is not
        known.
        """
        return self._destination.to

    def passed(self, address: ValueAddress, fork_id: ForkId) -> None:
        """A reference is in what this thread encodes."""
        destination = self._destination
        if destination.to != NOBODY:
            destination.passed.append((address, fork_id))

    def timeout(self, given: float | None) -> float | None:
        """Seconds that a verb has, None for no limit. Raises ConfigError."""
        return self._limit_s if given is None else timeout_of(given, self._rpc_timeout)

    @property
    def rpc_timeout(self) -> float:
        """Seconds of a verb that is given none; 0: no limit."""
        return self._rpc_timeout

    def set_rpc_timeout(self, seconds: float) -> None:
        """From the next verb on. Raises ConfigError."""
        check_seconds("seconds", seconds)
        self._limit_s = timeout_of(seconds, 0)
        self._rpc_timeout = float(seconds)

    def future(self) -> Future:
        """One whose waiting threads make the engine's progress."""
        return Future(self.driver)

    def call(
        self,
        rank: int,
        verb: str,
        header: tuple[Any, ...],
        function: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        timeout: float | None,
    ) -> Any:
        """What the function returns there; `function` None: the header says which. Raises what it
        raised, and the errors of a call.
        """
        arguments = self._packed(rank, verb, header, function, args, kwargs)
        limit_s = self._limit_s if timeout is None else self.timeout(timeout)
        client = self.client or self._open_client()
        sent_verb, keywords = verb, len(header) + (function is not None)
        if self._has_maps:
            sent_verb, arguments = self.devices.placed(rank, verb, arguments)
        mark = object()
        self._under_way.add(mark)
        self.begun += 1
        try:
            sent = self._sent(client.begin_to, rank, sent_verb, arguments, limit_s, keywords)
            value = sent.result()
        except errors.RpcError as error:
            # the same error, of a class that is both
            raise self._failed(error, rank, self._at(rank, function))  # noqa: B904
        finally:
            self._under_way.discard(mark)
        if type(value) is not Raised:
            return value
        if self._goes_by_value(rank, function, value):
            return self.call(rank, verb, header, function, args, kwargs, timeout)
        raise self._error(value, self._at(rank, function))

    def submit(
        self,
        rank: int,
        verb: str,
        header: tuple[Any, ...],
        function: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        timeout: float | None,
    ) -> Future:
        """The future of that."""
        outcome = Future(self.driver)
        arguments = self._packed(rank, verb, header, function, args, kwargs)
        limit_s = self.timeout(timeout)
        client = self.client or self._open_client()
        sent_verb, keywords = verb, len(header) + (function is not None)
        if self._has_maps:
            sent_verb, arguments = self.devices.placed(rank, verb, arguments)
        mark = object()
        self._under_way.add(mark)
        self.begun += 1
        try:
            sent = self._sent(client.submit_to, rank, sent_verb, arguments, limit_s, keywords)
        except BaseException as error:
            self._under_way.discard(mark)
            if not isinstance(error, errors.RpcError):
                raise
            raise self._failed(error, rank, self._at(rank, function))  # noqa: B904 - as above

        def answered(done: EngineFuture) -> None:
            try:
                come(done)
            finally:  # after what its callbacks have begun
                self._under_way.discard(mark)

        def come(done: EngineFuture) -> None:
            error = done.error()
            if error is not None:
                outcome.set_error(self._failed(error, rank, self._at(rank, function)))
                return
            value = done.result()
            if type(value) is not Raised:
                outcome.set_result(value)
            elif self._goes_by_value(rank, function, value):
                again = self.submit(rank, verb, header, function, args, kwargs, timeout)
                again.when_done(lambda _: again.pass_on(outcome))
            else:
                outcome.set_error(self._error(value, self._at(rank, function)))

        sent.when_done(answered)
        return outcome

    def _sent(
        self,
        begin: Callable[..., Call],
        rank: int,
        verb: str,
        arguments: Sequence[Any],
        limit_s: float | None,
        keywords: int,
    ) -> Call:
        """The call, begun. Where that raises, nothing was sent: the references in it, which their
        owners were told of, are taken back. Where it fails later, owners are told of that.
        `keywords`: their place in what is sent.
        """
        destination = self._destination
        destination.to = self.members.incarnations.get(rank, NOBODY)
        try:
            sent = begin(rank, verb, *arguments, timeout_s=limit_s)
            if destination.passed:
                sent.when_done(partial(self._carrier_ended, tuple(destination.passed)))
            return sent
        except errors.RpcError as error:
            if destination.passed:
                self.take_back(tuple(destination.passed))
            if isinstance(error, errors.BadArguments):
                _name_argument(error, None if self._has_maps else keywords)
            raise
        finally:
            destination.to = NOBODY
            if destination.passed:
                destination.passed.clear()

    def _carrier_ended(self, passed: Sequence[Passed], done: EngineFuture) -> None:
        """A call has ended that references travelled in."""
        error = done.error()
        if isinstance(error, errors.NotSent):
            self.take_back(passed)
        elif error is not None:
            self.may_be_lost(passed)

    def ask(self, rank: int, verb: str, *arguments: Any, timeout_s: float | None) -> Any:
        """The answer to a question about a value."""
        client = self._open_client()
        if self._has_maps:
            verb, arguments = self.devices.placed(rank, verb, arguments)
        mark = object()
        self._under_way.add(mark)
        self.begun += 1
        try:
            value = client.call_to(rank, verb, *arguments, timeout_s=timeout_s)
        except errors.RpcError as error:
            raise self._failed(error, rank, self.members.describe(rank))  # noqa: B904 - as above
        finally:
            self._under_way.discard(mark)
        if type(value) is Raised:
            raise self._error(value, self.members.describe(rank))
        return value

    def _failed(self, error: BaseException, rank: int, where: str) -> BaseException:
        """The error of a call, as torch's programs catch it."""
        if isinstance(error, errors.NoServer) and rank not in self.members.incarnations:
            return self.members.unknown(rank)
        return as_runtime_error(error, where)

    def _error(self, raised: Raised, where: str) -> BaseException:
        """What the function raised; one that cannot be made here is a RuntimeError, as torch's."""
        error = raised.error(where, self._may_pickle)
        return as_runtime_error(error) if type(error) is errors.RemoteError else error

    def tell(self, rank: int, verb: str, *arguments: Any) -> EngineFuture:
        """News of a reference, or of a device's memory, sent once. Raises Closed."""
        mark = object()
        self._under_way.add(mark)
        self.begun += 1
        # told in the middle of a handler, it would be given up with the call that is handled
        outer, CONTEXT.value = CONTEXT.value, None
        try:
            sent = self._open_client().submit_to(rank, verb, *arguments, timeout_s=None)
        except BaseException:
            self._under_way.discard(mark)
            raise
        finally:
            CONTEXT.value = outer
        sent.when_done(lambda _: self._under_way.discard(mark))
        return sent

    def tell_until_heard(
        self,
        rank: int,
        incarnation: int,
        verb: str,
        *arguments: Any,
        then: Callable[[bool], object] = _ignore,
    ) -> None:
        """News of that very worker's references that may be heard twice: told again until it is
        answered, while that worker is there and this side open. In the end then(True) is called
        if it was answered, else then(False).
        """

        def again() -> None:
            self.tell_until_heard(rank, incarnation, verb, *arguments, then=then)

        def answered(answer: EngineFuture) -> None:
            error = answer.error()
            is_there = self.members.incarnations.get(rank) == incarnation
            if error is not None and is_there and not isinstance(error, errors.Closed):
                reactor = self.driver.reactor
                reactor.call_soon(lambda: reactor.call_later(AGAIN_S, again))
            else:
                then(error is None)

        try:
            told = self.tell(rank, verb, incarnation, *arguments)
        except errors.RpcError:  # this side is closed
            then(False)
        else:
            told.when_done(answered)

    def _open_client(self) -> RpcClient:
        if self.client is None:
            raise as_runtime_error(errors.Closed("this worker is still joining its group"))
        return self.client

    def _packed(
        self,
        rank: int,
        verb: str,
        header: tuple[Any, ...],
        function: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
    ) -> tuple[Any, ...]:
        if function is None:
            if verb in OF_FUNCTIONS:  # else the header says which method
                raise errors.BadArguments("None is not callable: a function is expected")
            return (*header, kwargs or None, *args)
        name = functions.name_of(function)
        if name is None or (self._by_value and (rank, name) in self._by_value):
            if not callable(function):
                raise errors.BadArguments(
                    f"{function!r:.100} is not callable: a function is expected"
                )
            return (*header, function, kwargs or None, *args)
        return (*header, name, kwargs or None, *args)

    def _goes_by_value(self, rank: int, function: Any, raised: Raised) -> bool:
        """Whether a function was not called for want of its name there, and is to be sent itself
        from now on: one of `__main__`, where cloudpickle can.
        """
        name = functions.name_of(function) if function is not None else None
        if (
            name is None
            or not name.startswith("__main__:")
            or not raised.texts[0].endswith(functions.UnknownFunction.__qualname__)
            or (rank, name) in self._by_value
            or not self._may_pickle
        ):
            return False
        try:
            import cloudpickle  # noqa: F401
        except ImportError:
            return False
        self._by_value.add((rank, name))
        return True

    def _at(self, rank: int, function: Any) -> str:
        what = "" if function is None else f"{functions.text_of(function)!r} at "
        return what + self.members.describe(rank)


def _name_argument(error: errors.BadArguments, keywords: int | None) -> None:
    """Have an error name an argument as the caller does; `keywords`: the place of those in what is
    sent, None where that is all in one.
    """
    found = _ARGUMENT.match(str(error))
    if found is None:
        return
    place, rest, name = int(found[1]), found[2], "an argument"
    if keywords is not None:
        place -= keywords
        name = "the function" if place < 0 else f"args[{place - 1}]" if place else "kwargs"
    error.args = (name + rest, *error.args[1:])


_ARGUMENT = re.compile(r"argument (\d+)(.*)", re.DOTALL)  # as the archive's encoder names it


# -- errors as torch's programs catch them ---------------------------------------------------------

_both: dict[type[BaseException], type[BaseException]] = {}
_SERVER = re.compile(r"server \d+ of 'prpc\.remote'(?: \(rank \d+\))?")


def as_runtime_error(error: BaseException, where: str = "") -> BaseException:
    """The same error, of a class of the same name that is a RuntimeError, too: torch's raises that
    where a worker cannot be reached, dies, or answers too late. Its text begins with `where`.
    """
    if isinstance(error, RuntimeError) or not isinstance(error, errors.RpcError):
        return error
    kind: type[BaseException] = type(error)
    both = _both.get(kind)
    if both is None:
        names = {"__module__": kind.__module__, "__doc__": kind.__doc__, "__reduce__": _reduce}
        both = _both[kind] = type(kind.__name__, (kind, RuntimeError), names)
    error.__class__ = both  # type: ignore[assignment] # of the same layout
    if where and error.args:
        # the rank that a text of the client has is that of its node at the master
        text = _SERVER.sub("the worker", str(error.args[0]))
        error.args = (f"{where}: {text}", *error.args[1:])
    return error


def _reduce(error: BaseException) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    return _revive, (type(error).__mro__[1], error.args, dict(vars(error)))


def _revive(kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> Any:
    error = kind.__new__(kind, *args)
    error.args = args
    vars(error).update(state)
    return as_runtime_error(error)

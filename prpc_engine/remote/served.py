"""What a worker serves to the others of its group: functions, values, and news of references."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from inspect import isasyncgen, iscoroutine, isgenerator
from typing import Any

from prpc_engine import errors
from prpc_engine.remote import functions
from prpc_engine.remote.devices import VERBS, Devices
from prpc_engine.remote.functions import ValueGone
from prpc_engine.remote.future import Future, followed
from prpc_engine.remote.members import Members, UnknownWorker
from prpc_engine.remote.outcomes import Raised
from prpc_engine.remote.running import Runner
from prpc_engine.remote.values import Values
from prpc_engine.rpc.deferred import Deferred
from prpc_engine.rpc.method import idempotent

# results that are neither futures nor coroutines, which most are
_PLAIN = frozenset({type(None), bool, int, float, str, bytes, tuple, list, dict})
_NONE: Mapping[str, Any] = {}


class Served:
    """The methods that workers call. Owned by a Worker; they run where handlers do.

    `function` is a name or, where pickles are allowed, a function; `keywords` a dict or None.
    """

    def __init__(
        self,
        members: Members,
        values: Values,
        runner: Runner,
        devices: Devices,
        only_exposed: bool,
    ) -> None:
        self._devices = devices
        self._members = members
        self._name = members.name
        self._values = values
        self._runner = runner
        self._only_exposed = only_exposed
        self._found: dict[str, Callable[..., Any]] = {}

    # -- functions ---------------------------------------------------------------------------------

    def run(self, meant: str, function: Any, keywords: Any, *arguments: Any) -> Any:
        """What the function returns, or Raised. `meant`: the name of the worker that the caller
        means, which this one checks; "": the caller gave a rank alone.
        """
        if meant != self._name and meant:
            return self._raised(
                UnknownWorker(
                    f"worker {meant!r} has left or died: {self._name!r} has its rank, "
                    f"{self._members.rank}, now"
                )
            )
        name = function
        call = self._found.get(function) if type(function) is str else None
        if call is None:
            try:
                name, call = self._find(function)
            except Exception as error:
                return self._raised(error)
        return self._go(name, call, arguments, keywords or _NONE)

    def create(
        self,
        owner: int,
        creator: int,
        number: int,
        parent: int,
        fork: int,
        function: Any,
        keywords: Any,
        *arguments: Any,
    ) -> Any:
        """None once what the function returns or raises, or the future brings that it returns, is
        a value here: until then the deadline counts. Raised where it was not called.
        """
        try:
            self._check_owner(owner, creator, number)
            name, call = self._find(function)
        except Exception as error:
            return self._raised(error)
        value = self._values.enter((creator, number), (parent, fork))
        if value is None:  # it came again
            return None
        self._make(value, lambda: self._go(name, call, arguments, keywords or _NONE))
        return _once_made(value)

    def _find(self, function: Any) -> tuple[str, Callable[..., Any]]:
        if type(function) is str:
            found = self._found.get(function)
            if found is None:
                look_up = functions.find_exposed if self._only_exposed else functions.find
                found = self._found[function] = look_up(function)
            return function, found
        if self._only_exposed or not callable(function):
            raise errors.NotAllowed(
                f"{functions.text_of(function)!r} came by value: this worker serves functions that "
                "are exposed, by their names"
            )
        return functions.text_of(function), function

    def _go(
        self,
        name: str,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        keywords: Mapping[str, Any],
    ) -> Any:
        """What to answer: a value, or the future of it."""
        runner = self._runner
        if runner.slow and runner.is_slow(name):
            answer = Deferred()

            def work() -> None:
                try:
                    value = function(*arguments, **keywords)
                except BaseException as error:  # sys.exit(), or a wait for what was cancelled
                    value = self._raised(error)
                self._settle(value, answer)

            if runner.begin(name, work):
                return answer
        try:
            value = runner.run(name, function, arguments, keywords)
        except Exception as error:
            return self._raised(error)
        if type(value) in _PLAIN:
            return value
        if iscoroutine(value):
            return self._awaited(value)
        if isgenerator(value) or isasyncgen(value):
            if isgenerator(value):
                value.close()
            return self._raised(
                TypeError(f"{name!r} yields its results: return a list, or an RRef to an iterator")
            )
        if followed(value) is None:
            return value
        answer = Deferred()
        self._settle(value, answer)
        return answer

    def _settle(self, value: Any, answer: Deferred) -> None:
        """Answer with the value, or with what it brings if it is a future."""
        if type(value) not in _PLAIN:
            if iscoroutine(value):
                value.close()
                value = self._raised(TypeError("a function that blocks has returned a coroutine"))
            later = followed(value)
            if later is not None:
                answer.if_dropped = (
                    f"the function returned a {_kind_of(value)} that was dropped before it was "
                    "done: keep it until its result is set"
                )
                later.when_done(lambda done: self._settle(self._outcome(done), answer))
                return
        answer.reply(value)

    def _outcome(self, done: Any) -> Any:
        error = done.error()
        if error is None:
            return done.result()
        if not isinstance(error, Exception | SystemExit):  # a future that was cancelled
            error = errors.Cancelled(f"{type(error).__name__}: {errors.text_of(error)}")
        return self._raised(error)

    async def _awaited(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        try:
            return await self._runner.awaited(coroutine)
        except Exception as error:
            return self._raised(error)

    def _raised(self, error: BaseException) -> Raised:
        return Raised.of(error, not self._only_exposed)

    # -- values ------------------------------------------------------------------------------------

    @idempotent
    def fetch(self, owner: int, creator: int, number: int) -> Any:
        """The value, or Raised."""
        try:
            future = self._value(owner, creator, number)
        except ValueGone as error:
            return self._raised(error)
        return self._outcome(future) if future.finished else self._later(future, _itself)

    def method(
        self,
        owner: int,
        creator: int,
        number: int,
        name: str,
        keywords: Any,
        *arguments: Any,
    ) -> Any:
        """What that method of the value returns, or Raised."""
        try:
            future = self._value(owner, creator, number)
        except ValueGone as error:
            return self._raised(error)

        def call(value: Any) -> Any:
            return self._call_method(value, name, arguments, keywords or _NONE)

        if future.finished:
            value = self._outcome(future)
            return value if type(value) is Raised else call(value)
        return self._later(future, call)

    def create_by_method(
        self,
        owner: int,
        creator: int,
        number: int,
        name: str,
        new_creator: int,
        new_number: int,
        parent: int,
        fork: int,
        keywords: Any,
        *arguments: Any,
    ) -> Any:
        """As create(), of what that method of the value returns."""
        try:
            self._check_owner(owner, creator, number)
        except ValueGone as error:
            return self._raised(error)
        value = self._values.enter((new_creator, new_number), (parent, fork))
        if value is None:
            return None
        self._make(value, lambda: self.method(owner, creator, number, name, keywords, *arguments))
        return _once_made(value)

    def _value(self, owner: int, creator: int, number: int) -> Future:
        self._check_owner(owner, creator, number)
        return self._values.find((creator, number))

    def _check_owner(self, owner: int, creator: int, number: int) -> None:
        """The numbers of values are those of one owner, and begin again with the next worker that
        has its rank. Raises ValueGone.
        """
        members = self._members
        if owner != members.incarnation:
            raise ValueGone(
                f"value {number} of {members.named(creator)} went with its owner: "
                f"{members.describe(members.rank)} was started again since"
            )

    def _call_method(
        self, value: Any, name: str, arguments: Sequence[Any], keywords: Mapping[str, Any]
    ) -> Any:
        kind = type(value)
        if self._only_exposed:
            method = functions.exposed_method(value, name)
            if method is None:
                return self._raised(
                    errors.NotAllowed(
                        f"{kind.__qualname__}.{name} is not exposed: decorate the class, and the "
                        "one that defines the method, with @prpc_engine.remote.expose there"
                    )
                )
        else:
            try:
                method = getattr(value, name)
            except Exception as error:
                return self._raised(error)
        known = functions.full_name(kind)
        return self._go(f"{known}.{name}", method, arguments, keywords)

    def _later(self, future: Future, then: Callable[[Any], Any]) -> Deferred:
        """The answer to what waits for a value that is still being made."""
        answer = Deferred()

        def go_on(done: Future) -> None:
            value = self._outcome(done)
            try:
                value = value if type(value) is Raised else then(value)
            except BaseException as error:  # of a method, sys.exit() for one
                answer.fail(error)
                if isinstance(error, KeyboardInterrupt):
                    raise
                return
            self._settle(value, answer)

        future.add_done_callback(go_on)
        return answer

    def _make(self, future: Future, make: Callable[[], Any]) -> None:
        """The value of an RRef is what make() returns. Raises what that raises, which is told to
        all that wait for the value.
        """
        try:
            value = make()
        except BaseException as error:  # no Exception: sys.exit(), say
            self._keep(future, self._raised(error))
            raise
        self._keep(future, value)

    def _keep(self, future: Future, value: Any) -> None:
        """The value of an RRef is that, or what it brings."""
        if iscoroutine(value):
            value = self._runner.spawn(value)
        later = None if type(value) in _PLAIN else followed(value)
        if later is not None:
            later.when_done(lambda done: self._keep(future, self._outcome(done)))
        elif type(value) is Raised:
            where = self._members.describe(self._members.rank)
            future.set_error(value.error(where, not self._only_exposed))
        else:
            future.set_result(value)

    # -- devices -----------------------------------------------------------------------------------

    def mapped(self, rank: int, incarnation: int, back: Any, verb: str, arguments: Any) -> Any:
        """Another verb, for a caller whose device map for this worker has the inverse `back`."""
        if verb not in VERBS:
            raise errors.BadArguments(f"{verb!r:.40} is no verb of a worker with a device map")
        return self._devices.answer(getattr(self, verb)(*arguments), rank, incarnation, back)

    @idempotent
    def mapped_fetch(
        self, rank: int, incarnation: int, back: Any, owner: int, creator: int, number: int
    ) -> Any:
        """fetch(), for such a caller."""
        value = self.fetch(owner, creator, number)
        return self._devices.answer(value, rank, incarnation, back)

    def can_open(self, incarnation: int, shown: Any) -> bool:
        """Whether this process sees the device memory that a peer shows."""
        return self._devices.can_open(incarnation, shown)

    # -- references --------------------------------------------------------------------------------

    @idempotent
    def passed(
        self, owner: int, creator: int, number: int, parent: int, fork: int, holder: int
    ) -> bool:
        """A parent passes a reference on."""
        if owner != self._members.incarnation:
            return False
        return self._values.passed((creator, number), (parent, fork), holder)

    @idempotent
    def claimed(
        self, owner: int, creator: int, number: int, parent: int, fork: int, holder: int
    ) -> bool:
        """A holder has received a reference."""
        if owner != self._members.incarnation:
            return False
        return self._values.claimed((creator, number), (parent, fork), holder)

    @idempotent
    def may_be_lost(self, owner: int, creator: int, number: int, parent: int, fork: int) -> None:
        """A parent has passed a reference on in a call that failed."""
        if owner == self._members.incarnation:
            self._values.may_be_lost((creator, number), (parent, fork))

    @idempotent
    def dropped(self, owner: int, forks: Any) -> None:
        """A holder refers to these no more."""
        if owner == self._members.incarnation:
            self._values.dropped(forks)


def _itself(value: Any) -> Any:
    return value


def _once_made(value: Future) -> Deferred | None:
    """The answer to who has a value made. It comes once the value is there: answered sooner, a
    caller would have nothing left to end at its deadline.
    """
    if value.finished:
        return None
    answer = Deferred()
    value.when_done(lambda _: answer.reply(None))
    return answer


def _kind_of(future: Any) -> str:
    """Of a future that a function has returned, as its author knows it."""
    kind = type(future)
    module = "prpc_engine.remote" if kind is Future else kind.__module__
    return f"{module}.{kind.__qualname__}"

"""Typed stubs: a client behind the methods of a Protocol, which type checkers then see.

    class Shop(Protocol):
        def buy(self, count: int, gift: bool = False) -> str: ...
        async def stock(self, what: str) -> int: ...
        def orders(self) -> Iterator[str]: ...

    shop = client.bind(Shop)
    shop.buy(3)              # client.call("buy", 3, False)
    await shop.stock("a")    # await client.submit("stock", "a")
    for x in shop.orders():  # for x in client.stream("orders"):

Arguments are resolved against the Protocol's signature before anything is sent: calls carry
positional arguments only, so keywords and defaults become positional ones, and wrong ones raise
TypeError here. A default of `...` stands for the server's own default: what is left out is then not
sent.
"""

from __future__ import annotations

import collections.abc
import inspect
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar, get_origin

from prpc_engine.errors import ConfigError
from prpc_engine.rpc.call import TIMEOUT_S
from prpc_engine.rpc.context import wait_in_ms

P = TypeVar("P")
_ITERATORS = (
    "AsyncGenerator",
    "AsyncIterable",
    "AsyncIterator",
    "Generator",
    "Iterable",
    "Iterator",
)
_ITERATOR_TYPES = {getattr(collections.abc, name) for name in _ITERATORS}
_POSITIONAL = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.VAR_POSITIONAL,
)


class Verbs(Protocol):
    """The verbs that a stub calls its service by. An RpcClient has them."""

    @property
    def call(self) -> Callable[..., Any]:
        """Wait for the result."""

    @property
    def submit(self) -> Callable[..., Any]:
        """A future of the result."""

    @property
    def stream(self) -> Callable[..., Any]:
        """A stream of results."""

    def describe(self) -> dict[str, dict[str, Any]]:
        """The methods that the service has, by name."""


def bind(
    client: Verbs,
    protocol: Callable[..., P],
    timeout_s: float | None = TIMEOUT_S,
    stream_timeout_s: float | None = None,
    check: bool = False,
) -> P:
    """An object with the methods of `protocol`, a class, that calls the client's service. Also
    RpcClient.bind().

    timeout_s         for each call; stream_timeout_s for the whole of each stream
    check             ask a server now whether it has these methods

    Raises TypeError for a class whose methods cannot be called from afar, BadArguments for seconds
    that are none, and with check=True ConfigError, which names what is missing, and what
    RpcClient.describe() raises. `protocol` is annotated as a callable because type checkers refuse
    an abstract class where type[P] is asked for.
    """
    wait_in_ms(timeout_s)
    wait_in_ms(stream_timeout_s, "stream_timeout_s")
    if not inspect.isclass(protocol):
        raise TypeError(
            "bind() takes a class whose methods are to be called, a typing.Protocol say; "
            f"not {protocol!r}"
        )
    methods = {
        name: _Method(protocol, name, function) for name, function in _functions(protocol).items()
    }
    if not methods:
        raise TypeError(f"{protocol.__qualname__} has no public methods to call")
    if check:
        _check(client, protocol, methods)
    stub: Any = _Stub(client, protocol)
    for name, method in methods.items():
        stub.__dict__[name] = method.caller(
            client, stream_timeout_s if method.is_stream else timeout_s
        )
    return stub  # type: ignore[no-any-return]


class _Stub:
    """What bind() returns; the methods are attributes of the object."""

    def __init__(self, client: Verbs, protocol: type) -> None:
        self._client = client
        self._protocol = protocol

    def __getattr__(self, name: str) -> Any:  # of what is no attribute
        methods = ", ".join(sorted(key for key in self.__dict__ if not key.startswith("_")))
        raise AttributeError(
            f"{self._protocol.__qualname__} has no method {name!r}; it has: {methods}"
        )

    def __repr__(self) -> str:
        return f"<{self._protocol.__qualname__} of service {self._client}>"


class _Method:
    """One method of a Protocol: how its arguments are laid out, and which verb calls it."""

    def __init__(self, protocol: type, name: str, function: Callable[..., Any]) -> None:
        self.name = name
        self.text = f"{protocol.__qualname__}.{name}()"
        self.function = function
        signature = inspect.signature(function)
        if not isinstance(inspect.getattr_static(protocol, name), staticmethod | classmethod):
            parameters = list(signature.parameters.values())[1:]  # without self
            signature = signature.replace(parameters=parameters)
        self.signature = signature
        unsendable = [
            str(one) for one in signature.parameters.values() if one.kind not in _POSITIONAL
        ]
        if unsendable:
            raise TypeError(
                f"{self.text} takes {', '.join(unsendable)} by keyword only: "
                "calls carry positional arguments only"
            )
        self.is_async = inspect.iscoroutinefunction(function)
        self.is_stream = (
            inspect.isgeneratorfunction(function)
            or inspect.isasyncgenfunction(function)
            or _is_iterator(signature.return_annotation)
        )
        self._count = len(signature.parameters)
        self._has_rest = any(
            one.kind is inspect.Parameter.VAR_POSITIONAL for one in signature.parameters.values()
        )

    def arguments(self, args: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, ...]:
        """The positional arguments to send. Raises TypeError."""
        if not keywords and not self._has_rest and len(args) == self._count:
            return args
        try:
            bound = self.signature.bind(*args, **keywords)
        except TypeError as error:
            raise TypeError(f"{self.text}: {error}; its signature is {self.signature}") from None
        bound.apply_defaults()
        sent: list[Any] = []
        left_out = ""
        for name, value in bound.arguments.items():
            if self.signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL:
                values = value
            elif value is ... and self.signature.parameters[name].default is ...:
                left_out = left_out or name
                continue
            else:
                values = (value,)
            if left_out and values:
                raise TypeError(
                    f"{self.text}: {name!r} cannot be sent without {left_out!r}, "
                    "whose default only the server knows"
                )
            sent.extend(values)
        return tuple(sent)

    def caller(self, client: Verbs, timeout_s: float | None) -> Callable[..., Any]:
        """The function that a stub has under this name."""
        name, arguments = self.name, self.arguments
        verb = client.stream if self.is_stream else client.submit if self.is_async else client.call

        if self.is_async:

            def caller(*args: Any, **keywords: Any) -> Any:
                return _later(verb, name, arguments(args, keywords), timeout_s, not self.is_stream)

        else:

            def caller(*args: Any, **keywords: Any) -> Any:
                return verb(name, *arguments(args, keywords), timeout_s=timeout_s)

        caller.__name__ = name
        caller.__qualname__ = self.text.removesuffix("()")
        caller.__doc__ = self.function.__doc__
        caller.__signature__ = self.signature  # type: ignore[attr-defined]
        return caller


def _later(
    verb: Callable[..., Any],
    name: str,
    args: tuple[Any, ...],
    timeout_s: float | None,
    is_awaited: bool,
) -> Coroutine[Any, Any, Any]:
    """What an `async def` gives: nothing is sent before it is awaited."""

    async def call() -> Any:
        begun = verb(name, *args, timeout_s=timeout_s)
        return await begun if is_awaited else begun

    return call()


def _functions(protocol: type) -> dict[str, Callable[..., Any]]:
    """Its public methods, inherited ones too, in the order they are written."""
    found: dict[str, Callable[..., Any]] = {}
    for base in reversed(protocol.__mro__):
        for name in vars(base):
            if not name.startswith("_") and inspect.isroutine(getattr(protocol, name, None)):
                found[name] = getattr(protocol, name)
    return found


def _is_iterator(annotation: Any) -> bool:
    """Whether an annotation, or its text, says that items come one by one. Texts are not evaluated:
    their names may be known to type checkers only."""
    if isinstance(annotation, str):
        return annotation.partition("[")[0].rpartition(".")[2].strip() in _ITERATORS
    return (get_origin(annotation) or annotation) in _ITERATOR_TYPES


def _check(client: Verbs, protocol: type, methods: dict[str, _Method]) -> None:
    described = client.describe()
    there = ", ".join(sorted(described))
    faults = [
        f"{name}{method.signature} is missing"
        for name, method in methods.items()
        if name not in described
    ]
    for name, method in methods.items():
        is_stream = described.get(name, {}).get("kind") == "stream"
        if name in described and is_stream and not method.is_stream:
            faults.append(
                f"{name}() is a stream there: annotate it to return Iterator or AsyncIterator"
            )
    if faults:
        raise ConfigError(
            f"service {client} does not serve {protocol.__qualname__}: {'; '.join(faults)}; "
            f"it has: {there}"
        )

"""What a server exposes of an object: its methods, what is known of each, and the decorators that
say how one runs.

method                        kind     runs
def                           plain    at once, in the turn that found its request
async def                     task     by steps, which take turns with everything else
def in another class (bulk)   task     as one step of that class
generator, async or not       stream   by items
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from prpc_engine.errors import ConfigError
from shard import BULK, LATENCY, call_outside_asyncio, class_of, in_class

# What a request goes through on its way to a handler, and the news of a watch on their way to a
# callback: what is not of these, below a turn, may stall it (shard/loop/stall.py).
ENGINE = (
    "shard",
    *(f"prpc_engine.{package}" for package in ("archive", "client", "master.watch", "node", "rpc")),
)

Function = TypeVar("Function", bound=Callable[..., Any])


def idempotent(function: Function) -> Function:
    """Decorator: running this method twice is as good as once, so a client may send it again when
    it does not know.
    """
    _check_function("idempotent", function)
    function.prpc_idempotent = True  # type: ignore[attr-defined]
    return function


def once(function: Function) -> Function:
    """Decorator: a call of this method runs once, although its connection may be lost before the
    answer is there.

    The client then asks the same server process again, over another connection and within the
    call's deadline, and gets the answer of the run that there was. A server that has died, or does
    not remember that call any more (once.py), is MaybeExecuted as with any method. Not for streams;
    a plain function counts as a task among the server's bounds.
    """
    _check_function("once", function)
    function.prpc_once = True  # type: ignore[attr-defined]
    return function


def bulk(function: Function) -> Function:
    """Decorator: this method only has to be done; what others wait for goes first.

    While both want to run it gets a tenth of the time of all other handlers together, plain ones
    too: to within 20 % over 60 times the longest step. That time is divided between steps: an
    `async def` goes on to its next await, a generator to its next item, a plain function to its
    end; keep them short, as nothing else runs meanwhile. For other shares use
    `shard.in_class(shard.TaskClass("scan", shares=300))`; handlers have 1000.

    A request waits its turn in its connection until it is found: one behind many long requests of
    plain methods in the same connection is none yet that wants to run. What a bulk method sends to
    shards of its process is bulk there; a call of another node is what that node's method is.
    """
    _check_function("bulk", function)
    return in_class(BULK)(function)


def _check_function(mark: str, function: object) -> None:
    if not callable(function):
        raise ConfigError(
            f"{mark}({function!r:.100}): a function is marked: write @prpc_engine.{mark} above its "
            "def"
        )


@dataclass(frozen=True)
class Method:
    """What is known of one method. Its signature and its text are looked up when they are first
    asked for: that takes ten times as long as all else, and most methods are never asked.
    """

    name: str
    function: Callable[..., Any]
    kind: str  # "plain", "task", "stream"
    is_idempotent: bool
    is_once: bool

    @cached_property
    def signature(self) -> inspect.Signature | None:
        """None where Python knows none, as of some builtins."""
        try:
            return inspect.signature(self.function)
        except (TypeError, ValueError):
            return None

    @cached_property
    def text(self) -> str:
        """The first line of its docstring."""
        return (inspect.getdoc(self.function) or "").partition("\n")[0]

    def fits(self, arguments: Sequence[Any]) -> bool:
        """Whether the arguments fit the signature:
        a TypeError then came from inside the handler.
        """
        if self.signature is None:
            return True
        try:
            self.signature.bind(*arguments)
        except TypeError:
            return False
        return True


def public_methods(served: object) -> dict[str, Callable[..., Any]]:
    """What a server exposes of an object: its public methods, or the functions of a dict. Raises
    ConfigError.
    """
    if isinstance(served, Mapping):
        functions = dict(served)
        for name, function in functions.items():
            if not isinstance(name, str) or not callable(function):
                raise ConfigError(
                    f"a dict of functions maps str to callables; it has {name!r}: {function!r}"
                )
            if name.startswith("_"):
                raise ConfigError(
                    f"{name!r} begins with an underscore: such names are not served; "
                    "leave it out, or rename it"
                )
    elif isinstance(served, type):
        raise ConfigError(
            f"{served!r} is a class, whose methods have no object: pass one, such as "
            f"{served.__name__}(), or sharded=True for one in each shard"
        )
    else:
        functions = {
            name: getattr(served, name)
            for name in dir(served)
            if not name.startswith("_")
            and callable(getattr(served, name))
            and not isinstance(getattr(served, name), type)
        }
    if not functions:
        raise ConfigError(
            f"{served!r} has no public method to serve: pass an object with public methods, "
            "or a dict of functions"
        )
    return functions


def describe(name: str, function: Callable[..., Any]) -> Method:
    """Look at one function. Raises ConfigError for marks that exclude each other."""
    kind = "plain"
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        kind = "stream"
    elif inspect.iscoroutinefunction(function) or class_of(function) != LATENCY:
        kind = "task"
    is_idempotent, is_once = (
        bool(getattr(function, "prpc_idempotent", False)),
        bool(getattr(function, "prpc_once", False)),
    )
    if is_once and (is_idempotent or kind == "stream"):
        other = (
            "idempotent, which may run twice"
            if is_idempotent
            else "a stream, which is not asked for again"
        )
        raise ConfigError(f"method {name!r} is marked once and is {other}: take one of them away")
    return Method(name, function, kind, is_idempotent, is_once)


def as_task(method: Method, function: Callable[..., Any]) -> Callable[..., Any]:
    """What to call for a method of kind "task": the function, or for a plain one what makes a
    coroutine of it, in its class.
    """
    if inspect.iscoroutinefunction(function):
        return function

    async def run(arguments: tuple[Any, ...]) -> Any:
        value = call_outside_asyncio(function, *arguments)
        return await value if inspect.isawaitable(value) else value

    @in_class(class_of(function))
    def begin(*arguments: Any) -> Coroutine[Any, Any, Any]:
        if method.signature is not None:
            # here, where an `async def` refuses what does not fit, too
            method.signature.bind(*arguments)
        return run(arguments)

    return begin

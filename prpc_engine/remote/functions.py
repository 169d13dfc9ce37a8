"""Functions by name: a call says "module:qualified.name", and the worker that is asked finds it.

    a function                          travels as
    of a module, a class of it, a       its name: looked up once on either side
      static or class method
    of `__main__`                       the same: both run the same script; by value (cloudpickle)
                                        where the other side's `__main__` has none such
    a lambda, a closure, a bound        a pickle, by value: where pickles are allowed
      method, functools.partial, ...

In a worker of an allow list (Options(only_exposed=True)) nothing is imported by a name from the
wire and nothing is unpickled: it serves functions that were decorated with @expose, and of objects
of such classes the methods that such classes define.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import sys
from collections.abc import Callable, Mapping
from types import (
    BuiltinFunctionType,
    ClassMethodDescriptorType,
    FunctionType,
    MethodDescriptorType,
)
from typing import Any, TypeVar

from prpc_engine import errors

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

# what multiprocessing calls a script in the processes that it spawns
_SCRIPTS = ("__mp_main__", "__main__")
_NAMED = (FunctionType, BuiltinFunctionType, type)
# what `def` makes in a class, also where it is cached, and what a class written in C has instead
_METHODS = frozenset(
    {
        FunctionType,
        functools._lru_cache_wrapper,
        MethodDescriptorType,
        ClassMethodDescriptorType,
    }
)
_names: dict[Any, str] = {}  # of functions that are found by them
exposed: dict[str, Any] = {}


def async_execution(function: FunctionT) -> FunctionT:
    """Marks a function that returns a future: its caller gets what that future brings. Here it only
    says so to the reader, as any function may return one; torch wants the mark.
    """
    return function


def expose(function: FunctionT) -> FunctionT:
    """Let workers of an allow list serve this function, or class: its constructor, and of objects
    of it that RRefs refer to the public methods which it defines itself. Those that it inherits are
    served where the class that defines them is exposed, too. Gives it back: a decorator.
    """
    if not callable(function) or not hasattr(function, "__qualname__"):
        raise errors.ConfigError(f"expose({function!r:.100}): a function or class is expected")
    exposed[full_name(function)] = function
    return function


def full_name(function: Any) -> str:
    """Of a function or class: where it is defined, and its name there."""
    module = function.__module__
    return f"{'__main__' if module in _SCRIPTS else module}:{function.__qualname__}"


def name_of(function: Any) -> str | None:
    """What a worker finds it by; None: it has no such name, and travels by value."""
    try:
        name = _names.get(function)
    except TypeError:  # not hashable
        return None
    if name is not None:
        return name
    if not isinstance(function, _NAMED) or not isinstance(function.__module__, str):
        return None
    try:
        found = _look_up(function.__module__, function.__qualname__)
    except (AttributeError, KeyError):
        return None
    if found is not function:
        return None
    name = _names[function] = full_name(function)
    return name


def _look_up(module: str, qualified: str) -> Any:
    found: Any = sys.modules[module]
    for part in qualified.split("."):
        found = getattr(found, part)
    return found


class UnknownFunction(errors.Rejected, LookupError, RuntimeError):
    """The worker that was asked has no function of that name. Nothing was run."""


class ValueGone(errors.Rejected, LookupError, RuntimeError):
    """The value of an RRef is not there any more: its owner was started again, or the worker that
    was to make it has died.
    """


def find(name: str) -> Any:
    """The function of that name; its module is imported. Raises UnknownFunction."""
    module, _, qualified = name.partition(":")
    try:
        if module in _SCRIPTS:
            module = next(one for one in _SCRIPTS if one in sys.modules)
        elif module not in sys.modules:
            importlib.import_module(module)
        found = _look_up(module, qualified)
    except Exception as error:  # of an import: anything
        raise UnknownFunction(
            f"there is no {qualified!r} in module {module!r} here: {type(error).__name__}: {error}"
        ) from None
    if not callable(found):
        raise UnknownFunction(f"{name!r} is no function here but a {type(found).__name__}")
    return found


def find_exposed(name: str) -> Any:
    """The same among those that are exposed. Raises NotAllowed."""
    found = exposed.get(name)
    if found is None:
        served = ", ".join(sorted(exposed)) or "nothing"
        raise errors.NotAllowed(
            f"{name!r} is not exposed: this worker serves {served}; decorate it with "
            "@prpc_engine.remote.expose there"
        )
    return found


def is_exposed(one: Any) -> bool:
    """Whether this very function or class is; another one of its name is not."""
    return exposed.get(full_name(one)) is one


def exposed_method(value: Any, name: str) -> Callable[..., Any] | None:
    """That method of an object of an exposed class; None: it has no such method that is exposed.

    Looked up in the classes alone, and without running anything: what an attribute refers to, or
    what a property or __getattr__ returns, can be called, but was never exposed.
    """
    kind = type(value)
    if name.startswith("_") or not is_exposed(kind) or name in _attributes(value):
        return None
    for owner in kind.__mro__:
        if name in vars(owner):
            return _exposed_of(owner, vars(owner)[name], value)
    return None


def _attributes(value: Any) -> Mapping[str, Any]:
    """An object's own; its class's __getattr__ is not asked."""
    try:
        attributes: Mapping[str, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:  # it has slots, or its class is written in C
        return {}
    return attributes


def _exposed_of(owner: type, found: Any, value: Any) -> Callable[..., Any] | None:
    """What that class defines, as a method of the value; None: it is none, or not exposed."""
    is_wrapped = issubclass(type(found), staticmethod | classmethod)
    function = found.__func__ if is_wrapped else found
    if type(function) not in _METHODS:
        return None
    # what is written in C has no module, and no mark of its own
    is_marked = hasattr(function, "__module__") and (is_exposed(function) or is_exposed(found))
    if not (is_exposed(owner) or is_marked):
        return None
    method: Callable[..., Any] = found.__get__(value, type(value))
    return method


def text_of(function: Any) -> str:
    """For errors and logs."""
    if isinstance(function, str):
        return function
    return getattr(function, "__qualname__", None) or repr(function)[:100]


def builtin_error(name: str) -> type[Exception] | None:
    """The exception of that name that Python itself has; None: there is none such."""
    found = getattr(builtins, name, None)
    return found if isinstance(found, type) and issubclass(found, Exception) else None

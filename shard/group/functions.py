"""Functions that the two ends of a lane know by number: told once, and then called for a few bytes
each.

    function                                      goes
    one that the other process imports by name    once
    by value, without any state                   once, as long as its code and class of work stay
                                                  what they were
    by value, with state                          with each call: what it closes over, its default
                                                  arguments and attributes may have changed since
    bound to an object, a partial, other objects  with each call

State is a closure, default arguments (also of keywords), attributes, and for a class that no other
process can import all that it holds. The sender starts anew when its table holds FUNCTIONS_MAX
functions or FUNCTIONS_BYTES_MAX bytes; the receiver keeps twice that and drops the oldest, so what
the sender counts on is always there, also when two threads sent one function twice.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

from shard.group.payload import is_from_a_prompt
from shard.loop.task_class import TASK_CLASS_ATTRIBUTE, TaskClass, class_of

# At a few hundred bytes each, a program's functions all find room.
FUNCTIONS_MAX = 4096
# Pickled: of all of one table, and of one function in it. Code is small; what is larger has data in
# it, and goes with each call.
FUNCTIONS_BYTES_MAX = 8 << 20
FUNCTION_BYTES_MAX = 64 << 10

Function = Callable[..., Any]


def is_found_by_name(function: Any) -> bool:
    """Whether the other process finds this function or class as an attribute of a module, so that
    its state stays at home.
    """
    if is_from_a_prompt(function):
        return False
    found: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is function


def has_state(function: FunctionType) -> bool:
    """Whether something that travels with a function by value may differ from call to call, its
    code apart.
    """
    return bool(
        function.__closure__ is not None
        or function.__defaults__
        or function.__kwdefaults__
        or function.__dict__.keys() - {TASK_CLASS_ATTRIBUTE}
    )


def may_go_once(function: Any) -> bool:
    """Whether the other end is told of this function once, rather than with each call."""
    if type(function) is FunctionType:
        return is_found_by_name(function) or not (has_state(function) or is_from_a_prompt(function))
    if type(function) is BuiltinFunctionType:
        # else a bound method: [].append, {}.get
        return isinstance(function.__self__, ModuleType | None)
    if isinstance(function, type):
        return is_found_by_name(function)
    return bool(getattr(function, "is_sent_once", False))


class SentFunctions:
    """What this end has told the other of. Any thread may call; two that send one function at once
    tell of it twice.
    """

    def __init__(self, functions_max: int = FUNCTIONS_MAX) -> None:
        self._functions_max = functions_max
        # of those whose state does not matter: looked at by each call
        self.numbers: dict[Function, int] = {}
        self._by_value: dict[Function, tuple[int, CodeType, TaskClass]] = {}
        self.nbytes = 0  # of all in it, as they were sent

    def __len__(self) -> int:
        return len(self.numbers) + len(self._by_value)

    def find(self, function: Any) -> int | None:
        """The number of a function that went by value and is still what went;
        None for any other.
        """
        if type(function) is not FunctionType or not (known := self._by_value.get(function)):
            return None
        number, code, task_class = known
        return (
            number
            if function.__code__ is code
            and class_of(function) == task_class
            and not has_state(function)
            else None
        )

    def make_room(self, pickled: bytes) -> bool:
        """Before it is sent; False: it is too large to be kept."""
        if len(pickled) > FUNCTION_BYTES_MAX:
            return False
        too_many = len(self) >= self._functions_max
        if too_many or self.nbytes + len(pickled) > FUNCTIONS_BYTES_MAX:
            self.numbers.clear()
            self._by_value.clear()
            self.nbytes = 0
        self.nbytes += len(pickled)
        return True

    def keep(self, function: Any, number: int) -> None:
        """It was sent."""
        if type(function) is FunctionType and not is_found_by_name(function):
            self._by_value[function] = number, function.__code__, class_of(function)
        else:
            self.numbers[function] = number


class ReceivedFunctions(dict[int, Function]):
    """What the other end told this one of, by number. In the reactor's thread."""

    def __init__(self, functions_max: int = FUNCTIONS_MAX) -> None:
        super().__init__()
        self._functions_max = functions_max
        self._sizes: dict[int, int] = {}
        self.nbytes = 0  # of all in it, as they were sent

    def keep(self, number: int, function: Function, pickled_bytes: int) -> None:
        """One more; the oldest go where there are too many."""
        self[number] = function
        self._sizes[number] = pickled_bytes
        self.nbytes += pickled_bytes
        while len(self._sizes) > 2 * self._functions_max or self.nbytes > 2 * FUNCTIONS_BYTES_MAX:
            oldest = next(iter(self._sizes))
            self.nbytes -= self._sizes.pop(oldest)
            del self[oldest]

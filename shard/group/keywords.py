"""A function that is called with keyword arguments in another shard: messages carry positional
ones, so the function travels wrapped, and is told of once like any other.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

from shard.group.functions import is_found_by_name
from shard.group.payload import pickle_function, unpickle_function
from shard.loop.task_class import in_class, marked_class


class WithKeywords:
    """function(*args, **keywords) as a function of (args, keywords). Two of one function are equal,
    so a lane knows the second by the first one's number.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        marked = marked_class(function)
        if marked is not None:
            in_class(marked)(self)

    def __call__(self, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        return self.function(*args, **keywords)

    @property
    def is_sent_once(self) -> bool:
        """Whether the other end is told of it once, rather than with each call: a function by value
        may be another one by the next call.
        """
        return isinstance(self.function, FunctionType | type) and is_found_by_name(self.function)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WithKeywords) and bool(self.function == other.function)

    def __hash__(self) -> int:
        return hash(self.function)

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (pickle_function(self.function),)


def _received(pickled: bytes) -> WithKeywords:
    return WithKeywords(unpickle_function(pickled))

"""An error of ours where a constructor finds no file descriptor left."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from prpc_engine import errors
from shard import shortage_in

P = ParamSpec("P")
T = TypeVar("T")


def names_shortage(what: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A function that makes `what` raises ConfigError, with the limit and what to try, where it
    would raise because no file descriptor is left.
    """

    def decorate(make: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(make)
        def named(*args: P.args, **keywords: P.kwargs) -> T:
            try:
                return make(*args, **keywords)
            except (OSError, errors.RpcError) as error:
                text = shortage_in(what, error)
                if text is None:
                    raise
                raise errors.ConfigError(text) from error

        return named

    return decorate

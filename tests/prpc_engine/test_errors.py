"""Errors are values: they can be copied for each of those who wait, and pickled on the way to
another process.
"""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest

from prpc_engine import errors

PLAIN = [
    kind
    for kind in vars(errors).values()
    if inspect.isclass(kind)
    and issubclass(kind, errors.RpcError)
    and kind is not errors.RemoteError
]


@pytest.mark.parametrize("kind", PLAIN, ids=lambda kind: kind.__name__)
def test_an_error_is_the_same_after_a_copy_and_a_pickle(kind: type[errors.RpcError]) -> None:
    error = kind("what was asked, of whom")
    for other in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert type(other) is kind
        assert str(other) == str(error)


def test_what_a_handler_raised_keeps_its_name_message_and_traceback() -> None:
    error = errors.RemoteError(
        "it raised", type_name="KeyError", remote_message="'x'", remote_traceback="line 1"
    )
    for other in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert type(other) is errors.RemoteError
        assert (str(other), other.type_name, other.remote_message, other.remote_traceback) == (
            "it raised",
            "KeyError",
            "'x'",
            "line 1",
        )

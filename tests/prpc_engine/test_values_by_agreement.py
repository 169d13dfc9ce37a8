"""Pickles and compression: what both sides must have agreed to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from prpc_engine import NO_SECRET, Master, RpcService, errors

SECRET = b"a secret of this test, long enough"


class Anything:
    """Of no registered class."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Anything) and other.value == self.value

    __hash__ = None  # type: ignore[assignment]


class Echo:
    def echo(self, value: Any) -> Any:
        return value


def test_any_object_passes_where_both_sides_agreed_to_pickles() -> None:
    with (
        Master("127.0.0.1:0", secret=SECRET) as master,
        RpcService(master.address, secret=SECRET, allow_pickle=True) as one,
        RpcService(master.address, secret=SECRET, allow_pickle=True) as two,
        RpcService(master.address, secret=SECRET) as careful,
    ):
        one.create_server("echo", Echo())
        careful.create_server("careful", Echo())
        assert two.create_client("echo").call("echo", Anything(3)) == Anything(3)
        with pytest.raises(errors.BadArguments, match="allow_pickle"):
            careful.create_client("echo").call("echo", Anything(3))
        with pytest.raises(errors.BadArguments, match="allow_pickle"):
            two.create_client("careful").call("echo", Anything(3))


def test_pickles_need_a_secret() -> None:
    with (
        Master("127.0.0.1:0", secret=NO_SECRET) as master,
        pytest.raises(errors.ConfigError, match="needs a secret of the job"),
    ):
        RpcService(master.address, allow_pickle=True, secret=NO_SECRET)


def test_compressed_messages_arrive_as_they_were() -> None:
    with (
        Master("127.0.0.1:0") as master,
        RpcService(master.address) as one,
        RpcService(master.address, compression="zlib") as two,
    ):
        one.create_server("echo", Echo())
        client = two.create_client("echo")
        array = np.zeros((300, 300))
        assert (client.call("echo", array) == array).all()
        assert client.call("echo", {"text": "x" * 10_000}) == {"text": "x" * 10_000}


def test_a_compression_that_is_not_there_is_refused_by_name() -> None:
    with (
        Master("127.0.0.1:0", secret=NO_SECRET) as master,
        pytest.raises(errors.ConfigError, match="squeeze"),
    ):
        RpcService(master.address, compression="squeeze")

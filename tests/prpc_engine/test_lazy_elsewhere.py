"""Lazy in calls to a server here and to one in another process: the same arrives."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings

import prpc_engine
from prpc_engine import Lazy, Master, RpcClient, RpcService, errors
from prpc_engine.archive import Decoder, encode, register
from tests.prpc_engine.archives import arrive, same, values
from tests.prpc_engine.inside import node_of
from tests.prpc_engine.processes import PATIENCE_S, ServerProcess


class Both(NamedTuple):
    """One service, a client of its own server, and one of a server in another process."""

    service: RpcService
    here: RpcClient
    there: RpcClient


@pytest.fixture(params=["shm", "tcp"])
def both(request: pytest.FixtureRequest) -> Iterator[Both]:
    with (
        Master("127.0.0.1:0") as master,
        ServerProcess(master.address, "there", request.param),
        RpcService(master.address, transports=[request.param]) as service,
    ):
        service.create_server("here", {"echo": lambda value: value})
        there = service.create_client("there", timeout_s=PATIENCE_S)
        yield Both(service, service.create_client("here"), there)


def test_what_a_server_here_refused_can_go_to_another_process(both: Both) -> None:
    lazy = Lazy({"rows": np.arange(1000)})
    with pytest.raises(errors.UnknownMethod):
        both.here.call("no such method", lazy)
    assert same(both.there.call("echo", lazy), lazy.value)
    assert same(both.here.call("echo", lazy), both.there.call("echo", {"rows": np.arange(1000)}))
    with pytest.raises(errors.BadArguments, match="handed over already"):
        both.there.call("echo", lazy)


def test_a_lazy_call_that_a_server_here_refused_is_repeated_by_another_process(both: Both) -> None:
    server = both.service.create_server("there", {"echo": lambda value: value})
    client = both.service.create_client("there", 2, timeout_s=PATIENCE_S)
    stopping = next(
        one for one in node_of(both.service).servers.values() if one.server_id == server.server_id
    )
    stopping.stop()
    lazy = Lazy({"rows": np.arange(1000)})
    while not stopping.statistics().rejected:
        assert same(client.call("echo", lazy), {"rows": np.arange(1000)})
    assert same(lazy.value, {"rows": np.arange(1000)})


def test_the_first_call_to_another_process_encodes_what_is_lazy_or_says_why_not(both: Both) -> None:
    client = both.service.create_client("there", timeout_s=PATIENCE_S)
    with pytest.raises(
        errors.BadArguments,
        match=r"argument 0\[1\] is of type builtins.object, which cannot be sent",
    ):
        client.call("echo", [1, Lazy(object())])


def test_an_echo_is_the_same_from_here_and_from_another_process(both: Both) -> None:
    @given(values)
    @settings(max_examples=100)
    def check(value: Any) -> None:
        echo = both.there.call("echo", value)
        assert same(echo, value)
        assert same(both.here.call("echo", value), echo)
        assert same(both.there.call("echo", Lazy(value)), echo)
        assert same(both.here.call("echo", Lazy(value)), echo)

    check()


# -- what pRPC's lazy_archive_rpc_test does --------------------------------------------------------

ALIGNED = np.dtype([("flag", "i1"), ("weight", "f8"), ("counts", "i4", (3,))], align=True)


@dataclass
class View:
    """Of somebody's memory: `owner` has to live as long as it does."""

    data: memoryview
    owner: Any = field(compare=False)

    @property
    def numbers(self) -> list[int]:
        return self.data.cast("q").tolist()


register(
    View,
    pack=lambda view: np.frombuffer(view.data, np.uint8),
    unpack=lambda array: View(array.data, array),
)


def the_mix(number: int) -> list[Any]:
    """Fresh values, the same for each number."""
    rng = np.random.default_rng(number)
    aligned = []
    for index in range(100):
        item = np.zeros(1, ALIGNED)
        item["flag"], item["weight"], item["counts"] = (
            index % 2,
            rng.random(),
            rng.integers(0, 100, 3),
        )
        aligned.append(item)
    rows = prpc_engine.empty((20_000,), np.int64)
    rows[:] = np.arange(number, number + 20_000)
    nested = encode({"in": [number, np.arange(number), "side"]})
    return [
        rng.integers(0, 1 << 40, 1000),
        rng.random(50_000),
        "string" * rng.integers(1, 1000),
        (number, "pair"),
        {"a": {number: {"b": [1.5, None]}}},
        [{"map": {index: {str(index): float(index)}}} for index in range(100)],
        aligned,
        [nested[0], *nested[1]],
        View(memoryview(rows).cast("B"), rows),
        b"left over" * number,
    ]


class Mixer:
    """Checks what comes and sends it back as lazy as it came."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def swap(self, number: int, *mix: Any) -> list[Any]:
        expected = the_mix(number)
        assert same(list(mix), expected), number
        assert same(
            arrive(mix[7][0], mix[7][1:], Decoder()), {"in": [number, np.arange(number), "side"]}
        )
        self.kept.append(mix[8])
        *lazy, rest = mix
        return [*map(Lazy, lazy), rest]


def test_two_services_swap_a_mix_of_lazy_values_with_themselves_and_each_other() -> None:
    with (
        Master("127.0.0.1:0") as master,
        RpcService(master.address) as one,
        RpcService(master.address) as two,
    ):
        mixers = {one: Mixer(), two: Mixer()}
        servers = [service.create_server("mix", mixer) for service, mixer in mixers.items()]
        clients = {service: service.create_client("mix", 2) for service in mixers}
        for number in range(10):
            for service, client in clients.items():
                for server, mixer in zip(servers, mixers.values(), strict=True):
                    *mix, rest = the_mix(number)
                    view = mix[8]
                    back = client.call_to(server.server_id, "swap", number, *map(Lazy, mix), rest)
                    assert same(back, the_mix(number))
                    is_own = mixers[service] is mixer
                    assert (mixer.kept[-1] is view) == (back[8] is view) == is_own
                    assert (back[1] is mix[1]) == is_own
                    del mix, view, back
        gc.collect()
        for mixer in mixers.values():  # what the views look at outlives their calls
            assert [view.numbers[:2] for view in mixer.kept] == [
                [n, n + 1] for n in range(10) for _ in clients
            ]
            mixer.kept.clear()

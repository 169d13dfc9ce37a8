"""A service behind the methods of a Protocol: what is sent, what is refused before that, and what
mypy sees.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from prpc_engine import Deferred, Master, RpcClient, RpcService, errors

ROOT = Path(__file__).parents[2]


class Shop:
    """The server's side."""

    def buy(self, count: int, gift: bool = False, note: str = "server's") -> tuple[int, bool, str]:
        return count, gift, note

    def pack(self, *things: str) -> list[str]:
        return list(things)

    def stock(self, what: str) -> str:
        return f"{what}: 7"

    def orders(self, count: int) -> Iterator[int]:
        yield from range(count)


class ShopProtocol(Protocol):
    """The caller's."""

    def buy(self, count: int, gift: bool = True, note: str = ...) -> tuple[int, bool, str]:
        """Buy so many."""

    def pack(self, *things: str) -> list[str]: ...

    async def stock(self, what: str) -> str: ...

    def orders(self, count: int) -> Iterator[int]: ...


class AsyncOrders(Protocol):
    def orders(self, count: int) -> AsyncIterator[int]: ...


class Queue(Protocol):
    def wait(self) -> int: ...


class Elsewhere(Protocol):
    def buy(self, count: int) -> None: ...

    def orders(self, count: int) -> list[int]: ...

    def refund(self, count: int) -> None: ...


@pytest.fixture
def client() -> Iterator[RpcClient]:
    with Master("127.0.0.1:0") as master, RpcService(master.address) as service:
        service.create_server("shop", Shop())
        with service.create_client("shop") as made:
            yield made


def test_a_call_of_the_stub_is_a_call_of_the_method_of_that_name(client: RpcClient) -> None:
    shop = client.bind(ShopProtocol)
    assert shop.buy(3, False, "mine") == (3, False, "mine")
    assert shop.pack("a", "b") == ["a", "b"]
    assert shop.pack() == []


def test_keywords_and_defaults_of_the_protocol_become_positional_arguments(
    client: RpcClient,
) -> None:
    shop = client.bind(ShopProtocol)
    assert shop.buy(count=2) == (2, True, "server's")
    assert shop.buy(2, note="mine", gift=False) == (2, False, "mine")
    assert shop.buy(2) == (2, True, "server's")


def test_wrong_arguments_raise_type_error_and_nothing_is_sent(client: RpcClient) -> None:
    shop: Any = client.bind(ShopProtocol)
    before = client.statistics().calls
    for args, keywords in [
        ((), {}),
        ((1, True, "x", 4), {}),
        ((1,), {"colour": "red"}),
        ((1,), {"count": 2}),
    ]:
        with pytest.raises(TypeError, match=r"ShopProtocol\.buy\(\): .*; its signature is \(count"):
            shop.buy(*args, **keywords)
    with pytest.raises(TypeError, match=r"ShopProtocol\.stock\(\)"):
        shop.stock()  # at the call, not when it is awaited
    assert client.statistics().calls == before


def test_an_async_method_gives_an_awaitable(client: RpcClient) -> None:
    shop = client.bind(ShopProtocol)

    async def ask() -> list[str]:
        task = asyncio.create_task(shop.stock("pears"))
        return await asyncio.gather(task, shop.stock(what="figs"))

    assert asyncio.run(ask()) == ["pears: 7", "figs: 7"]


def test_a_method_that_returns_an_iterator_is_a_stream(client: RpcClient) -> None:
    assert list(client.bind(ShopProtocol).orders(20)) == list(range(20))

    async def collect() -> list[int]:
        return [order async for order in client.bind(AsyncOrders).orders(count=20)]

    assert asyncio.run(collect()) == list(range(20))


def test_the_timeout_of_a_stub_is_that_of_each_call(client: RpcClient) -> None:
    unanswered = Deferred()
    with Master("127.0.0.1:0") as master, RpcService(master.address) as service:
        service.create_server("queue", {"wait": lambda: unanswered})
        with pytest.raises(errors.DeadlineExceeded):
            service.create_client("queue").bind(Queue, timeout_s=0.0).wait()
        unanswered.reply(1)
    assert client.bind(ShopProtocol, timeout_s=None).buy(1)[0] == 1


def test_a_check_names_what_the_service_lacks(client: RpcClient) -> None:
    client.bind(ShopProtocol, check=True)
    with pytest.raises(errors.ConfigError) as caught:
        client.bind(Elsewhere, check=True)
    text = str(caught.value)
    assert "service 'shop' does not serve Elsewhere" in text
    assert "refund(count: 'int') -> 'None' is missing" in text
    assert "orders() is a stream there" in text
    assert "it has: buy, orders, pack, stock" in text


def test_what_cannot_be_called_from_afar_is_refused_when_it_is_bound(client: RpcClient) -> None:
    class ByKeyword(Protocol):
        def buy(self, *, count: int) -> None: ...

    class Empty(Protocol):
        size: int

    with pytest.raises(TypeError, match="by keyword only"):
        client.bind(ByKeyword)
    with pytest.raises(TypeError, match="no public methods"):
        client.bind(Empty)
    with pytest.raises(TypeError, match="takes a class"):
        client.bind(lambda: Shop())


def test_an_argument_after_one_that_only_the_server_knows_is_refused(client: RpcClient) -> None:
    class Gap(Protocol):
        def buy(self, count: int, gift: bool = ..., note: str = "x") -> Any: ...

    with pytest.raises(TypeError, match="'note' cannot be sent without 'gift'"):
        client.bind(Gap).buy(1)


def test_a_stub_says_what_it_is(client: RpcClient) -> None:
    shop: Any = client.bind(ShopProtocol)
    assert repr(shop) == "<ShopProtocol of service 'shop'>"
    assert shop.buy.__doc__ == "Buy so many."
    with pytest.raises(
        AttributeError, match="ShopProtocol has no method 'sell'; it has: buy, orders, pack, stock"
    ):
        shop.sell(1)


SNIPPET = """
from typing import Iterator, Protocol
from prpc_engine import RpcClient

class Shop(Protocol):
    def buy(self, count: int, gift: bool = False) -> str: ...
    async def stock(self, what: str) -> int: ...
    def orders(self) -> Iterator[bytes]: ...

async def use(client: RpcClient) -> None:
    shop = client.bind(Shop, timeout_s=2.0)
    reveal_type(shop)
    reveal_type(shop.buy(3, gift=True))
    reveal_type(await shop.stock("figs"))
    for order in shop.orders():
        reveal_type(order)
    shop.buy("three")
    shop.sell()
"""


@pytest.mark.slow
def test_mypy_sees_the_signatures_of_the_protocol(tmp_path: Path) -> None:
    snippet = tmp_path / "snippet.py"
    snippet.write_text(SNIPPET)
    checked = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--follow-imports=silent",
            "--no-error-summary",
            str(snippet),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    said = [
        line.partition("snippet.py:")[2].partition(": ")[2] for line in checked.stdout.splitlines()
    ]
    revealed = [
        line.split('"')[1].rpartition(".")[2] for line in said if line.startswith("note: Revealed")
    ]
    assert revealed == ["Shop", "str", "int", "bytes"], checked.stdout + checked.stderr
    faults = [line for line in said if line.startswith("error")]
    assert len(faults) == 2, checked.stdout
    assert 'Argument 1 to "buy" of "Shop" has incompatible type "str"' in faults[0]
    assert '"Shop" has no attribute "sell"' in faults[1]

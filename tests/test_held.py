"""A thread held at a failpoint of the product: tests/held.py."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from prpc_engine import Master, RpcService, errors
from prpc_engine.master.session import MasterSession
from tests import held as held_module
from tests.held import at, held_at, names
from tests.imports import ROOT
from tests.program import PATIENCE_S

CODE = MasterSession.submit.__code__


@pytest.fixture
def service() -> Iterator[RpcService]:
    with Master() as master, RpcService(master.address) as made:
        yield made


def test_every_failpoint_of_the_engine_is_in_the_table_and_no_other_is() -> None:
    stated = re.findall(r"(?m)^    ([a-z_]+\.[a-z_]+)  ", held_module.__doc__ or "")
    of_engine = [
        name
        for name, places in names().items()
        if any((ROOT / "prpc_engine") in path.parents for path, _ in places)
    ]
    assert stated == sorted(of_engine)


def test_a_thread_waits_at_its_place_until_it_is_released(service: RpcService) -> None:
    with held_at("session.submitting") as held, ThreadPoolExecutor(1) as pool:
        counting = pool.submit(service.master_client.count_up, "k")
        held.wait()
        assert not counting.done()
        assert isinstance(service.master_client.count_up("other"), int), "later ones pass"
        held.release()
        assert isinstance(counting.result(PATIENCE_S), int)


def test_a_thread_that_is_held_as_the_block_ends_goes_on(service: RpcService) -> None:
    with ThreadPoolExecutor(1) as pool:
        with held_at("session.submitting") as held:
            counting = pool.submit(service.master_client.count_up, "k")
            held.wait()
        assert isinstance(counting.result(PATIENCE_S), int)


def test_what_is_done_there_is_done_by_the_thread_that_comes(service: RpcService) -> None:
    seen: list[tuple[str, int]] = []

    def note(verb: str) -> None:
        seen.append((verb, threading.get_ident()))

    with at("session.submitting", note) as passed:
        service.master_client.count_up("k")
    service.master_client.count_up("k")
    assert seen == [("count_up", threading.get_ident())]
    assert passed.count == 1


def test_what_is_raised_there_comes_out_of_the_product(service: RpcService) -> None:
    def fail() -> None:
        raise errors.MasterUnreachable("nobody answers")

    with at("session.submitting", fail, times=1), pytest.raises(errors.MasterUnreachable):
        service.master_client.count_up("k")
    assert isinstance(service.master_client.count_up("k"), int)


def test_a_coroutine_is_held_and_its_thread_is_not(service: RpcService) -> None:
    with service.create_client("nothing", 0) as client, ThreadPoolExecutor(1) as pool:
        with held_at("service.looking") as held:
            refreshing = pool.submit(client.refresh)
            held.wait()
            assert isinstance(service.master_client.count_up("k"), int)
            assert not refreshing.done()
        refreshing.result(PATIENCE_S)


def test_the_function_has_its_own_code_again(service: RpcService) -> None:
    with at("session.submitting"), at("session.submitting") as inner:
        assert MasterSession.submit.__code__ is not CODE
        service.master_client.count_up("k")
        assert inner.count == 1
    assert MasterSession.submit.__code__ is CODE


def test_two_places_of_one_function_are_taken_one_by_one(service: RpcService) -> None:
    with service.create_client("nothing", 0) as client:
        with at("service.looking") as looking:
            with at("service.looked") as looked:
                client.refresh()
                looked.wait()
            client.refresh()
        assert looking.count > looked.count > 0


def test_a_place_is_that_of_one_object_only(service: RpcService) -> None:
    with at("session.submitting", of=object()) as passed:
        service.master_client.count_up("k")
    assert passed.count == 0


def test_a_name_or_a_variable_that_is_not_there_is_named(service: RpcService) -> None:
    with pytest.raises(ValueError, match="no failpoint"), at("session.submited"):
        pass
    with at("session.submitting", lambda peer: peer), pytest.raises(AssertionError, match="peer"):
        service.master_client.count_up("k")


def test_each_failpoint_can_be_taken() -> None:
    for name in names():
        with at(name):
            pass

"""Who is in a group, where the master's news of a worker is late."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from prpc_engine import Master, RpcService, errors
from prpc_engine import remote as rpc
from prpc_engine.master.watch import TreeEvent
from prpc_engine.remote.attendance import Attendant
from prpc_engine.remote.members import Members
from shard import runtime
from tests.program import PATIENCE_S, wait_until

HERE, THERE = 11, 13  # incarnations


class LateNews:
    """A master's client whose news of workers are held back until tell()."""

    def __init__(self, service: RpcService) -> None:
        self._service = service
        self._tree = service.master_client
        self.held: list[TreeEvent] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tree, name)

    def tree_watch(self, path: str, heard: Callable[[TreeEvent], object], existing: bool) -> None:
        self._heard = heard
        self._tree.tree_watch(path, self.held.append, existing=existing)

    def tell(self) -> None:
        """Deliver them; return when all were heard."""
        heard = threading.Event()
        self._service.driver.call_in_engine(lambda: self._tell(heard))
        assert heard.wait(PATIENCE_S)

    def _tell(self, heard: threading.Event) -> None:
        news, self.held = self.held, []
        for event in news:
            self._heard(event)
        heard.set()


def _ignore(*_: object) -> None:
    """Nobody minds who leaves."""


@pytest.fixture
def group() -> Iterator[tuple[Members, LateNews, Members]]:
    """This worker, whose news are late, and another that has joined."""
    with contextlib.ExitStack() as stack:
        master = stack.enter_context(Master("127.0.0.1:0"))
        services = [stack.enter_context(RpcService(master.address)) for _ in range(2)]
        here, there = (
            Members(name, incarnation, service.driver, _ignore, _ignore)
            for name, incarnation, service in zip(
                ("here", "there"), (HERE, THERE), services, strict=True
            )
        )
        late = LateNews(services[0])
        here.join(late, 0, "the test's master")  # type: ignore[arg-type]
        there.join(services[1].master_client, 1, "the test's master", 4)
        yield here, late, there


def test_a_worker_found_by_name_is_known_by_its_rank_before_the_news_of_it(
    group: tuple[Members, LateNews, Members],
) -> None:
    here, late, there = group
    with pytest.raises(rpc.UnknownWorker, match="no worker of rank 1"):
        here.info_of(1)
    assert here.rank_of("there") == 1
    assert here.info_of(1) == rpc.WorkerInfo("there", 1)
    assert here.incarnation_of(1) == THERE
    there.say_leaving(PATIENCE_S)
    there.leave()
    wait_until(lambda: None in [event.value for event in late.held])
    late.tell()
    with pytest.raises(rpc.UnknownWorker):
        here.info_of(1)
    with pytest.raises(rpc.UnknownWorker):
        here.incarnation_of(1)


def test_who_waits_for_a_group_of_a_size_knows_all_of_it(
    group: tuple[Members, LateNews, Members],
) -> None:
    here, late, _ = group
    wait_until(lambda: len(late.held) > 1)
    known: list[rpc.WorkerInfo] = []

    def wait() -> None:
        here.wait_for(2, runtime.monotonic() + PATIENCE_S)
        known.extend(here.infos())

    waiting = threading.Thread(target=wait)
    waiting.start()
    late.tell()
    waiting.join(PATIENCE_S)
    assert known == [("here", 0), ("there", 1)]


def test_who_has_left_is_still_known_with_its_world_size(
    group: tuple[Members, LateNews, Members],
) -> None:
    here, late, there = group
    there.leave()
    wait_until(lambda: len(late.held) == 4, "the folder, both that have come, and one that left")
    late.tell()
    assert sorted(here.came()) == [
        Attendant("here", 0, None, True),
        Attendant("there", 1, 4, False),
    ]


class Silent:
    """A master's client: the master does not say who has joined."""

    def __init__(self, error: errors.RpcError) -> None:
        self._error = error

    def tree_node_add(self, *_: object, **__: object) -> None:
        """Done."""

    tree_watch = tree_node_add

    def tree_node_get(self, *_: object) -> None:
        raise self._error


@pytest.mark.parametrize(
    ("kind", "raised", "text"),
    [
        (errors.DeadlineExceeded, rpc.UnknownWorker, "has not said"),
        (errors.MasterUnreachable, rpc.UnknownWorker, "has not said"),
        (errors.MaybeExecuted, rpc.UnknownWorker, "has not said"),
        (errors.Closed, rpc.NoWorker, "this one, 'here', has left"),
    ],
)
def test_a_worker_that_the_master_cannot_be_asked_for_is_unknown(
    kind: type[errors.RpcError], raised: type[errors.RpcError], text: str
) -> None:
    nobody: Any = None
    members = Members("here", HERE, nobody, _ignore, _ignore)
    silent: Any = Silent(kind("the master was lost"))
    members.join(silent, 0, "nowhere")
    with pytest.raises(raised, match=text):
        members.rank_of("there")

"""Queues of process groups: of torch.distributed, and of an object with vLLM's verbs for one."""

from __future__ import annotations

import pickle
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from prpc_engine import errors
from prpc_engine.vllm import Handle, MessageQueue
from tests.program import PATIENCE_S


class Board:
    """What the members of a group pass each other: a thread each."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.barrier = threading.Barrier(world_size)
        self.value = b""


class Member:
    """One of a group, with the verbs of vLLM's StatelessProcessGroup."""

    def __init__(self, board: Board, rank: int) -> None:
        self.rank, self.world_size, self._board = rank, board.world_size, board

    def broadcast_obj(self, value: Any, source: int) -> Any:
        if self.rank == source:
            self._board.value = pickle.dumps(value)
        self._board.barrier.wait(PATIENCE_S)
        found = pickle.loads(self._board.value)
        self._board.barrier.wait(PATIENCE_S)
        return found


def in_each(world_size: int, do: Any) -> list[Any]:
    """What do(member) returns for each, or raises."""
    board = Board(world_size)
    with ThreadPoolExecutor(world_size) as threads:
        futures = [threads.submit(do, Member(board, rank)) for rank in range(world_size)]
        return [one.exception(PATIENCE_S) or one.result() for one in futures]


def test_one_of_a_group_writes_and_all_others_read() -> None:
    queues = in_each(3, lambda pg: MessageQueue.create_from_process_group(pg, 1 << 20, 4, 1))
    assert [queue.statistics().is_writer for queue in queues] == [False, True, False]
    queues[1].enqueue("a")
    assert [queues[rank].dequeue(PATIENCE_S) for rank in (0, 2)] == ["a", "a"]
    for queue in queues:
        queue.shutdown()


def test_all_of_a_group_read_a_queue_that_is_none_of_its_own() -> None:
    outer = MessageQueue(2, 2)

    def join(pg: Member) -> MessageQueue:
        handle = outer.export_handle() if pg.rank == 0 else None
        return MessageQueue.create_from_process_group(
            pg, 1 << 20, 4, external_writer_handle=handle, blocking=False
        )

    queues = in_each(2, join)
    outer.wait_until_ready(PATIENCE_S)
    outer.enqueue("a")
    assert [queue.broadcast_object() for queue in queues] == ["a", "a"]
    for queue in [*queues, outer]:
        queue.shutdown()


def test_one_of_a_group_reads_what_all_write() -> None:
    made = in_each(
        3,
        lambda pg: MessageQueue.create_from_process_group_single_reader(pg, 1 << 20, 4, 2),
    )
    assert [len(handles) for _, handles in made] == [0, 0, 3]
    queues = [queue for queue, _ in made]
    readers = [MessageQueue.create_from_handle(handle, 0) for handle in made[2][1]]
    for rank, queue in enumerate(queues):
        queue.enqueue(rank)
    assert [reader.dequeue(PATIENCE_S) for reader in readers] == [0, 1, 2]
    for queue in [*readers, *queues]:
        queue.shutdown()


def test_where_the_writer_can_make_no_queue_all_are_told() -> None:
    found = in_each(2, lambda pg: MessageQueue.create_from_process_group(pg, 1 << 20, 0))
    assert [type(error) for error in found] == [errors.ConfigError] * 2
    assert all("max_chunks=0" in str(error) for error in found)


@pytest.mark.parametrize("rank", [2, -1, "0"])
def test_a_rank_that_the_group_has_not_is_refused_by_all(rank: Any) -> None:
    for make in (
        lambda pg: MessageQueue.create_from_process_group(pg, 1 << 20, 4, rank),
        lambda pg: MessageQueue.create_from_process_group_single_reader(pg, 1 << 20, 4, rank),
    ):
        found = in_each(2, make)
        assert [type(error) for error in found] == [errors.ConfigError] * 2
        assert all(re.search(f"rank[= ]{rank!r}", str(error)) for error in found)


def test_what_is_no_group_is_refused() -> None:
    with pytest.raises(errors.ConfigError, match="a process group of torch"):
        MessageQueue.create_from_process_group(object(), 1, 1)


def test_a_group_of_torch_makes_the_same(tmp_path: Any) -> None:
    pytest.importorskip("torch")
    distributed: Any = pytest.importorskip("torch.distributed")
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        group = distributed.group.WORLD
        queue = MessageQueue.create_from_process_group(group, 1 << 20, 4)
        assert queue.broadcast_object(5) == 5
        one, handles = MessageQueue.create_from_process_group_single_reader(group, 1 << 20, 4)
        assert all(isinstance(handle, Handle) for handle in handles)
        reader = MessageQueue.create_from_handle(handles[0], 0)
        one.enqueue(6)
        assert reader.dequeue(PATIENCE_S) == 6
        for each in (reader, one, queue):
            each.shutdown()
    finally:
        distributed.destroy_process_group()

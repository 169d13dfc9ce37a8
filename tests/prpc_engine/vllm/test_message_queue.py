"""Queues with vLLM's face, between real processes and threads: order, room, names, deadlines, the
end of either side.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from prpc_engine import errors
from prpc_engine.node.slab import default_slab
from prpc_engine.vllm import (
    Handle,
    MessageQueue,
    QueueClosed,
    ReaderLost,
    WriterLost,
    WrongEnd,
)
from shard import ForkedError
from tests.program import PATIENCE_S, halt, wait_until
from tests.prpc_engine.vllm.ends import EndProcess, array_of, number_in

LARGE = 10_000_000  # of float32: 40 MB


class Queues:
    """What a test has made; all of it is shut down after it."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack

    def writer(self, *arguments: Any, **more: Any) -> MessageQueue:
        queue = MessageQueue(*arguments, **more)
        self._stack.callback(queue.shutdown)
        return queue

    def reader(self, handle: Handle, rank: int) -> MessageQueue:
        queue = MessageQueue.create_from_handle(handle, rank)
        self._stack.callback(queue.shutdown)
        return queue

    def process(self, env: dict[str, str] | None = None) -> EndProcess:
        return self._stack.enter_context(EndProcess(env))

    def readers(self, handle: Handle, count: int) -> list[EndProcess]:
        """In processes of their own."""
        made = [self.process() for _ in range(count)]
        for rank, process in enumerate(made):
            assert process.join(handle, rank) is None
        return made


@pytest.fixture
def queues() -> Iterator[Queues]:
    with contextlib.ExitStack() as stack:
        yield Queues(stack)


def over(transport: str, handle: Handle) -> Handle:
    """The same queue, reached so alone."""
    kept = [one for one in handle.addresses if one.startswith(f"{transport}://")]
    return dataclasses.replace(handle, addresses=kept)


def transports(queue: MessageQueue) -> list[str]:
    return [one.transport for one in queue.statistics().readers]


# -- items -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_each_reader_gets_each_item_in_order(queues: Queues, transport: str) -> None:
    queue = queues.writer(3, 3)
    readers = queues.readers(over(transport, queue.export_handle()), 3)
    assert transports(queue) == [transport] * 3
    for reader in readers:
        reader.begin("numbers", count=300)
    for number in range(300):
        queue.enqueue(number if number % 3 else array_of(number), timeout=PATIENCE_S)
    for reader in readers:
        assert reader.answer() == list(range(300))


def test_values_come_back_as_they_were(queues: Queues) -> None:
    queue = queues.writer(1, 1)
    reader = queues.reader(queue.export_handle(), 0)
    values: list[Any] = [
        None,
        ("execute_model", (1, {"a": [2.5]}), {}, 0),
        dataclasses.replace(queue.export_handle(), pid=5),  # any class, by pickle
        "x" * 100_000,
        list(range(20_000)),
        {"ids": np.arange(6).reshape(2, 3), "many": b"y" * 50_000},
    ]
    for value in values:
        queue.enqueue(value)
    for value in values[:-1]:
        assert reader.dequeue(PATIENCE_S) == value
    last = reader.dequeue(PATIENCE_S)
    np.testing.assert_array_equal(last["ids"], values[-1]["ids"])
    assert last["many"] == values[-1]["many"]


def test_an_array_may_be_changed_at_once_and_what_arrives_is_read_only(queues: Queues) -> None:
    queue = queues.writer(1, 1)
    reader = queues.reader(queue.export_handle(), 0)
    array = array_of(7)
    queue.enqueue([array])
    array[:] = 8
    (found,) = reader.dequeue(PATIENCE_S)
    assert number_in(found) == 7
    assert not found.flags.writeable


def test_large_arrays_reach_eight_readers_from_one_copy(queues: Queues) -> None:
    queue = queues.writer(8, 8)
    readers = queues.readers(queue.export_handle(), 8)
    slab = default_slab()
    wait_until(lambda: slab.statistics().leases == 0)
    blocks = slab.statistics().blocks_used
    for reader in readers:
        halt(reader.pid)  # what is lent to it stays lent
    try:
        queue.enqueue(array_of(1, LARGE))
        wait_until(lambda: slab.statistics().leases == 8)
        assert slab.statistics().blocks_used == blocks + 1
    finally:
        for reader in readers:
            reader.process.send_signal(signal.SIGCONT)
    for reader in readers:
        reader.begin("numbers", count=3)
    for number in (2, 3):
        queue.enqueue(array_of(number, LARGE), timeout=PATIENCE_S)
    for reader in readers:
        assert reader.answer() == [1, 2, 3]
    wait_until(lambda: slab.statistics().leases == 0)


def test_threads_enqueue_and_dequeue_at_a_time_and_each_item_goes_to_one(queues: Queues) -> None:
    queue = queues.writer(2, 2, max_chunks=4)
    process = queues.process()
    process.join(queue.export_handle(), 1)
    process.begin("numbers", count=400)
    reader = queues.reader(queue.export_handle(), 0)

    def enqueue(thread: int) -> None:
        for number in range(100):
            queue.enqueue(thread * 1000 + number, timeout=PATIENCE_S)

    with ThreadPoolExecutor(8) as threads:
        puts = [threads.submit(enqueue, thread) for thread in range(4)]
        takes = [
            threads.submit(lambda: [reader.dequeue(PATIENCE_S) for _ in range(100)])
            for _ in range(4)
        ]
        for put in puts:
            put.result()
        taken = [take.result() for take in takes]
    whole = process.answer()
    assert sorted(whole) == sorted(number for found in taken for number in found)
    for thread in range(4):  # in the order of each thread that enqueued
        of_thread = [number for number in whole if number // 1000 == thread]
        assert of_thread == sorted(of_thread)
    for found in taken:
        assert [number for number in whole if number in set(found)] == found


def test_what_is_enqueued_before_a_reader_joins_waits_for_it(queues: Queues) -> None:
    queue = queues.writer(1, 1)
    for number in range(10):
        queue.enqueue(number)
    reader = queues.reader(queue.export_handle(), 0)
    assert [reader.dequeue(PATIENCE_S) for _ in range(10)] == list(range(10))


def test_an_array_outlives_the_queue_that_it_came_by(queues: Queues) -> None:
    with EndProcess() as writer:
        handle = writer.make(1, 1)
        reader = queues.reader(handle, 0)
        writer.do("arrays", first=5, end=6)
        found = reader.dequeue(PATIENCE_S)
    for _ in range(3):  # our own slab is busy meanwhile
        array_of(9)
    assert number_in(found) == 5


def test_broadcast_object_is_both(queues: Queues) -> None:
    queue = queues.writer(1, 1)
    reader = queues.reader(queue.export_handle(), 0)
    assert queue.broadcast_object({"a": 1}) == {"a": 1}
    assert reader.broadcast_object() == {"a": 1}


def test_a_queue_without_readers_swallows(queues: Queues) -> None:
    queue = queues.writer(0, 0, max_chunks=1)
    queue.wait_until_ready()
    for number in range(5):
        queue.enqueue(number)
    assert queue.statistics().items == 5


def test_an_item_that_cannot_be_read_is_named_and_the_next_one_comes(queues: Queues) -> None:
    queue = queues.writer(1, 1)
    reader = queues.reader(queue.export_handle(), 0)
    queue.enqueue(Unreadable())
    queue.enqueue(2)
    with pytest.raises(errors.BadArguments, match="item 1 of the queue of process"):
        reader.dequeue(PATIENCE_S)
    assert reader.dequeue(PATIENCE_S) == 2


def test_an_item_beyond_a_limit_is_refused_and_the_queue_goes_on(queues: Queues) -> None:
    queue = queues.writer(1, 1)
    (reader,) = queues.readers(queue.export_handle(), 1)
    with pytest.raises(errors.BadArguments, match="4096 are allowed \\(limit blocks_max\\)"):
        queue.enqueue([array_of(number, 1) for number in range(4096)])
    queue.enqueue(5)
    assert reader.do("numbers", count=1) == [5]
    assert queue.statistics().items == 1


class Unreadable:
    """Its pickle raises when it is read."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


# -- room and deadlines ----------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["memory", "tcp"])
def test_enqueue_waits_for_the_slow_and_names_it_when_the_time_is_over(
    queues: Queues, transport: str
) -> None:
    queue = queues.writer(3, 2, local_reader_ranks=[3, 4], max_chunks=4, connect_ip="127.0.0.1")
    handle = over(transport, queue.export_handle())
    quick, slow = queues.reader(handle, 3), queues.reader(handle, 4)
    for number in range(4):
        queue.enqueue(number)
        quick.dequeue(PATIENCE_S)
    with pytest.raises(
        TimeoutError, match="a reader of another host \\(has not joined\\)"
    ) as caught:
        queue.enqueue(4, timeout=0.0)
    assert isinstance(caught.value, errors.DeadlineExceeded)
    assert f"reader 4 (process {os.getpid()} on " in str(caught.value)
    assert "reader 3" not in str(caught.value)
    late = queues.reader(handle, 9)
    for _ in range(4):
        late.dequeue(PATIENCE_S)
    assert slow.dequeue(PATIENCE_S) == 0
    queue.enqueue(4, timeout=PATIENCE_S)  # one place is enough
    with pytest.raises(TimeoutError, match="reader 4"):
        queue.enqueue(5, timeout=0.0)
    assert [slow.dequeue(PATIENCE_S) for _ in range(4)] == [1, 2, 3, 4]


def test_a_reader_that_is_stopped_is_named_and_goes_on_where_it_was(queues: Queues) -> None:
    queue = queues.writer(1, 1, max_chunks=3)
    (reader,) = queues.readers(queue.export_handle(), 1)
    halt(reader.pid)
    for number in range(3):
        queue.enqueue(array_of(number))
    with pytest.raises(TimeoutError, match=rf"reader 0 \(process {reader.pid} on "):
        queue.enqueue(3, timeout=0.0)
    reader.process.send_signal(signal.SIGCONT)
    reader.begin("numbers", count=4)
    queue.enqueue(3, timeout=PATIENCE_S)
    assert reader.answer() == [0, 1, 2, 3]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_what_finds_no_room_in_the_outbox_leaves_later_and_before_shutdown_is_over(
    queues: Queues, transport: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    config = tmp_path / "prpc.toml"
    config.write_text("[limits]\noutbox_messages_max = 2\noutbox_bytes_max = 4000000\n")
    monkeypatch.setenv("PRPC_CONFIG", str(config))
    queue = queues.writer(1, 1, max_chunks=40)
    (reader,) = queues.readers(over(transport, queue.export_handle()), 1)
    halt(reader.pid)
    for number in range(40):
        queue.enqueue(array_of(number, 500_000), timeout=PATIENCE_S)  # 2 MB
    reader.begin("numbers", count=40)
    with ThreadPoolExecutor(1) as beside:
        ends = beside.submit(queue.shutdown)
        wait_until(lambda: queue.shutting_down)
        reader.process.send_signal(signal.SIGCONT)
        ends.result(PATIENCE_S)
    assert reader.answer() == list(range(40))


def test_dequeue_gives_up_at_its_deadline_and_misses_nothing(queues: Queues) -> None:
    queue = queues.writer(1, 1)
    reader = queues.reader(queue.export_handle(), 0)
    for timeout in (0, 0.0, 0.01):
        with pytest.raises(TimeoutError, match="no item 1 was enqueued"):
            reader.dequeue(timeout=timeout)
    queue.enqueue(1)
    assert reader.dequeue(timeout=PATIENCE_S, indefinite=True) == 1


def test_who_waits_long_says_for_whom_in_the_log(
    queues: Queues, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("prpc_engine.vllm.waits.TELL_S", 0.01)
    queue = queues.writer(2, 2, max_chunks=1)
    reader = queues.reader(queue.export_handle(), 0)
    waits: list[tuple[Callable[[], Any], str]] = [
        (lambda: reader.dequeue(0.1), "no item 1 has come"),
        (lambda: queue.wait_until_ready(0.1), "waits for reader 1 (has not joined)"),
        (lambda: reader.wait_until_ready(0.1), "reader 0 waits for other readers"),
        (lambda: queue.enqueue(2, 0.1), "no room for item 2: 1 items wait for reader 0 (process"),
    ]
    for wait, text in waits:
        if "item 2" in text:
            queue.enqueue(1)
        caplog.clear()
        with pytest.raises(TimeoutError):
            wait()
        assert text in caplog.text
    queues.reader(queue.export_handle(), 1)
    reader.dequeue(PATIENCE_S)
    caplog.clear()
    with pytest.raises(TimeoutError):
        reader.dequeue(0.1, indefinite=True)
    assert "no item" not in caplog.text


def test_one_item_of_room_is_enough_for_a_stream(queues: Queues) -> None:
    queue = queues.writer(1, 1, max_chunks=1)
    (reader,) = queues.readers(queue.export_handle(), 1)
    reader.begin("numbers", count=200)
    for number in range(200):
        queue.enqueue(number, timeout=PATIENCE_S)
    assert reader.answer() == list(range(200))


def test_all_ends_wait_until_all_are_there(queues: Queues) -> None:
    queue = queues.writer(2, 2)
    first = queues.process()
    first.join(queue.export_handle(), 0)
    first.begin("wait_until_ready")
    with pytest.raises(TimeoutError, match=r"waits for reader 1 \(has not joined\)"):
        queue.wait_until_ready(timeout=0.0)
    second = queues.reader(queue.export_handle(), 1)
    with pytest.raises(TimeoutError, match="waits for other readers"):
        second.wait_until_ready(timeout=0.0)
    queue.wait_until_ready(timeout=PATIENCE_S)
    second.wait_until_ready(timeout=PATIENCE_S)
    assert first.answer() is None


# -- ends ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_reader_that_is_killed_is_named_and_does_not_hang_the_writer(
    queues: Queues, transport: str
) -> None:
    queue = queues.writer(2, 2, max_chunks=2)
    readers = queues.readers(over(transport, queue.export_handle()), 2)
    readers[0].begin("numbers", count=2)
    queue.enqueue(0)
    queue.enqueue(1)
    assert readers[0].answer() == [0, 1]
    with ThreadPoolExecutor(1) as beside:
        waits = beside.submit(queue.enqueue, 2)  # for reader 1, without a deadline
        readers[1].kill()
        with pytest.raises(ReaderLost, match=rf"reader 1 \(process {readers[1].pid} on") as caught:
            waits.result(PATIENCE_S)
    assert isinstance(caught.value, RuntimeError)
    assert (caught.value.rank, caught.value.pid) == (1, readers[1].pid)
    copied = pickle.loads(pickle.dumps(caught.value))
    assert (str(copied), copied.rank, copied.pid) == (str(caught.value), 1, readers[1].pid)
    with pytest.raises(ReaderLost, match="reader 1"):
        queue.enqueue(3)
    with pytest.raises(ReaderLost, match="reader 1"):
        queue.wait_until_ready()
    assert [one.state for one in queue.statistics().readers] == ["up", "lost"]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_writer_that_is_killed_wakes_its_readers_after_what_came(
    queues: Queues, transport: str
) -> None:
    writer = queues.process()
    handle = over(transport, writer.make(1, 1))
    reader = queues.reader(handle, 0)
    writer.do("arrays", first=0, end=3)
    wait_until(lambda: reader.statistics().items == 3)
    assert number_in(reader.dequeue(PATIENCE_S)) == 0
    writer.kill()
    assert [number_in(reader.dequeue(PATIENCE_S)) for _ in range(2)] == [1, 2]
    with pytest.raises(WriterLost, match=f"process {writer.pid} on .* is lost") as caught:
        reader.dequeue()  # without a deadline
    assert isinstance(caught.value, RuntimeError)
    assert (caught.value.pid, caught.value.has_shut_down) == (writer.pid, False)
    copied = pickle.loads(pickle.dumps(caught.value))
    assert (str(copied), copied.pid) == (str(caught.value), writer.pid)
    with pytest.raises(WriterLost):
        reader.wait_until_ready()


def test_a_writer_that_shuts_down_lets_what_was_enqueued_arrive(queues: Queues) -> None:
    queue = queues.writer(2, 2)
    (other,) = queues.readers(queue.export_handle(), 1)
    reader = queues.reader(queue.export_handle(), 1)
    for number in range(10):
        queue.enqueue(array_of(number))
    queue.shutdown()
    queue.shutdown()
    assert other.do("numbers", count=10) == list(range(10))
    assert [number_in(reader.dequeue(PATIENCE_S)) for _ in range(10)] == list(range(10))
    with pytest.raises(WriterLost, match="has shut down") as caught:
        reader.dequeue()
    assert caught.value.has_shut_down
    with pytest.raises(QueueClosed, match="was shut down"):
        queue.enqueue(1)


@pytest.mark.parametrize("verb", ["dequeue", "wait_until_ready"])
def test_shutdown_wakes_an_idle_reader(queues: Queues, verb: str) -> None:
    queue = queues.writer(1, 1)
    reader = queues.reader(queue.export_handle(), 0)
    with ThreadPoolExecutor(2) as threads:
        waits = [threads.submit(getattr(reader, verb)) for _ in range(2)]
        reader.shutdown()
        for wait in waits:
            with pytest.raises(RuntimeError, match=r"^cancelled"):
                wait.result(PATIENCE_S)
    with pytest.raises(RuntimeError, match=r"^cancelled"):
        reader.dequeue(timeout=1)


def test_shutdown_wakes_a_writer_that_waits(queues: Queues) -> None:
    queue = queues.writer(1, 1, max_chunks=1)
    queue.enqueue(0)
    with ThreadPoolExecutor(2) as threads:
        waits = [threads.submit(queue.enqueue, 1), threads.submit(queue.wait_until_ready)]
        queue.shutdown()
        for wait in waits:
            with pytest.raises(QueueClosed):
                wait.result(PATIENCE_S)


def test_a_reader_that_has_shut_down_is_not_waited_for(queues: Queues) -> None:
    queue = queues.writer(2, 2, max_chunks=1)
    first, second = (queues.reader(queue.export_handle(), rank) for rank in (0, 1))
    queue.enqueue(0)
    first.shutdown()
    assert second.dequeue(PATIENCE_S) == 0
    queue.enqueue(1, timeout=PATIENCE_S)
    second.shutdown()
    with pytest.raises(ReaderLost, match=r"all 2 readers .* have shut down"):
        queue.enqueue(2)


def test_a_reader_that_is_dropped_counts_as_lost(queues: Queues) -> None:
    queue = queues.writer(1, 1)
    made = [MessageQueue.create_from_handle(queue.export_handle(), 0)]
    with pytest.warns(ResourceWarning, match="reader 0 of the queue of process"):
        made.clear()
    wait_until(lambda: queue.statistics().readers[0].state == "lost")
    with pytest.raises(ReaderLost, match="let go of the queue"):
        queue.enqueue(1)


def test_a_writer_that_is_dropped_is_shut_down(queues: Queues) -> None:
    writer = queues.process()
    reader = queues.reader(writer.make(1, 1), 0)
    writer.do("enqueue", obj=1)
    writer.do("drop")
    assert reader.dequeue(PATIENCE_S) == 1
    with pytest.raises(WriterLost, match="has shut down"):
        reader.dequeue(PATIENCE_S)


def test_a_with_block_shuts_an_end_down() -> None:
    with (
        MessageQueue(1, 1) as queue,
        MessageQueue.create_from_handle(queue.export_handle(), 0) as reader,
    ):
        queue.enqueue(1)
        assert reader.dequeue(PATIENCE_S) == 1
    with pytest.raises(QueueClosed):
        reader.dequeue()


def test_queues_of_a_process_share_one_node(queues: Queues) -> None:
    """As vLLM's executor has them: one out, and one back from each worker."""
    out = queues.writer(2, 2)
    workers = queues.readers(out.export_handle(), 2)
    threads = threading.active_count()
    more = [queues.writer(1, 1) for _ in range(5)]
    assert threading.active_count() == threads
    assert len({tuple(one.export_handle().addresses) for one in more}) == 1
    assert workers[0].do("enqueue", obj=1)[0] == "WrongEnd"


# -- what is refused -------------------------------------------------------------------------------


def test_a_handle_of_a_queue_that_is_gone_says_so(queues: Queues) -> None:
    kept = queues.writer(1, 1)  # its node stays
    queue = MessageQueue(1, 1)
    queue.shutdown()
    with pytest.raises(WriterLost, match="was shut down there"):
        MessageQueue.create_from_handle(queue.export_handle(), 0)
    with EndProcess() as writer:
        handle = writer.make(1, 1)
    with pytest.raises(WriterLost, match=f"process {writer.pid} on .*cannot be reached"):
        MessageQueue.create_from_handle(handle, 0)
    assert kept.statistics().items == 0


def test_a_handle_of_another_queue_at_that_place_is_refused(queues: Queues) -> None:
    handle = queues.writer(1, 1).export_handle()
    forged = dataclasses.replace(handle, token="0" * len(handle.token))
    with pytest.raises(errors.ConfigError, match="another one than that of the handle"):
        MessageQueue.create_from_handle(forged, 0)
    assert handle.token not in repr(handle)


def test_a_rank_that_is_wrong_or_taken_is_refused(queues: Queues) -> None:
    queue = queues.writer(2, 2)
    reader = queues.reader(queue.export_handle(), 0)
    with pytest.raises(errors.ConfigError, match="rank 2 is no reader of this queue"):
        MessageQueue.create_from_handle(queue.export_handle(), 2)
    with pytest.raises(errors.ConfigError, match="rank 0 is taken by reader 0"):
        MessageQueue.create_from_handle(queue.export_handle(), 0)
    with pytest.raises(errors.ConfigError, match="rank"):
        MessageQueue.create_from_handle(queue.export_handle(), "0")  # type: ignore[arg-type]
    with pytest.raises(errors.ConfigError, match="export_handle"):
        MessageQueue.create_from_handle(queue, 1)  # type: ignore[arg-type]
    queue.enqueue(1)
    assert reader.dequeue(PATIENCE_S) == 1


def test_each_verb_is_for_its_end(queues: Queues) -> None:
    queue = queues.writer(1, 1)
    reader = queues.reader(queue.export_handle(), 0)
    with pytest.raises(WrongEnd, match="only readers can dequeue"):
        queue.dequeue()
    with pytest.raises(RuntimeError, match="cannot enqueue"):
        reader.enqueue(1)


@pytest.mark.parametrize(
    ("arguments", "more", "text"),
    [
        ((-1, 0), {}, "n_reader=-1"),
        ((1, 2), {}, "n_local_reader=2"),
        ((True, 1), {}, "n_reader=True"),
        ((1.0, 1), {}, "n_reader=1.0"),
        ((2, 2, [0]), {}, "local_reader_ranks"),
        ((2, 2, [0, "1"]), {}, "local_reader_ranks"),
        ((2, 2, [1, 1]), {}, "allowed once"),
        ((1, 1), {"max_chunks": 0}, "max_chunks=0"),
        ((1, 1), {"max_chunk_bytes": 0}, "max_chunk_bytes=0"),
        ((1, 0), {"connect_ip": "192.0.2.1"}, "192.0.2.1"),
    ],
)
def test_arguments_that_make_no_sense_are_named(
    arguments: tuple[Any, ...], more: dict[str, Any], text: str
) -> None:
    with pytest.raises(errors.ConfigError, match=text):
        MessageQueue(*arguments, **more)


@pytest.mark.parametrize("timeout", [-1, "1", float("nan"), True])
def test_a_timeout_is_a_number_of_seconds(queues: Queues, timeout: Any) -> None:
    queue = queues.writer(1, 1)
    reader = queues.reader(queue.export_handle(), 0)
    verbs: list[Callable[[], Any]] = [
        lambda: queue.enqueue(1, timeout=timeout),
        lambda: reader.dequeue(timeout=timeout),
        lambda: queue.wait_until_ready(timeout=timeout),
    ]
    for verb in verbs:
        with pytest.raises(errors.ConfigError, match="timeout="):
            verb()


def test_readers_of_other_hosts_need_the_secret_of_the_job(
    queues: Queues, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.2")
    queue = queues.writer(1, 0)  # at a loopback, so without one
    assert (queue.export_handle().remote_subscribe_addr or "").startswith("tcp://127.0.0.2:")
    assert queues.writer(1, 1).export_handle().remote_subscribe_addr is None
    secret = tmp_path / "secret"
    secret.write_text("a secret of this job alone")
    secret.chmod(0o600)
    stranger = queues.process({"PRPC_SECRET_FILE": str(secret)})
    kind, text = stranger.join(over("tcp", queue.export_handle()), 0)
    assert kind == "AuthenticationFailed"
    assert "PRPC_SECRET_FILE" in text


def test_what_is_no_pickle_is_all_that_travels_where_the_configuration_says_so(
    queues: Queues, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    config = tmp_path / "prpc.toml"
    config.write_text("[node]\nallow_pickle = false\n")
    monkeypatch.setenv("PRPC_CONFIG", str(config))
    queue = queues.writer(1, 1)
    reader = queues.reader(queue.export_handle(), 0)
    with pytest.raises(errors.BadArguments, match="Unreadable"):
        queue.enqueue(Unreadable())
    queue.enqueue([1])  # what was refused is no item
    assert reader.dequeue(PATIENCE_S) == [1]


def test_a_fork_cannot_use_its_parents_queue_and_has_its_own(queues: Queues) -> None:
    queue = queues.writer(1, 1)
    reader = queues.reader(queue.export_handle(), 0)
    child = os.fork()
    if not child:
        code = 1
        with contextlib.suppress(BaseException):
            for verb in (lambda: queue.enqueue(1), reader.dequeue):
                try:
                    verb()
                except ForkedError:
                    code += 10
            queue.shutdown()
            own = MessageQueue(1, 1)
            own.enqueue(1)
            own.shutdown()
            code += 1
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 22
    queue.enqueue(2)
    assert reader.dequeue(PATIENCE_S) == 2


def test_ctrl_c_in_a_wait_leaves_both_ends_usable(queues: Queues) -> None:
    queue = queues.writer(1, 1, max_chunks=1)
    reader = queues.reader(queue.export_handle(), 0)
    with pytest.raises(KeyboardInterrupt), interrupted_in(MessageQueue.dequeue):
        reader.dequeue()
    queue.enqueue(1)
    with pytest.raises(KeyboardInterrupt), interrupted_in(MessageQueue.enqueue):
        queue.enqueue(2)
    assert reader.dequeue(PATIENCE_S) == 1
    queue.enqueue(3, timeout=PATIENCE_S)
    assert reader.dequeue(PATIENCE_S) == 3


@contextlib.contextmanager
def interrupted_in(function: Callable[..., Any]) -> Iterator[None]:
    """Ctrl-C once this thread is in it."""
    ident = threading.get_ident()

    def is_inside() -> bool:
        frame = sys._current_frames().get(ident)
        while frame is not None and frame.f_code is not function.__code__:
            frame = frame.f_back
        return frame is not None

    def interrupt() -> None:
        wait_until(is_inside)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        yield
    finally:
        thread.join()

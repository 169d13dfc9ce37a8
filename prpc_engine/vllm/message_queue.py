"""MessageQueue: the face of vLLM 0.33's, over this engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from prpc_engine import errors
from prpc_engine.dropped import close_dropped
from prpc_engine.settings.config import check_seconds
from prpc_engine.vllm import process_groups
from prpc_engine.vllm.handle import Handle
from prpc_engine.vllm.queue_errors import WrongEnd
from prpc_engine.vllm.queue_node import LOOPBACK, outward_host
from prpc_engine.vllm.readers import QueueReaders
from prpc_engine.vllm.reading_end import ReadingEnd
from prpc_engine.vllm.writing_end import QueueReaderStatistics, WritingEnd
from shard import is_count, runtime

CHUNK_BYTES_MAX = 24 << 20  # vLLM's default; see MessageQueue
CHUNKS_MAX = 10  # vLLM's default
READERS_MAX, CHUNKS_LIMIT = 4096, 1 << 20


@dataclass(frozen=True)
class QueueStatistics:
    """A snapshot of one end.

    items    enqueued here, or received from the writer
    taken    of those, how many were dequeued here; 0 at the writer
    readers  of the writer: each of them
    """

    is_writer: bool
    items: int
    taken: int
    readers: tuple[QueueReaderStatistics, ...]


class MessageQueue:
    """One process writes, each reader gets each item, in order. Made so, it is the writing end; a
    reader has its own from create_from_handle(). Any number of threads may use either end.

    n_reader            how many readers there are in all
    n_local_reader      of those, how many are on this host
    local_reader_ranks  their ranks; None: 0, 1, ...; readers of other hosts have any other
    max_chunk_bytes     taken for vLLM's sake, and of no effect: items of any size go one way
    max_chunks          items that may be enqueued and not dequeued by some reader: then enqueue()
                        waits
    connect_ip          the address of this host that readers of others reach; None: VLLM_HOST_IP,
                        else that of the interface which leads out. Such readers need the secret of
                        the job (PRPC_SECRET_FILE)
    enable_shm_tensor_arena
                        taken, and of no effect: memory is shared in any case

    A context manager: shutdown() by its owner, or use it in a `with` block. One that is dropped is
    shut down with a ResourceWarning. Raises ConfigError for numbers, ranks or an address that are
    not allowed.
    """

    def __init__(
        self,
        n_reader: int,
        n_local_reader: int,
        local_reader_ranks: Sequence[int] | None = None,
        max_chunk_bytes: int = CHUNK_BYTES_MAX,
        max_chunks: int = CHUNKS_MAX,
        connect_ip: str | None = None,
        enable_shm_tensor_arena: bool = False,
    ) -> None:
        _check_count("n_reader", n_reader, 0, READERS_MAX)
        _check_count("n_local_reader", n_local_reader, 0, n_reader)
        _check_count("max_chunk_bytes", max_chunk_bytes, 1)
        _check_count("max_chunks", max_chunks, 1, CHUNKS_LIMIT)
        ranks = list(range(n_local_reader) if local_reader_ranks is None else local_reader_ranks)
        if len(ranks) != n_local_reader or not all(is_count(rank) for rank in ranks):
            raise errors.ConfigError(
                f"local_reader_ranks={ranks!r:.200}: {n_local_reader} whole numbers are expected, "
                "one for each of n_local_reader"
            )
        readers = QueueReaders(n_reader, ranks, max_chunks)
        host = LOOPBACK if n_reader == n_local_reader else connect_ip or outward_host()
        self.n_local_reader, self.n_remote_reader = n_local_reader, n_reader - n_local_reader
        self._writing: WritingEnd | None = WritingEnd(readers, host)
        self._reading: ReadingEnd | None = None
        self._pid, self.shutting_down = runtime.pid(), False
        self.handle = self._writing.handle()

    @staticmethod
    def create_from_handle(handle: Handle, rank: int) -> MessageQueue:
        """The reading end for that rank. Waits until the writer has let it in; from then on
        nothing that is enqueued, or was before, is missed.

        Raises WriterLost where the queue is gone, ConfigError for a rank that is taken or has no
        place, AuthenticationFailed where the writer has another secret, DeadlineExceeded.
        """
        if not isinstance(handle, Handle):
            raise errors.ConfigError(
                f"handle={handle!r:.100}: what export_handle() gives is expected"
            )
        if not is_count(rank):
            raise errors.ConfigError(f"rank={rank!r:.100}: a whole number is expected")
        queue = MessageQueue.__new__(MessageQueue)
        queue.handle = handle
        queue.n_local_reader = len(handle.local_reader_ranks)
        queue.n_remote_reader = handle.n_reader - queue.n_local_reader
        queue._pid, queue.shutting_down = runtime.pid(), True  # until it is made: see __del__
        queue._writing, queue._reading = None, ReadingEnd(handle, rank)
        queue.shutting_down = False
        return queue

    def export_handle(self) -> Handle:
        """What readers need: pickle it, and send it to them."""
        return self.handle

    def wait_until_ready(self, timeout: float | None = None) -> None:
        """Wait until all readers have joined and, at a reader, until the writer waits so, too: all
        ends call it. `timeout` in seconds; None: for ever, with a line in the log each minute of
        who is missing.

        Raises DeadlineExceeded, a TimeoutError, with who is missing; ReaderLost or WriterLost.
        """
        check_seconds("timeout", timeout, or_none=True)
        end = self._writing or self._reading
        assert end is not None, "it has one end"
        end.wait_until_ready(timeout)

    def enqueue(self, obj: Any, timeout: float | None = None) -> None:
        """Send it to each reader; it may be changed at once, but for arrays of
        prpc_engine.empty(), which are lent as they are.

        While a reader has max_chunks items that it has not dequeued, waits for it: `timeout`
        seconds; None: for ever, with a line in the log each minute of who is behind.

        Raises DeadlineExceeded, a TimeoutError, with who is behind, and nothing is enqueued;
        ReaderLost from when a reader has died on; BadArguments for what cannot be sent;
        QueueClosed; WrongEnd at a reader.
        """
        if self._writing is None:
            raise WrongEnd(f"reader {self._rank} of {self.handle} cannot enqueue: its writer can")
        check_seconds("timeout", timeout, or_none=True)
        self._writing.enqueue(obj, timeout)

    def dequeue(self, timeout: float | None = None, indefinite: bool = False) -> Any:
        """The next item. Waits for `timeout` seconds; None: for ever, with a line in the log each
        minute unless `indefinite`.

        Arrays are read-only views of memory that is shared with the writer and other readers, for
        as long as they are held: copy one to write to it. Tensors of torch are writable copies.

        Raises DeadlineExceeded, a TimeoutError; WriterLost once the writer is gone and what came
        from it was dequeued; QueueClosed, a RuntimeError, after shutdown(); BadArguments for an
        item that cannot be read, which counts as dequeued; WrongEnd at the writer.
        """
        if self._reading is None:
            raise WrongEnd(f"only readers can dequeue: this is the writer of {self.handle}")
        check_seconds("timeout", timeout, or_none=True)
        return self._reading.dequeue(timeout, indefinite)

    def broadcast_object(self, obj: Any = None) -> Any:
        """At the writer: enqueue it, and return it. At a reader: dequeue one."""
        if self._writing is None:
            return self.dequeue()
        self.enqueue(obj)
        return obj

    def statistics(self) -> QueueStatistics:
        """A snapshot."""
        if self._writing is not None:
            items, readers = self._writing.statistics()
            return QueueStatistics(True, items, 0, readers)
        assert self._reading is not None, "it has one end"
        items, taken = self._reading.statistics()
        return QueueStatistics(False, items, taken, ())

    def shutdown(self) -> None:
        """End this end, from any thread: what waits in it raises QueueClosed, a RuntimeError. A
        writer lets what was enqueued arrive first, for some seconds; its readers dequeue that, and
        then get WriterLost. A reader that has shut down is not waited for any more. Again, or in a
        fork: does nothing.
        """
        self.shutting_down = True
        end = self._writing or self._reading
        assert end is not None, "it has one end"
        end.close()

    close = shutdown  # as all else that has an end here is called

    def __enter__(self) -> MessageQueue:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()

    @property
    def _rank(self) -> int:
        assert self._reading is not None, "writers have none"
        return self._reading.rank

    def __del__(self) -> None:
        if getattr(self, "shutting_down", True):  # or it was never made
            return
        reading, writing = self._reading, self._writing
        if reading is not None:
            name = f"reader {reading.rank} of {self.handle}"
            close_dropped(self, name, lambda: reading.close(is_dropped=True), self._pid)
        elif writing is not None:
            close_dropped(self, str(self.handle), writing.close, self._pid)

    # -- of process groups -------------------------------------------------------------------------

    @staticmethod
    def create_from_process_group(
        pg: Any,
        max_chunk_bytes: int,
        max_chunks: int,
        writer_rank: int = 0,
        external_writer_handle: Handle | None = None,
        blocking: bool = True,
    ) -> MessageQueue:
        """One end in each process of a group, which all call this: the writer in that of rank
        `writer_rank` of the group, readers in the others.

        pg                      a process group of torch.distributed, or an object with rank,
                                world_size and broadcast_obj(object, source rank), as vLLM's
                                StatelessProcessGroup
        external_writer_handle  the group's writer reads that queue, as all others do
        blocking                wait until all ends are there

        Raises as MessageQueue() and create_from_handle(), in each process; ConfigError for what is
        no group, or a `writer_rank` that it has not.
        """
        group = process_groups.group_of(pg)
        if writer_rank not in range(group.world_size):
            raise errors.ConfigError(
                f"writer_rank={writer_rank!r:.100}: the group has ranks 0 to {group.world_size - 1}"
            )
        places = process_groups.hosts_of(group)
        if group.rank != writer_rank:
            handle = process_groups.shared(group, None, writer_rank)
            queue = MessageQueue.create_from_handle(handle, group.rank)
        elif external_writer_handle is not None:
            handle = process_groups.shared(group, external_writer_handle, writer_rank)
            queue = MessageQueue.create_from_handle(handle, group.rank)
        else:
            near = [
                rank
                for rank, place in enumerate(places)
                if place == places[writer_rank] and rank != writer_rank
            ]
            with process_groups.told_of_failure(group, writer_rank):
                queue = MessageQueue(
                    group.world_size - 1, len(near), near, max_chunk_bytes, max_chunks
                )
            process_groups.shared(group, queue.export_handle(), writer_rank)
        if blocking:
            queue.wait_until_ready()
        return queue

    @staticmethod
    def create_from_process_group_single_reader(
        pg: Any,
        max_chunk_bytes: int,
        max_chunks: int,
        reader_rank: int = 0,
        blocking: bool = False,
    ) -> tuple[MessageQueue, list[Handle]]:
        """A queue of its own in each process of a group, all of which are read in that of the
        global rank `reader_rank`: the queue of this process, and there the handles of all, by
        their ranks; elsewhere no handles.

        pg        a process group of torch.distributed
        blocking  wait until the reader has joined this process's queue
        """
        group = process_groups.group_of(pg)
        places = process_groups.hosts_of(group)
        reader = group.rank_of(reader_rank)
        is_near = places[group.rank] == places[reader]
        queue = MessageQueue(
            1, 1 if is_near else 0, max_chunk_bytes=max_chunk_bytes, max_chunks=max_chunks
        )
        handles = group.gather(queue.export_handle(), reader)
        if blocking:
            queue.wait_until_ready()
        return queue, handles


def _check_count(name: str, value: object, least: int, most: int | None = None) -> None:
    if not is_count(value, least) or (most is not None and int(value) > most):  # type: ignore[call-overload]
        bound = f"from {least} on" if most is None else f"from {least} to {most}"
        raise errors.ConfigError(f"{name}={value!r:.100}: a whole number {bound} is expected")

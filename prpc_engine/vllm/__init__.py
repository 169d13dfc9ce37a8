"""A queue with the face of vLLM's MessageQueue: one process writes, N read, each item reaches each
reader, in order.

    queue = MessageQueue(n_reader=2, n_local_reader=2)          # the writer
    handle = queue.export_handle()                              # pickle it, send it to the readers
    queue.enqueue(anything, timeout=5.0)

    reader = MessageQueue.create_from_handle(handle, rank=1)    # each reader, in its process
    anything = reader.dequeue(timeout=5.0)

What differs from vLLM's: who is behind and who died is said by name, nobody spins, and an array is
copied once whatever the number of readers on a host.

    message_queue   ->  writing_end  ->  readers
    message_queue   ->  reading_end
    both ends       ->  waits (how threads do), queue_node (one for all queues of a process),
                        handle, queue_errors
    message_queue   ->  process_groups (torch.distributed is imported there, when asked)

docs/guides/topics.md has the user's page.
"""

from __future__ import annotations

from prpc_engine.vllm.handle import Handle
from prpc_engine.vllm.message_queue import MessageQueue, QueueStatistics
from prpc_engine.vllm.queue_errors import QueueClosed, ReaderLost, WriterLost, WrongEnd
from prpc_engine.vllm.writing_end import QueueReaderStatistics

__all__ = [
    "Handle",
    "MessageQueue",
    "QueueClosed",
    "QueueReaderStatistics",
    "QueueStatistics",
    "ReaderLost",
    "WriterLost",
    "WrongEnd",
]

"""iceoryx2: publish-subscribe over shared memory, one service for each direction. Every message is
a block of the service's memory that the publisher lends to its user; the subscriber sees it there.

Polling: both sides ask their subscriber again and again. Waiting: who publishes notifies the other
side's listener, which sleeps in the kernel. Publish-subscribe with a type of fixed length is the
fastest of what its Python offers: request-response, and slices of any length, take 0.6 to 1.5 us
more for 64 B there and back (polling, 2 cores of a VM).
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..child import STOP_LOOK_S, Announce, NotOffered, StopRequest
from ..harness import Place
from .face import ITEM, Job, Peer, as_item

# Not by `import`: mypy would want its types where it is not installed.
iox: Any = importlib.import_module("iceoryx2")

# Messages that a subscriber holds before it takes them. Nothing is dropped: a publisher that finds
# it full waits.
BUFFERED_MAX = 64
ARRAYS_BUFFERED_MAX = 2  # there is shared memory for as many
REQUEST, ANSWER = "request", "answer"
LOOK = iox.Duration.from_secs_f64(STOP_LOOK_S)  # how long one wait for a notification may be


def _answer_bytes(job: Job) -> int:
    return job.nbytes if job.kind == "echo" else ITEM.itemsize


class _Ends:
    """What one process has open: a publisher for what it sends, a subscriber for what it receives,
    and what it is woken by. Owned by that process: close() it.
    """

    def __init__(self, folder: str, job: Job, serves: bool, waiting: bool) -> None:
        iox.set_log_level(iox.LogLevel.Error)  # that no configuration file was found is no news
        config = iox.config.default()
        # Files in the benchmark's folder, and names in /dev/shm that the harness removes: the
        # library leaves one of each prefix, and all when it is killed.
        config.global_cfg.root_path = iox.Path.new(folder)
        config.global_cfg.prefix = iox.FileName.new(Path(folder).name + "_")
        self._buffered = BUFFERED_MAX if job.kind == "echo" else ARRAYS_BUFFERED_MAX
        # Its own handling of signals would swallow the SIGTERM that ends a server.
        signals = iox.SignalHandlingMode.Disabled
        builder = iox.NodeBuilder.new().config(config).signal_handling_mode(signals)
        self._node = builder.create(iox.ServiceType.Ipc)
        sizes = {REQUEST: job.nbytes, ANSWER: _answer_bytes(job)}
        outgoing, incoming = (ANSWER, REQUEST) if serves else (REQUEST, ANSWER)
        self._size_out, self._size_in = sizes[outgoing], sizes[incoming]
        self._subscriber = self._topic(incoming, self._size_in).subscriber_builder().create()
        self._publisher = self._topic(outgoing, self._size_out).publisher_builder().create()
        self._listener = self._notifier = None
        if waiting:
            self._listener = self._event(incoming).listener_builder().create()
            self._notifier = self._event(outgoing).notifier_builder().create()

    def _topic(self, name: str, size_bytes: int) -> Any:
        service = self._node.service_builder(iox.ServiceName.new(name))
        topic = service.publish_subscribe(ctypes.c_uint8 * size_bytes)
        topic = topic.max_publishers(1).max_subscribers(1).enable_safe_overflow(False)
        return topic.subscriber_max_buffer_size(self._buffered).open_or_create()

    def _event(self, name: str) -> Any:
        return self._node.service_builder(iox.ServiceName.new(name)).event().open_or_create()

    def loan(self) -> Any:
        """Memory for one message, not initialised; send_loan() it."""
        return self._publisher.loan_uninit()

    def send_loan(self, loan: Any) -> None:
        """Publish it. Then it is lent no more."""
        loan.assume_init().send()
        if self._notifier is not None:
            self._notifier.notify()

    def send(self, data: bytes | int) -> None:
        """Publish a copy of a message, given as its bytes or its address."""
        loan = self.loan()
        ctypes.memmove(loan.payload_ptr, data, self._size_out)
        self.send_loan(loan)

    def receive(self) -> bytes:
        """Wait for the next message; a copy of it."""
        receive, listener = self._subscriber.receive, self._listener
        while (message := receive()) is None:
            if listener is not None:
                listener.timed_wait(LOOK)
        return ctypes.string_at(message.payload_ptr, self._size_in)

    def answer(self, stop: StopRequest) -> None:
        """Send the beginning of each message back, as much of it as an answer has, until told to
        stop.
        """
        receive, listener = self._subscriber.receive, self._listener
        while not stop.asked:
            if (message := receive()) is not None:
                self.send(message.payload_ptr)
                del message  # its memory goes back to the publisher
            elif listener is not None:
                listener.timed_wait(LOOK)

    def close(self) -> None:
        """Close all; a second close() does nothing."""
        ports = self._publisher, self._subscriber, self._notifier, self._listener
        self._publisher = self._subscriber = self._notifier = self._listener = None
        for port in ports:
            if port is not None:
                port.delete()
        self._node = None


def serve(announce: Announce, folder: str, job: Job, waiting: bool) -> None:
    """Answer until SIGTERM, then close all in order."""
    stop = StopRequest()
    ends = _Ends(folder, job, serves=True, waiting=waiting)
    with contextlib.closing(ends):
        announce(None)
        ends.answer(stop)


class Connected(Peer):
    """The client's side.

    `waiting`: both sides sleep until they are notified. `lent`: new_array() gives the memory that
    is sent, which is then the publisher's again."""

    def __init__(self, place: Place, job: Job, waiting: bool, lent: bool = False) -> None:
        super().__init__(place, job)
        self._waiting, self._lent = waiting, lent
        self._loan: Any = None  # the memory of the last new_array()
        self.start(serve, place.folder, job, waiting)
        self._ends = _Ends(place.folder, job, serves=False, waiting=waiting)
        self.exits.callback(self._close_ends)

    def _close_ends(self) -> None:
        self._loan = None
        self._ends.close()

    def new_array(self, items: int) -> NDArray[np.float32]:
        if not self._lent:
            return super().new_array(items)
        self._loan = self._ends.loan()
        memory: Any = (ctypes.c_uint8 * self.job.nbytes).from_address(self._loan.payload_ptr)
        return np.frombuffer(memory, ITEM, items)

    def round_trip(self, payload: bytes) -> bytes:
        self._ends.send(payload)
        return self._ends.receive()

    def send_array(self, array: NDArray[np.float32]) -> float:
        if self._lent:
            loan, self._loan = self._loan, None
            self._ends.send_loan(loan)
        else:
            self._ends.send(array.ctypes.data)
        return as_item(self._ends.receive())

    def round_trips(self, payload: bytes, count: int, window: int) -> int:
        if self._waiting:
            # Seen with iceoryx2 0.10: the listener slept on, with answers at the subscriber.
            raise NotOffered("waiting with several requests under way, notifications are missed")
        if window > BUFFERED_MAX:
            raise NotOffered(f"{window} requests under way, at most {BUFFERED_MAX} are buffered")
        send, receive = self._ends.send, self._ends.receive
        echoed = 0
        for sent in range(count + window):
            if sent < count:
                send(payload)
            if window <= sent:
                echoed += len(receive())
        return echoed

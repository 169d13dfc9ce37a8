"""The server's side: every push and pull of the keys that this node owns is handed to one function.

    server = KVServer(0)
    server.set_request_handle(KVServerDefaultHandle())

Requests that come before the handle is set wait for it, in order. What the handle answers by
response(), then or later, from any thread, is what the worker gets. What it raises, the worker's
wait() raises as RemoteError.

handler_threads  where the handle runs
0                in the reactor's thread, one request at a time: the least time for each
n                in n threads, requests of one worker in one of them: in order, and beside those of
                 others
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import numpy as np

from prpc_engine.errors import BadArguments, Closed, ConfigError
from prpc_engine.pslite import ids, wire
from prpc_engine.pslite.customer_router import KV
from prpc_engine.pslite.handler_threads import THREADS_MAX, HandlerThreads
from prpc_engine.pslite.pairs import Keys, KVPairs, Lens, Vals, check_keys, check_vals
from prpc_engine.pslite.postoffice import Postoffice
from prpc_engine.pslite.simple_app import Answer, SimpleApp, SimpleHandle
from prpc_engine.pslite.wire import PULL, PUSH


class KVMeta(msgspec.Struct, frozen=True, eq=False):
    """Of one request: the worker's cmd, what it wants, its node id, its timestamp and its
    customer.
    """

    cmd: int
    push: bool
    pull: bool
    sender: int
    timestamp: int
    customer_id: int
    n_keys: int
    answer: Answer


KVHandle = Callable[[KVMeta, KVPairs, "KVServer"], object]


class KVServer(SimpleApp):
    """A KVServer hands every push and pull of the keys that this node owns to one function.

    set_request_handle() sets that function; response() answers from any thread. request_handle:
    that of simple messages; None answers "". handler_threads: 0 runs the handle in the reactor's
    thread, n in n threads, those of one worker in one of them. instance, postoffice: as of
    SimpleApp. Raises ConfigError, also at nodes that are no servers.
    """

    role = "server"

    def __init__(
        self,
        app_id: int = 0,
        request_handle: SimpleHandle | None = None,
        handler_threads: int = 0,
        instance: int = 0,
        postoffice: Postoffice | None = None,
    ) -> None:
        if not 0 <= handler_threads <= THREADS_MAX:
            raise ConfigError(f"handler_threads={handler_threads}: 0 to {THREADS_MAX} are allowed")
        super().__init__(app_id, 0, request_handle, instance=instance, postoffice=postoffice)
        self._handle: KVHandle | None = None
        self._landings: dict[tuple[int, int], Vals] = {}  # by sender's node id, key
        self._threads: HandlerThreads | None = None
        self._is_grouped = self.postoffice.settings.group_size > 1
        if handler_threads:
            self._threads = HandlerThreads(f"pslite-{app_id}-handler", handler_threads)
            self.postoffice.on_close(self.close)

    def set_request_handle(self, handle: KVHandle) -> None:  # type: ignore[override]  # ps-lite's KVServer hides SimpleApp's too
        """handle(meta, pairs, server) has to see to a server.response(meta, ...). Its arrays are
        read-only, and may be kept; but for those of register_recv_buffer(). Raises BadArguments for
        what cannot be called."""
        if not callable(handle):
            raise BadArguments(
                f"set_request_handle({handle!r}): a function of (meta, pairs, server) is allowed"
            )
        is_first, self._handle = self._handle is None, handle
        if is_first:
            self._customer_router.add_handler(KV, self.app_id, self._on_request)

    def register_recv_buffer(
        self, worker_rank: int, keys: Keys, vals: Vals, lens: Lens | None = None
    ) -> None:
        """From now on what that worker pushes to that one key lands in `vals`, which the handle
        gets as pairs.vals: the same memory each time, good until that worker's next push of the key
        is handled.

        Pushes have to be of that one key, and of exactly that type and length, else they are
        refused as BadArguments. Raises it here for more than one key, and arrays that cannot be
        written."""
        keys, buffer = (
            check_keys("register_recv_buffer", keys),
            check_vals("register_recv_buffer", "vals", vals, True),
        )
        if len(keys) != 1 or (lens is not None and lens.tolist() != [len(buffer)]):
            raise BadArguments(
                f"register_recv_buffer: one key, whose length is that of vals ({len(buffer)}), "
                f"not {len(keys)} keys"
            )
        self._landings[ids.node_id("worker", worker_rank), int(keys[0])] = buffer

    def response(self, meta: Any, pairs: Any = None) -> None:
        """Answer a request: with the pairs of a pull, with none for a push; simple ones as
        SimpleApp does. From any thread.

        Raises Rejected the second time, BadArguments for an answer that is none."""
        if type(meta) is not KVMeta:
            super().response(meta, "" if pairs is None else pairs)
        elif not meta.pull:
            meta.answer.give(None)
        elif pairs is None or len(pairs.keys) != meta.n_keys:
            got = "nothing" if pairs is None else f"{len(pairs.keys)}"
            raise BadArguments(
                f"a pull of {meta.n_keys} keys is answered with KVPairs of as many, not of {got}"
            )
        elif pairs.lens is not None and len(pairs.lens) != meta.n_keys:
            raise BadArguments(
                f"a pull of {meta.n_keys} keys is answered with as many lens, "
                f"not with {len(pairs.lens)}"
            )
        else:
            meta.answer.give(wire.pack_answer(meta.n_keys, pairs.vals, pairs.lens))

    def close(self) -> None:
        """Handle no more requests: they wait for the next server of this id. Again:
        does nothing.
        """
        super().close()
        self._customer_router.remove_handler(KV, self.app_id, self._on_request)
        if self._threads is not None:
            self._threads.close()

    def _on_request(self, head: bytes, fields: tuple[int, ...], arrays: tuple[Any, ...]) -> Any:
        # failpoint: kv_server.reading
        pairs = wire.read_pairs(head, fields, arrays)
        _, sender, customer_id, cmd, timestamp, _, flags, _, _, n_keys, _ = fields
        if self._is_grouped:
            sender = self.postoffice.process_of(sender)
        answer = Answer()
        meta = KVMeta(
            cmd,
            flags & PUSH != 0,
            flags & PULL != 0,
            sender,
            timestamp,
            customer_id,
            n_keys,
            answer,
        )
        if self._threads is None:
            self._run(meta, pairs)
            return answer.outcome()
        later = answer.outcome()
        try:
            self._threads.put(ids.rank_of(sender), partial(self._run_in_thread, meta, pairs))
        except Closed:
            # by another thread, after the customer_router gave us the request: it has others to
            # give it to by now
            return self._customer_router.take(KV, self.app_id, (head, fields, arrays), arrays)
        return later

    def _run(self, meta: KVMeta, pairs: KVPairs) -> None:
        assert self._handle is not None
        if self._landings and meta.push:
            pairs = self._landed(meta, pairs)
        self._handle(meta, pairs, self)

    def _run_in_thread(self, meta: KVMeta, pairs: KVPairs) -> None:
        try:
            self._run(meta, pairs)
        except (Exception, SystemExit) as error:
            # a handle that exits ends its request, not its thread
            meta.answer.fail(error)

    def _landed(self, meta: KVMeta, pairs: KVPairs) -> KVPairs:
        keys, vals = pairs.keys, pairs.vals
        found = [key for key in keys.tolist() if (meta.sender, key) in self._landings]
        if not found:
            return pairs
        buffer = self._landings[meta.sender, found[0]]
        if len(keys) != 1 or len(vals) != len(buffer) or vals.dtype != buffer.dtype:
            raise BadArguments(
                f"a push of {len(keys)} keys with {vals.dtype}[{len(vals)}] by "
                f"{ids.name_of(meta.sender)}: key {found[0]} has a "
                f"registered buffer of {buffer.dtype}[{len(buffer)}], so push it alone, "
                "and of that length"
            )
        np.copyto(buffer, vals)
        return KVPairs(keys, buffer, pairs.lens, pairs.priority)

"""The worker's side: push and pull keys with values, of whichever servers own them.

    kv = KVWorker(0, 0)
    kv.wait(kv.push(keys, vals))
    kv.wait(kv.pull(keys, vals))        # fills vals

    verb         sends             fills         may the arrays be changed at once?
    push         keys, vals, lens  nothing       yes
    zpush        keys, vals, lens  nothing       no: not before wait() returns
    pull         keys              vals, lens    keys: yes
    zpull        keys              vals, lens    no
    push_pull    keys, vals, lens  outs          yes, but for outs
    zpush_pull   keys, vals, lens  outs          no

What is filled need not be of the length that the servers send: an empty array (np.empty(0,
np.float32), that is no view of another) is resized to it, in place, and of a longer one the first
so many elements are filled. lens, empty or one for each key, say how long each value is, and so how
many came.

Every verb returns a timestamp at once; its callback runs in an engine thread, before wait() of it
returns, which raises what the callback raises. In a coroutine: await kv.wait_async(kv.push(keys,
vals)). What starts with z does not copy what has to wait here. Requests of one worker to one server
are sent and handled in order, but for priority: of what has to wait here, the higher goes first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from prpc_engine.errors import BadArguments, RpcError
from prpc_engine.pslite import ids, wire
from prpc_engine.pslite.conversion import converted
from prpc_engine.pslite.customer import REQUEST_TIMEOUT_S
from prpc_engine.pslite.customer_router import KV
from prpc_engine.pslite.pairs import (
    NO_VALS,
    Keys,
    KVPairs,
    Lens,
    Vals,
    check_keys,
    check_lens,
    check_pairs,
    check_vals,
    is_resizable,
)
from prpc_engine.pslite.postoffice import START_TIMEOUT_S, Postoffice
from prpc_engine.pslite.simple_app import SimpleApp, SimpleHandle
from prpc_engine.pslite.slicer import Slicer, by_ranges, check_slices
from prpc_engine.pslite.wire import PULL, PUSH

Callback = Callable[[], object]


class AnswerMismatch(RpcError):
    """What the servers sent does not fit into the array that was to be filled: that one is too
    short and cannot be resized, or its dtype does not hold a value.
    """


class KVWorker(SimpleApp):
    """A KVWorker pushes and pulls keys with values, to and from the servers that own them.

    Thread-safe; start() comes first. Verbs return a timestamp for wait() at once. What may be
    changed when: the table at the file's head.

    request_timeout_s  deadline of verbs that are given none, in seconds
    timeout_s          for all servers to be there
    instance           with DMLC_GROUP_SIZE > 1: which one of this process; it talks to the servers'
                       instances of that number
    postoffice         the place in the job that it belongs to; None: this process's, of start()

    Verbs raise BadArguments for arrays that do not fit, Backpressure where too much waits. Raises
    ConfigError, DeadlineExceeded.
    """

    role = "worker"

    def __init__(
        self,
        app_id: int = 0,
        customer_id: int = 0,
        request_handle: SimpleHandle | None = None,
        request_timeout_s: float = REQUEST_TIMEOUT_S,
        timeout_s: float = START_TIMEOUT_S,
        instance: int = 0,
        postoffice: Postoffice | None = None,
    ) -> None:
        super().__init__(
            app_id,
            customer_id,
            request_handle,
            request_timeout_s=request_timeout_s,
            instance=instance,
            postoffice=postoffice,
        )
        self._servers: Sequence[int] = self.postoffice.peers(ids.SERVER_GROUP, instance)
        self._ranges = self.postoffice.key_ranges
        self.set_slicer(by_ranges)
        self.postoffice.connect(self._servers, timeout_s)

    def set_slicer(self, slicer: Slicer) -> None:
        """Who gets which keys is for slicer(pairs, ranges) to say: slicer.py. Raises BadArguments
        for what cannot be called.
        """
        if not callable(slicer):
            raise BadArguments(f"set_slicer({slicer!r}): a function of (pairs, ranges) is allowed")
        self._slicer: Slicer = slicer
        self._is_whole = slicer is by_ranges and len(self._servers) == 1  # nothing to cut

    # -- verbs -------------------------------------------------------------------------------------

    def push(
        self,
        keys: Keys,
        vals: Vals,
        lens: Lens | None = None,
        cmd: int = 0,
        callback: Callback | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> int:
        """Send values to the servers of their keys; the timestamp."""
        pairs = check_pairs("push", keys, vals, lens, priority)
        return self._send(PUSH, pairs, cmd, None, callback, timeout_s, False)

    def zpush(
        self,
        keys: Keys,
        vals: Vals,
        lens: Lens | None = None,
        cmd: int = 0,
        callback: Callback | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> int:
        """push() of arrays that stay as they are until it is done: what has to wait is not copied.
        Arrays of prpc_engine.empty() are not copied over shared memory either."""
        pairs = check_pairs("push", keys, vals, lens, priority)
        return self._send(PUSH, pairs, cmd, None, callback, timeout_s, True)

    def pull(
        self,
        keys: Keys,
        vals: Vals,
        lens: Lens | None = None,
        cmd: int = 0,
        callback: Callback | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> int:
        """Fill vals, and lens if given, with what the servers have for those keys; the timestamp.

        vals, lens: empty arrays are resized; of longer vals the first are filled. Values of another
        dtype than the server's are converted: floats to smaller ones by rounding.
        """
        return self._pull(keys, vals, lens, cmd, callback, priority, timeout_s, False)

    def zpull(
        self,
        keys: Keys,
        vals: Vals,
        lens: Lens | None = None,
        cmd: int = 0,
        callback: Callback | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> int:
        """pull() with keys that stay as they are until it is done."""
        return self._pull(keys, vals, lens, cmd, callback, priority, timeout_s, True)

    def push_pull(
        self,
        keys: Keys,
        vals: Vals,
        outs: Vals,
        lens: Lens | None = None,
        cmd: int = 0,
        callback: Callback | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> int:
        """push() and then pull() of the same keys in one message each way; fills outs, as pull()
        its vals. The timestamp.
        """
        return self._push_pull(keys, vals, outs, lens, cmd, callback, priority, timeout_s, False)

    def zpush_pull(
        self,
        keys: Keys,
        vals: Vals,
        outs: Vals,
        lens: Lens | None = None,
        cmd: int = 0,
        callback: Callback | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> int:
        """push_pull() of arrays that stay as they are until it is done."""
        return self._push_pull(keys, vals, outs, lens, cmd, callback, priority, timeout_s, True)

    # -- parts -------------------------------------------------------------------------------------

    def _pull(
        self,
        keys: Keys,
        vals: Vals,
        lens: Lens | None,
        cmd: int,
        callback: Callback | None,
        priority: int,
        timeout_s: float | None,
        stable: bool,
    ) -> int:
        keys = check_keys("pull", keys)
        out = check_vals("pull", "vals", vals, is_written=True)
        if lens is not None:
            if not is_resizable(lens) or lens.dtype != np.int32:
                check_lens("pull", keys, lens)
            check_vals("pull", "lens", lens, is_written=True)
        pairs = KVPairs(keys, NO_VALS, None, priority)
        finish = partial(_fill, "pull", keys, out, lens)
        return self._send(PULL, pairs, cmd, finish, callback, timeout_s, stable, out.nbytes)

    def _push_pull(
        self,
        keys: Keys,
        vals: Vals,
        outs: Vals,
        lens: Lens | None,
        cmd: int,
        callback: Callback | None,
        priority: int,
        timeout_s: float | None,
        stable: bool,
    ) -> int:
        pairs = check_pairs("push_pull", keys, vals, lens, priority)
        out = check_vals("push_pull", "outs", outs, is_written=True)
        finish = partial(_fill, "push_pull", pairs.keys, out, None)
        return self._send(PUSH | PULL, pairs, cmd, finish, callback, timeout_s, stable, out.nbytes)

    def _send(
        self,
        flags: int,
        pairs: KVPairs,
        cmd: int,
        finish: Callable[[int, list[Any]], object] | None,
        callback: Callback | None,
        timeout_s: float | None,
        stable: bool,
        answer_bytes: int = 0,
    ) -> int:
        customer, servers = self._customer, self._servers
        call_back = None if callback is None else partial(_call_back, callback)
        timestamp = customer.new_timestamp()
        if self._is_whole and len(pairs.keys):
            arguments, nbytes = wire.pack(
                self.app_id, self.node, self.customer_id, cmd, timestamp, flags, pairs
            )
            part = servers[0], arguments, nbytes + answer_bytes
            return customer.request(
                timestamp, KV, (part,), finish, pairs.priority, timeout_s, stable, call_back
            )
        header = self.app_id, self.node, self.customer_id, cmd, timestamp
        slicer = self._slicer  # another thread may set one meanwhile
        slices = slicer(pairs, self._ranges)
        if slicer is not by_ranges:
            check_slices(slices, pairs.keys, self._ranges)
            # answers are put together in that order
            in_order = sorted(zip(self._servers, slices, strict=True), key=_first_key)
            servers, slices = [server for server, _ in in_order], [each for _, each in in_order]
        parts = []
        for server, each in zip(servers, slices, strict=True):
            if each is not None and len(each.keys):
                arguments, nbytes = wire.pack(*header, flags, each)
                parts.append(
                    (server, arguments, nbytes + answer_bytes * len(each.keys) // len(pairs.keys))
                )
        return customer.request(
            timestamp, KV, parts, finish, pairs.priority, timeout_s, stable, call_back
        )


def _first_key(sent: tuple[int, KVPairs | None]) -> int:
    return int(sent[1].keys[0]) if sent[1] is not None and len(sent[1].keys) else -1


def _call_back(callback: Callback, timestamp: int, answers: object) -> None:
    callback()


def _fill(
    verb: str,
    keys: Keys,
    out: Vals,
    lens: Lens | None,
    timestamp: int,
    packed: list[Any],
) -> None:
    """Copy what the servers sent into the caller's arrays. Raises AnswerMismatch, and then nothing
    was copied.
    """
    answers = [wire.read_answer(each) for each in packed]
    total = begin = 0
    for at, (count, vals, their_lens) in enumerate(answers):
        total += len(vals)
        if vals.dtype is not out.dtype:
            try:
                vals = converted(keys[begin : begin + count], vals, their_lens, out.dtype)
            except ValueError as error:
                raise AnswerMismatch(
                    f"{verb} of {len(keys)} keys: {error}, the dtype of the array to be filled; "
                    f"give one of {vals.dtype}, which the server sent"
                ) from None
            answers[at] = count, vals, their_lens
        begin += count
    if total > len(out):
        if not is_resizable(out):
            raise AnswerMismatch(
                f"{verb} of {len(keys)} keys: the servers sent {total} values, "
                f"there is room for {len(out)}; give an array "
                "that fits, or an empty one of your own, to be resized"
            )
        # of what was empty there is no view whose memory would go
        out.resize(total, refcheck=False)
    if lens is not None and len(lens) < len(keys):
        lens.resize(len(keys), refcheck=False)
    begin = 0
    for _, vals, _ in answers:
        out[begin : begin + len(vals)] = vals
        begin += len(vals)
    if lens is not None:
        begin = 0
        for count, vals, their_lens in answers:
            lens[begin : begin + count] = len(vals) // count if their_lens is None else their_lens
            begin += count

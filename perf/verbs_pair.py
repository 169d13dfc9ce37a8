"""Two reliable queue pairs of one RDMA port, connected to each other, and nothing around them: what
a verb costs through pyverbs, for a transport to be measured by.

Both ends are in one process: whoever posts polls as well, so that no thread is waited for. Work
requests are made once and posted again, as a new one costs more than its post. Constants are of
infiniband/verbs.h, whose numbers are an interface; pyverbs has them under other names in each
release.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import mmap
from collections.abc import Callable
from typing import Any

from shard import VerbsPort

RC = 2  # IBV_QPT_RC
LOCAL_WRITE, REMOTE_WRITE, REMOTE_READ = 1, 2, 4  # of IBV_ACCESS_
WRITE, WRITE_WITH_IMM, SEND, READ = 0, 1, 2, 4  # of IBV_WR_, and RDMA_ but for SEND
SIGNALED, INLINE = 2, 8  # of IBV_SEND_
SUCCESS = 0  # IBV_WC_SUCCESS
DEPTH = 64  # work requests of a queue
NOTE_BYTES = 64  # of a message that announces or answers
READS = 8  # that one end has in flight, and answers at once
# 4.096 us x 2^14 = 67 ms without an acknowledgement, six times; 7 would be for ever with soft RoCE
TIMEOUT, RETRIES, RNR_RETRIES, RNR_TIMER = 14, 6, 6, 12
HOPS = 64


class VerbFailed(Exception):
    """A work request ended with an error."""


class _End:
    def __init__(self, pair: VerbsPair, inline_bytes: int) -> None:
        cq: Any = importlib.import_module("pyverbs.cq")
        mr: Any = importlib.import_module("pyverbs.mr")
        qp: Any = importlib.import_module("pyverbs.qp")
        wr: Any = importlib.import_module("pyverbs.wr")
        self.queue = pair.exits.enter_context(cq.CQ(pair.context, 2 * DEPTH, None, None, 0))
        self.memory = mmap.mmap(-1, max(mmap.PAGESIZE, pair.nbytes))
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.region = pair.exits.enter_context(
            mr.MR(
                pair.domain,
                len(self.memory),
                LOCAL_WRITE | REMOTE_WRITE | REMOTE_READ,
                address=self.address,
            )
        )
        asked = qp.QPInitAttr(
            qp_type=RC,
            scq=self.queue,
            rcq=self.queue,
            sq_sig_all=0,
            cap=qp.QPCap(
                max_send_wr=DEPTH,
                max_recv_wr=DEPTH,
                max_send_sge=1,
                max_recv_sge=1,
                max_inline_data=inline_bytes,
            ),
        )
        self.pair = pair.exits.enter_context(qp.QP(pair.domain, asked))
        first = qp.QPAttr(port_num=pair.port.number)
        first.qp_access_flags = LOCAL_WRITE | REMOTE_WRITE | REMOTE_READ
        self.pair.to_init(first)
        self.receive = wr.RecvWR(
            wr_id=0, num_sge=1, sg=[wr.SGE(self.address, pair.nbytes, self.region.lkey)]
        )


class VerbsPair:
    """A context manager: all of it is closed with it. Raises pyverbs' own errors.

    port          of the device that both ends are on
    nbytes        of the memory that each end has registered, and of what is moved
    inline_bytes  that may be sent without reading memory once the post has returned
    """

    def __init__(self, port: VerbsPort, nbytes: int, inline_bytes: int = 0) -> None:
        device: Any = importlib.import_module("pyverbs.device")
        pd: Any = importlib.import_module("pyverbs.pd")
        self.nbytes, self.port = nbytes, port
        with contextlib.ExitStack() as exits:
            self.exits = exits
            self.context = exits.enter_context(device.Context(name=self.port.device))
            self.domain = exits.enter_context(pd.PD(self.context))
            self.near, self.far = _End(self, inline_bytes), _End(self, inline_bytes)
            mtu = self.context.query_port(self.port.number).active_mtu
            self._connect(self.near, self.far, mtu)
            self._connect(self.far, self.near, mtu)
            self.exits = exits.pop_all()

    def _connect(self, end: _End, other: _End, mtu: int) -> None:
        addr: Any = importlib.import_module("pyverbs.addr")
        qp: Any = importlib.import_module("pyverbs.qp")
        attributes = qp.QPAttr(port_num=self.port.number)
        attributes.path_mtu = mtu
        attributes.dest_qp_num = other.pair.qp_num
        attributes.rq_psn = attributes.sq_psn = 0
        attributes.max_dest_rd_atomic = attributes.max_rd_atomic = READS
        attributes.min_rnr_timer = RNR_TIMER
        route = addr.GlobalRoute(
            dgid=addr.GID(self.port.gid.exploded if self.port.gid else ""),
            sgid_index=self.port.gid_index,
            hop_limit=HOPS,
        )
        attributes.ah_attr = addr.AHAttr(gr=route, is_global=1, port_num=self.port.number)
        end.pair.to_rtr(attributes)
        attributes.timeout, attributes.retry_cnt = TIMEOUT, RETRIES
        attributes.rnr_retry = RNR_RETRIES
        end.pair.to_rts(attributes)

    def moves(self, opcode: int, in_flight: int = 1, is_inline: bool = False) -> Callable[[], None]:
        """A function that moves the near end's memory to the far one, or with READ that one's here,
        so often at once, and returns when all have arrived.
        """
        wr: Any = importlib.import_module("pyverbs.wr")
        near, far = self.near, self.far
        request = wr.SendWR(
            wr_id=1,
            opcode=opcode,
            num_sge=1,
            sg=[wr.SGE(near.address, self.nbytes, near.region.lkey)],
            send_flags=SIGNALED | (INLINE if is_inline else 0),
        )
        if opcode != SEND:
            request.set_wr_rdma(far.region.rkey, far.address)
        takes_slot = opcode in (SEND, WRITE_WITH_IMM)

        def move() -> None:
            if takes_slot:
                for _ in range(in_flight):
                    far.pair.post_recv(far.receive)
            for _ in range(in_flight):
                near.pair.post_send(request)
            _await(near, in_flight)
            if takes_slot:
                _await(far, in_flight)

        return move

    def moves_when_asked(self) -> Callable[[], None]:
        """The same in the way of a transport whose receiver reads: the near end announces its
        memory in a message, the far one reads it and answers. Of 64 bytes each, sent inline.
        """
        wr: Any = importlib.import_module("pyverbs.wr")
        near, far = self.near, self.far

        def message(end: _End) -> Any:
            place = wr.SGE(end.address, min(NOTE_BYTES, self.nbytes), end.region.lkey)
            return wr.SendWR(
                wr_id=1, opcode=SEND, num_sge=1, sg=[place], send_flags=SIGNALED | INLINE
            )

        announces, answers = message(near), message(far)
        read = wr.SendWR(
            wr_id=1,
            opcode=READ,
            num_sge=1,
            sg=[wr.SGE(far.address, self.nbytes, far.region.lkey)],
            send_flags=SIGNALED,
        )
        read.set_wr_rdma(near.region.rkey, near.address)

        def move() -> None:
            far.pair.post_recv(far.receive)
            near.pair.post_recv(near.receive)
            near.pair.post_send(announces)
            _await(far, 1)  # the announcement
            far.pair.post_send(read)
            _await(far, 1)
            far.pair.post_send(answers)
            _await(far, 1)
            _await(near, 2)  # that the announcement was sent, and the answer

        return move

    def __enter__(self) -> VerbsPair:
        return self

    def __exit__(self, *_: object) -> None:
        self.exits.close()


def _await(end: _End, count: int) -> None:
    poll = end.queue.poll
    while count:
        found, completions = poll(count)
        for one in completions:
            if one.status != SUCCESS:
                raise VerbFailed(f"work request {one.wr_id} ended with status {one.status}")
        count -= found

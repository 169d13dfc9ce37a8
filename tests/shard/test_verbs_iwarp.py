"""Who is let in over iWARP, and what is written to the kernel's rdma_cm: without a device.
tests/rdma/test_iwarp.py has one.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator
from dataclasses import replace
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

import pytest

from shard.transport.rdma_cm import (
    DEVICE,
    VERSION_FILE,
    CmEvent,
    CmEventKind,
    ConnectionManager,
    cm_refusal,
)
from shard.transport.verbs_introduction import (
    FAR_END_BYTES,
    IWARP_LINK,
    TOKEN_BYTES,
    FarEnd,
)
from shard.transport.verbs_iwarp import CmAnswer, answer_to, told

TOKEN = bytes(range(TOKEN_BYTES))
GID = IPv6Address("::ffff:10.77.0.1").packed
END = FarEnd(
    link=IWARP_LINK, mtu=5, lid=40_000, reads=8, number=3, gid=GID, slots=64, slot_bytes=1024
)


def event(kind: CmEventKind, data: bytes = b"") -> CmEvent:
    return CmEvent(kind, 7, 0, data)


@pytest.mark.parametrize(
    ("data", "has_accepted", "answer"),
    [
        (TOKEN, False, CmAnswer.ACCEPT),
        (TOKEN + bytes(40), False, CmAnswer.ACCEPT),  # as devices fill what they carry
        (TOKEN, True, CmAnswer.REJECT),
        (TOKEN[:-1], False, CmAnswer.REJECT),
        (TOKEN[:-1] + b"x", False, CmAnswer.REJECT),
        (b"", False, CmAnswer.REJECT),
    ],
)
def test_who_brings_the_token_is_let_in_once(
    data: bytes, has_accepted: bool, answer: CmAnswer
) -> None:
    assert answer_to(event(CmEventKind.CONNECT_REQUEST, data), TOKEN, has_accepted) is answer


def test_what_else_comes_is_the_connection_or_the_end_of_it() -> None:
    for kind in CmEventKind:
        if kind is CmEventKind.CONNECT_REQUEST:
            continue
        wanted = CmAnswer.CONNECTED if kind is CmEventKind.ESTABLISHED else CmAnswer.FAIL
        assert answer_to(event(kind), TOKEN, True) is wanted
        assert told(event(kind))


def test_an_end_that_listens_tells_where_and_with_which_token() -> None:
    end = replace(END, token=TOKEN, shown_address=(1 << 64) - 4096, shown_key=0xFFFFFFFF)
    data = end.pack()
    assert len(data) == FAR_END_BYTES
    assert FarEnd.unpack(data) == end
    assert end.place == "10.77.0.1 port 40000"
    assert FarEnd.unpack(END.pack()) == END


# -- rdma_cm ---------------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine whose rdma_cm is a file: what is written there can be read."""
    for path, text in ((DEVICE, ""), (VERSION_FILE, "4\n")):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text(text)
    return tmp_path


@pytest.fixture
def manager(root: Path) -> Iterator[ConnectionManager]:
    with contextlib.closing(ConnectionManager(root)) as manager:
        yield manager


def written(root: Path) -> tuple[int, bytes]:
    """The command, and what belongs to it; that nothing else was written."""
    data = (root / DEVICE).read_bytes()
    command, nbytes, _ = struct.unpack_from("=IHH", data)
    assert len(data) == 8 + nbytes
    return command, data[8:]


def test_an_address_is_bound_as_the_kernel_reads_it(root: Path, manager: ConnectionManager) -> None:
    manager.bind(9, IPv4Address("10.77.0.1"))
    command, body = written(root)
    assert (command, len(body)) == (2, 40)  # struct rdma_ucm_bind_ip
    assert body[8:16] == struct.pack("=H", 2) + b"\0\0\x0a\x4d\0\x01"  # struct sockaddr_in
    assert struct.unpack_from("=I", body, 36) == (9,)


def test_the_addresses_of_a_peer_are_written_of_ipv6_too(
    root: Path, manager: ConnectionManager
) -> None:
    own, far = IPv6Address("fd00::1"), IPv6Address("fd00::2")
    manager.resolve_address(9, own, far, 4791, 2000)
    command, body = written(root)
    assert (command, len(body)) == (3, 64)  # struct rdma_ucm_resolve_ip
    assert body[28:56] == struct.pack("=H", 10) + b"\x12\xb7" + bytes(4) + far.packed + bytes(4)
    assert body[8:24] == own.packed
    assert struct.unpack_from("=II", body, 56) == (9, 2000)


def test_a_request_carries_the_queue_pair_and_the_data(
    root: Path, manager: ConnectionManager
) -> None:
    manager.connect(9, 77, 8, 4, TOKEN)
    command, body = written(root)
    assert (command, len(body)) == (6, 280)  # struct rdma_ucm_connect, without what came later
    assert struct.unpack_from("=I", body) == (77,)
    assert body[8:264] == TOKEN.ljust(256, b"\0")
    # bytes of data, shared queue, reads answered, reads asked, flow, tries, tries, valid
    assert tuple(body[264:272]) == (TOKEN_BYTES, 0, 8, 4, 0, 7, 7, 1)
    assert struct.unpack_from("=I", body, 272) == (9,)


def test_an_acceptance_has_a_mark_without_which_the_kernel_tells_nothing(
    root: Path, manager: ConnectionManager
) -> None:
    manager.accept(9, 77, 8, 4)
    command, body = written(root)
    assert (command, len(body)) == (8, 288)  # struct rdma_ucm_accept, without what came later
    assert struct.unpack_from("=Q", body)[0] != 0
    assert struct.unpack_from("=I", body, 280) == (9,)


def test_what_rdma_cm_lacks_is_said(root: Path) -> None:
    assert cm_refusal(root) is None
    (root / VERSION_FILE).write_text("5\n")
    assert cm_refusal(root) == "the kernel's rdma_cm is of version 5, and 4 is known here"
    (root / VERSION_FILE).unlink()
    assert "does not tell which version" in (cm_refusal(root) or "")
    (root / DEVICE).unlink()
    assert cm_refusal(root) == "there is no /dev/infiniband/rdma_cm: modprobe rdma_ucm"

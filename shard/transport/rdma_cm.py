"""The kernel's rdma_cm: how two queue pairs are connected by addresses and ports of IP, as those of
iWARP have to be. Asked over /dev/infiniband/rdma_cm, by linux/rdma_user_cm.h, version ABI.

    create()    an identifier, for one end of a connection, or for who listens
    listening   bind(), listen(); then for each CONNECT_REQUEST, which brings a new identifier,
                accept() or reject()
    connecting  resolve_address() -> ADDRESS_RESOLVED, resolve_route() -> ROUTE_RESOLVED,
                connect() -> ESTABLISHED, REJECTED, UNREACHABLE or CONNECT_ERROR
    destroy()   ends an identifier, and its connection

rdma_cm knows a queue pair by its number alone, so pyverbs makes it and gives it back. Why not
pyverbs.cmid, which calls librdmacm: it holds the interpreter's lock in each call, and siw's connect
waits for the peer's tcp. A write to a descriptor lets other threads run, with every release.

    what is written   offset  size  field
                           0     4  which command
                           4     2  bytes of the command
                           6     2  bytes that its answer may have
                           8   ...  the command; where it has an answer, its address first

All in the byte order of the machine.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from dataclasses import dataclass
from enum import IntEnum
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

DEVICE = "dev/infiniband/rdma_cm"
VERSION_FILE, ABI = "sys/class/misc/rdma_cm/abi_version", 4
PRIVATE_BYTES_MAX = 56  # as rdma_cm itself carries between two ends at least
Address = IPv4Address | IPv6Address

_CREATE, _DESTROY, _BIND, _RESOLVE_ADDRESS, _RESOLVE_ROUTE, _QUERY_ROUTE = range(6)
_CONNECT, _LISTEN, _ACCEPT, _REJECT = range(6, 10)
_GET_EVENT = 12
_TCP, _RC = 0x0106, 2  # RDMA_PS_TCP, IBV_QPT_RC
_HEADER = struct.Struct("=IHH")
_CREATE_ID = struct.Struct("=QQHB5x")  # answer, ours, space of ports, kind of queue pair
_ANSWER_OF_ID = struct.Struct("=QII")  # answer, identifier, 0
_BIND_IP = struct.Struct("=Q28sI")  # 0, address, identifier
_TWO_ADDRESSES = struct.Struct("=28s28sII")  # own, the peer's, identifier, ms
_ID_AND_NUMBER = struct.Struct("=II")
# queue pair, 0, data, its bytes, 0, reads answered, reads asked, 0, tries twice, valid
_PARAMETERS = struct.Struct("=II256s8B")
_ID_AT_END = struct.Struct("=II")  # identifier, 0
_REFUSAL = struct.Struct("=I4x256x")
_EVENT = struct.Struct("=QIIiII256sB")  # ours, identifier, kind, status, and of _PARAMETERS
_EVENT_BYTES = 336
_ROUTE_BYTES, _OWN_PLACE_AT, _PLACE = 208, 136, struct.Struct("!2xH")
assert (_HEADER.size, _CREATE_ID.size, _BIND_IP.size, _TWO_ADDRESSES.size) == (8, 24, 40, 64)
assert (_PARAMETERS.size, _REFUSAL.size) == (272, 264)
_TRIES = 7
_NEW_ID = struct.Struct("=I")


class CmEventKind(IntEnum):
    """enum rdma_cm_event_type."""

    ADDRESS_RESOLVED = 0
    ADDRESS_ERROR = 1
    ROUTE_RESOLVED = 2
    ROUTE_ERROR = 3
    CONNECT_REQUEST = 4
    CONNECT_RESPONSE = 5
    CONNECT_ERROR = 6
    UNREACHABLE = 7
    REJECTED = 8
    ESTABLISHED = 9
    DISCONNECTED = 10
    DEVICE_REMOVED = 11
    OTHER = 255


@dataclass(frozen=True)
class CmEvent:
    """What has become of an identifier.

    identifier  whose; of CONNECT_REQUEST a new one, which the receiver owns
    status      0, or a negative errno; of REJECTED a reason of the device's
    data        that the peer gave to connect() or accept(), with zeros behind it
    """

    kind: CmEventKind
    identifier: int
    status: int
    data: bytes


class ConnectionManager:
    """A descriptor of rdma_cm and what was made by it. Owned by one queue pair, which closes it;
    its methods raise OSError. Only connect() may wait long.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._fd = os.open(root / DEVICE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._made: set[int] = set()

    def fileno(self) -> int:
        """Readable while there is an event."""
        return self._fd

    def create(self) -> int:
        """A new identifier."""
        answer = ctypes.create_string_buffer(_NEW_ID.size)
        # ours, not 0, comes with its events: a kernel tells none of an identifier without it
        self._do(_CREATE, _CREATE_ID.pack(1, ctypes.addressof(answer), _TCP, _RC), _NEW_ID.size)
        (identifier,) = _NEW_ID.unpack(answer.raw)
        self._made.add(identifier)
        return int(identifier)

    def bind(self, identifier: int, own: Address) -> None:
        """To that address, and a free port."""
        self._do(_BIND, _BIND_IP.pack(0, _place(own, 0), identifier))

    def listen(self, identifier: int, backlog: int) -> int:
        """Take requests, at most so many at a time that are not looked at; the port."""
        self._do(_LISTEN, _ID_AND_NUMBER.pack(identifier, backlog))
        answer = ctypes.create_string_buffer(_ROUTE_BYTES)
        command = _ANSWER_OF_ID.pack(ctypes.addressof(answer), identifier, 0)
        self._do(_QUERY_ROUTE, command, _ROUTE_BYTES)
        (port,) = _PLACE.unpack_from(answer.raw, _OWN_PLACE_AT)
        return int(port)

    def resolve_address(
        self, identifier: int, own: Address, far: Address, port: int, limit_ms: int
    ) -> None:
        """Which device reaches that address; ADDRESS_RESOLVED follows."""
        self._do(
            _RESOLVE_ADDRESS,
            _TWO_ADDRESSES.pack(_place(own, 0), _place(far, port), identifier, limit_ms),
        )

    def resolve_route(self, identifier: int, limit_ms: int) -> None:
        """ROUTE_RESOLVED follows."""
        self._do(_RESOLVE_ROUTE, _ID_AND_NUMBER.pack(identifier, limit_ms))

    def connect(
        self, identifier: int, queue_pair: int, answered: int, asked: int, data: bytes
    ) -> None:
        """Have that queue pair, which answers so many reads at a time and asks for so many,
        connected to whoever listens; `data` goes there. siw waits for the peer's tcp meanwhile, as
        long as the kernel tries: some 2 minutes where a firewall drops it all.
        """
        self._do(
            _CONNECT,
            _parameters(queue_pair, answered, asked, data) + _ID_AT_END.pack(identifier, 0),
        )

    def accept(self, identifier: int, queue_pair: int, answered: int, asked: int) -> None:
        """Have that queue pair connected to who asks; ESTABLISHED follows."""
        self._do(
            _ACCEPT,
            struct.pack("=Q", 2)
            + _parameters(queue_pair, answered, asked, b"")
            + _ID_AT_END.pack(identifier, 0),
        )

    def reject(self, identifier: int) -> None:
        """Who asks hears REJECTED; destroy() is still to be called."""
        self._do(_REJECT, _REFUSAL.pack(identifier))

    def event(self) -> CmEvent | None:
        """The next one; None: there is none yet."""
        answer = ctypes.create_string_buffer(_EVENT_BYTES)
        try:
            self._do(_GET_EVENT, struct.pack("=Q", ctypes.addressof(answer)), _EVENT_BYTES)
        except BlockingIOError:
            return None
        _, identifier, kind, status, _, _, data, count = _EVENT.unpack_from(answer.raw)
        try:
            known = CmEventKind(kind)
        except ValueError:
            known = CmEventKind.OTHER
        if known is CmEventKind.CONNECT_REQUEST:
            self._made.add(identifier)
        return CmEvent(known, identifier, status, data[:count])

    def destroy(self, identifier: int) -> None:
        """What it is of ends."""
        self._made.discard(identifier)
        answer = ctypes.create_string_buffer(_NEW_ID.size)
        command = _ANSWER_OF_ID.pack(ctypes.addressof(answer), identifier, 0)
        self._do(_DESTROY, command, _NEW_ID.size)

    def close(self) -> None:
        """All of it ends, in a process that has forked, too: the child has the descriptor."""
        try:
            for identifier in list(self._made):
                self.destroy(identifier)
        finally:
            os.close(self._fd)

    def _do(self, command: int, body: bytes, answer_bytes: int = 0) -> None:
        os.write(self._fd, _HEADER.pack(command, len(body), answer_bytes) + body)


def cm_refusal(root: Path = Path("/")) -> str | None:
    """Why rdma_cm cannot be asked here; None: it can."""
    device = root / DEVICE
    if not device.exists():
        return f"there is no /{DEVICE}: modprobe rdma_ucm"
    if not os.access(device, os.R_OK | os.W_OK):
        return f"/{DEVICE} may not be read and written by this user"
    try:
        version = int((root / VERSION_FILE).read_text())
    except (OSError, ValueError):
        return f"the kernel does not tell which version of rdma_cm it has (/{VERSION_FILE})"
    if version != ABI:
        return f"the kernel's rdma_cm is of version {version}, and {ABI} is known here"
    return None


def _place(address: Address, port: int) -> bytes:
    """A sockaddr_in or sockaddr_in6; what is left of 28 bytes is filled by struct with zeros."""
    if address.version == 4:
        return struct.pack("=H", socket.AF_INET) + struct.pack("!H4s", port, address.packed)
    return struct.pack("=H", socket.AF_INET6) + struct.pack("!HI16s", port, 0, address.packed)


def _parameters(queue_pair: int, answered: int, asked: int, data: bytes) -> bytes:
    return _PARAMETERS.pack(
        queue_pair, 0, data, len(data), 0, answered, asked, 0, _TRIES, _TRIES, 1
    )

"""Whether the kernel knows the link-layer address of a host, and having it look for that.

To connect a queue pair over Ethernet the kernel needs the address of the next hop to the peer, as
for any packet. It looks for it itself, for a second, while the thread that asks it waits; and
pyverbs holds the interpreter's lock meanwhile. So it is known before: an empty datagram to the
peer's discard port makes the kernel look, which takes none of our threads, and what has come of it
is asked over a netlink socket, which answers at once.

    the kernel says                                     state()
    the address is one of this host's                   KNOWN
    the next hop (the peer, or a gateway) is reachable, KNOWN
     stale, being probed, permanent or needs no ARP
    it is incomplete, or there is none yet              SOUGHT, for LOOK_S at most, then FAILED
    it failed                                           FAILED
    no route, no such neighbour, an error, nothing      KNOWN: nothing to wait for is known, and who
                                                        goes on hears from the kernel itself

IPv4 by ARP and IPv6 by neighbour discovery alike, through one interface: that whose GID is used.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
import time
from enum import Enum
from ipaddress import IPv4Address, IPv6Address

# As long as the kernel would look for it, with a thread of ours waiting.
LOOK_S = 1.0
PAUSE_S, PAUSE_S_MAX = 0.001, 0.05
DISCARD_PORT = 9
ANSWER_BYTES = 8192
Address = IPv4Address | IPv6Address

# linux/netlink.h, rtnetlink.h, neighbour.h
_HEADER = struct.Struct("=IHHII")  # bytes, type, flags, sequence, pid
_ROUTE = struct.Struct("=8BI")  # family, bits of target, of source, tos, table, -, -, type, flags
_NEIGHBOUR = struct.Struct("=BxxxiHBB")  # family, interface, state, flags, type
_ATTRIBUTE = struct.Struct("=HH")  # bytes, type
assert (_HEADER.size, _ROUTE.size, _NEIGHBOUR.size) == (16, 12, 12)
_REQUEST = 1  # NLM_F_REQUEST
_NEW_NEIGHBOUR, _GET_NEIGHBOUR, _NEW_ROUTE, _GET_ROUTE = 28, 30, 24, 26  # RTM_
_TARGET, _SOURCE, _INTERFACE, _GATEWAY, _VIA = 1, 2, 4, 5, 18  # RTA_; NDA_DST is 1, too
_UNICAST = 1  # RTN_UNICAST
_FAILED, _VALID = 0x20, 0xDE  # NUD_; reachable, stale, delay, probe, no ARP, permanent


class NeighbourState(Enum):
    """What the kernel knows of the next hop to a host."""

    KNOWN = "nothing is to be waited for"
    SOUGHT = "it looks"
    FAILED = "nobody answers"


class NeighbourSearch:
    """The look for one host, begun when it is made. Owned by the caller, who closes it.

    network     name of the network device
    own         our address there, from which packets come
    wanted      the peer's, of the same family
    """

    def __init__(self, network: str, own: Address, wanted: Address) -> None:
        self._network, self._wanted = network, wanted
        self._until = time.monotonic() + LOOK_S
        self._pause_s = PAUSE_S / 2
        self._hop: Address | None = None  # None: there is nothing to look for
        self._interface = 0
        self._asking: socket.socket | None = None
        if own.version != wanted.version:
            return
        with contextlib.suppress(OSError):
            self._interface = socket.if_nametoindex(network)
            self._hop = _next_hop(self._interface, own, wanted)
        if self._hop is not None and self._known() is not NeighbourState.KNOWN:
            try:
                self._ask(own)
            except OSError:
                self._hop = None

    def _ask(self, own: Address) -> None:
        """Have the kernel send something there. Kept open, for what it sends may wait for ARP."""
        family = socket.AF_INET if own.version == 4 else socket.AF_INET6
        sock = self._asking = socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        with contextlib.suppress(OSError):  # of a kernel that lets root alone do that
            sock.setsockopt(
                socket.SOL_SOCKET, socket.SO_BINDTODEVICE, self._network.encode() + b"\0"
            )
        sock.bind(self._place(own, 0))
        sock.sendto(b"", self._place(self._wanted, DISCARD_PORT))

    def _place(self, address: Address, port: int) -> tuple[str, int] | tuple[str, int, int, int]:
        if address.version == 4:
            return str(address), port
        return str(address), port, 0, self._interface if address.is_link_local else 0

    def state(self) -> NeighbourState:
        """What the kernel knows now."""
        if self._hop is None:
            return NeighbourState.KNOWN
        state = self._known()
        if state is NeighbourState.SOUGHT and time.monotonic() >= self._until:
            return NeighbourState.FAILED
        return state

    def _known(self) -> NeighbourState:
        assert self._hop is not None
        try:
            found = _state(self._interface, self._hop)
        except OSError as error:
            # before it was asked there is none; afterwards it is one that needs no address
            is_new = error.errno == errno.ENOENT and self._asking is None
            return NeighbourState.SOUGHT if is_new else NeighbourState.KNOWN
        if found & _FAILED:
            return NeighbourState.FAILED
        return NeighbourState.KNOWN if found & _VALID else NeighbourState.SOUGHT

    def pause_s(self) -> float:
        """When to ask again: longer each time."""
        self._pause_s = min(2 * self._pause_s, PAUSE_S_MAX)
        return self._pause_s

    def why(self) -> str:
        """What is said of a host that is not found."""
        way = f" (by way of {self._hop})" if self._hop not in (None, self._wanted) else ""
        asked = "ARP" if self._wanted.version == 4 else "neighbour discovery"
        return (
            f"{self._wanted}{way} answers no {asked} at {self._network}: its network of RDMA is "
            "down, or this host's"
        )

    def close(self) -> None:
        """Look no more. Again: does nothing."""
        if self._asking is not None:
            self._asking.close()


def _next_hop(interface: int, own: Address, wanted: Address) -> Address | None:
    """To whom a packet for `wanted` goes; None: to this host itself, or nobody knows. Raises
    OSError.
    """
    family = socket.AF_INET if wanted.version == 4 else socket.AF_INET6
    bits = wanted.max_prefixlen
    answer = _answer(
        _GET_ROUTE,
        _NEW_ROUTE,
        _ROUTE.pack(family, bits, bits, 0, 0, 0, 0, 0, 0)
        + _attribute(_TARGET, wanted.packed)
        + _attribute(_SOURCE, own.packed)
        + _attribute(_INTERFACE, struct.pack("=I", interface)),
    )
    if _ROUTE.unpack_from(answer)[7] != _UNICAST:
        return None
    attributes = dict(_attributes(answer[_ROUTE.size :]))
    # _VIA: u16 family, address; of an IPv4 route by way of an IPv6 gateway
    gateway = attributes.get(_GATEWAY) or attributes.get(_VIA, b"")[2:]
    if not gateway:
        return wanted
    return IPv4Address(gateway) if len(gateway) == 4 else IPv6Address(gateway)


def _state(interface: int, hop: Address) -> int:
    """NUD_ bits of it. Raises OSError; ENOENT: there is no entry."""
    family = socket.AF_INET if hop.version == 4 else socket.AF_INET6
    answer = _answer(
        _GET_NEIGHBOUR,
        _NEW_NEIGHBOUR,
        _NEIGHBOUR.pack(family, interface, 0, 0, 0) + _attribute(_TARGET, hop.packed),
    )
    state: int = _NEIGHBOUR.unpack_from(answer)[2]
    return state


def _answer(asked: int, wanted: int, body: bytes) -> bytes:
    """What the kernel answers, which it has done before sendto() returns: a message without its
    header. Raises OSError.
    """
    netlink = socket.socket(
        socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_NONBLOCK, socket.NETLINK_ROUTE
    )
    with netlink:
        netlink.sendto(_HEADER.pack(_HEADER.size + len(body), asked, _REQUEST, 1, 0) + body, (0, 0))
        data = netlink.recv(ANSWER_BYTES)
    nbytes, kind, _, _, _ = _HEADER.unpack_from(data)
    answer = data[_HEADER.size : nbytes]
    if kind != wanted:  # NLMSG_ERROR: i32, negative
        raise OSError(-struct.unpack_from("=i", answer)[0], "the kernel did not say")
    return answer


def _attribute(kind: int, value: bytes) -> bytes:
    nbytes = _ATTRIBUTE.size + len(value)
    return _ATTRIBUTE.pack(nbytes, kind) + value + bytes(-nbytes % 4)


def _attributes(data: bytes) -> list[tuple[int, bytes]]:
    found = []
    while len(data) >= _ATTRIBUTE.size:
        nbytes, kind = _ATTRIBUTE.unpack_from(data)
        if nbytes < _ATTRIBUTE.size:
            break
        found.append((kind & 0x3FFF, data[_ATTRIBUTE.size : nbytes]))
        data = data[nbytes + -nbytes % 4 :]
    return found

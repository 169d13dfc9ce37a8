"""A peer that vanished without a word: its host crashed, a cable was pulled, a network was cut in
two.

What is under way decides who finds it, and how soon. None of it asks the peer's process, only its
kernel: a handler that runs for an hour, or a process that is stopped, is not taken for dead.

    on the lane                       found by                within, with bound =
                                                              limits.peer_silent_s
    nothing under way                 the kernel's keepalive  the bound in whole seconds, 2 at least
    sent and not acknowledged         Silence.look()          the bound
    waits, as the peer does not read  Silence.look()          the bound, or 3 x as long as it had
                                                              not been reading: the kernel asks ever
                                                              more seldom, every 2 minutes at last

Why not TCP_USER_TIMEOUT, which is meant for this: it also ends a connection to a peer that answers,
when that has not been reading for so long (Linux 5.11 on, tcp_probe_timer; tried on 6.18), and a
peer in a long handler does not read. So each lane's TCP_INFO is looked at, LOOKS_PER_BOUND times in
the bound, for some 1 us each time. A socket that carries next to nothing, and so always finds room
at the peer, is no lane: for that it is the right one (bound_unacknowledged()).
"""

from __future__ import annotations

import errno
import socket
import struct

LOOKS_PER_BOUND = 4

# struct tcp_info of linux/tcp.h, as far as last_ack_recv: 8 fields of a byte, 13 of 4 bytes.
_TCP_INFO = struct.Struct("=8B13I")
_PROBES, _UNACKED, _LAST_ACK_RECV_MS = 3, 12, 20
# Questions to a peer without room that are not answered. One may be: a kernel says nothing to a
# second within 500 ms (net.ipv4.tcp_invalid_ratelimit).
PROBES_MIN = 2

_SILENT_ERRORS = frozenset(
    {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN}
)


def silence_text(bound_s: float) -> str:
    """What is said of a peer that is lost like this."""
    return (
        f"it answered nothing for {bound_s:g} s (limits.peer_silent_s): its host is down, "
        "or the network to it"
    )


def why_lost(error: OSError, bound_s: float) -> str:
    """The reason that an error of a socket gives."""
    text = error.strerror or str(error)
    return f"{silence_text(bound_s)} ({text})" if error.errno in _SILENT_ERRORS else text


def keep_alive(sock: socket.socket, bound_s: float) -> None:
    """Let the kernel ask an idle peer so often that the bound holds, in whole seconds."""
    idle_s = max(1, int(bound_s * 0.4))
    interval_s = max(1, int(bound_s * 0.2))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval_s)
    sock.setsockopt(
        socket.IPPROTO_TCP, socket.TCP_KEEPCNT, max(1, int((bound_s - idle_s) / interval_s))
    )


def bound_unacknowledged(sock: socket.socket, bound_s: float) -> None:
    """Let the kernel end it when what was sent is not acknowledged for so long. Keepalive asks
    nothing meanwhile, and by itself the kernel sends again for a quarter of an hour.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(bound_s * 1000)))


class Silence:
    """One lane's. look() LOOKS_PER_BOUND times in the bound, in one thread."""

    def __init__(self, bound_s: float) -> None:
        # the last look may be that much later
        self._silent_s_max = bound_s * (1 - 1 / LOOKS_PER_BOUND)
        # when we first saw a question unanswered, and at each look since then
        self._asked_since: float | None = None

    def look(self, sock: socket.socket, now: float) -> bool:
        """Whether the peer has been silent for too long. Raises OSError."""
        info = _TCP_INFO.unpack(
            sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        )
        return self.decide(info[_UNACKED], info[_PROBES], info[_LAST_ACK_RECV_MS], now)

    def decide(self, unacked: int, probes: int, last_ack_ms: int, now: float) -> bool:
        """The same, of what the kernel says."""
        if not unacked and probes < PROBES_MIN:
            self._asked_since = None
            return False
        if self._asked_since is None:
            self._asked_since = now
        return now - max(self._asked_since, now - last_ack_ms / 1000) >= self._silent_s_max

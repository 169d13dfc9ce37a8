"""Hosts as network namespaces, on one bridge; the test's own process is host 1.

    here ── ours ═╗
                  ║   bridge, in a namespace of its own
    host 2 ─ eth0 ╬   with a port p1, p2, ... for each host
    host 3 ─ eth0 ╝

Made of veth pairs, bridge and routes alone, which every kernel with namespaces has; names carry our
process number. All of it is gone when the Network is closed. Cards hand over packets one by one:
what segmentation offload joins passes whatever the MTU is.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from types import TracebackType

import pytest


def run(*command: str) -> None:
    """Raises OSError with what it said."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


class Network:
    """`hosts` of them, numbered from 1. Closed by who made it. Raises OSError where this is not
    possible.
    """

    def __init__(self, hosts: int) -> None:
        pid = os.getpid()
        self._prefix, self._ours, self._switch = f"prpc{pid}h", f"prpc{pid}o", f"prpc{pid}s"
        self._base = f"10.{200 + pid % 50}.{pid // 50 % 250}"
        self._hosts = range(1, hosts + 1)
        try:
            self._build()
        except OSError:
            self.close()
            raise

    def _build(self) -> None:
        run("ip", "netns", "add", self._switch)
        run("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", self._switch, "link", "set", "bridge", "up")
        for host in self._hosts:
            if host > 1:
                run("ip", "netns", "add", self.namespace(host))
                self._ip(host, "link", "set", "lo", "up")
            self._ip(
                host,
                "link",
                "add",
                self.card(host),
                "type",
                "veth",
                "peer",
                "name",
                f"p{host}",
                "netns",
                self._switch,
            )
            run("ip", "-n", self._switch, "link", "set", f"p{host}", "master", "bridge", "up")
            self._ip(host, "address", "add", f"{self.address(host)}/24", "dev", self.card(host))
            self._ip(host, "link", "set", self.card(host), "gso_max_segs", "1", "up")

    def close(self) -> None:
        """Again, or after half of it was made: does what is left to do."""
        for command in (
            ["link", "delete", self._ours],
            *(["netns", "delete", self.namespace(host)] for host in self._hosts[1:]),
        ):
            subprocess.run(["ip", *command], capture_output=True, check=False)
        subprocess.run(["ip", "netns", "delete", self._switch], capture_output=True, check=False)

    def __enter__(self) -> Network:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def namespace(self, host: int) -> str:
        """Its name for `ip netns`."""
        return f"{self._prefix}{host}"

    def address(self, host: int) -> str:
        """Of a host."""
        return f"{self._base}.{host}"

    def prefix(self, host: int) -> list[str]:
        """What runs a command there."""
        return ["ip", "netns", "exec", self.namespace(host)] if host > 1 else []

    def card(self, host: int) -> str:
        """The name of its network device."""
        return "eth0" if host > 1 else self._ours

    def _ip(self, host: int, *arguments: str) -> None:
        run("ip", *(["-n", self.namespace(host)] if host > 1 else []), *arguments)

    # -- what goes wrong: each a context, healed at its end ----------------------------------------

    @contextlib.contextmanager
    def parted(self, host: int) -> Iterator[None]:
        """The switch passes nothing from or to it, and nobody's card notices."""
        run("bridge", "-n", self._switch, "link", "set", "dev", f"p{host}", "state", "0")
        yield
        run("bridge", "-n", self._switch, "link", "set", "dev", f"p{host}", "state", "3")

    @contextlib.contextmanager
    def unplugged(self, host: int) -> Iterator[None]:
        """Its cable is pulled at the switch: its card sees that."""
        run("ip", "-n", self._switch, "link", "set", f"p{host}", "down")
        yield
        run("ip", "-n", self._switch, "link", "set", f"p{host}", "up")

    @contextlib.contextmanager
    def mute(self, host: int) -> Iterator[None]:
        """It hears us, but nothing it says gets here."""
        self._ip(host, "route", "add", "blackhole", f"{self.address(1)}/32")
        yield
        self._ip(host, "route", "delete", "blackhole", f"{self.address(1)}/32")

    @contextlib.contextmanager
    def deaf(self, host: int) -> Iterator[None]:
        """Nothing we say gets there."""
        self._ip(1, "route", "add", "blackhole", f"{self.address(host)}/32")
        yield
        self._ip(1, "route", "delete", "blackhole", f"{self.address(host)}/32")

    @contextlib.contextmanager
    def parted_pair(self, one: int, other: int) -> Iterator[None]:
        """Nothing gets from one to the other, nor back; both reach all others."""
        ways = [(one, other), (other, one)]
        for here, there in ways:
            self._ip(here, "route", "add", "blackhole", f"{self.address(there)}/32")
        yield
        for here, there in ways:
            self._ip(here, "route", "delete", "blackhole", f"{self.address(there)}/32")

    @contextlib.contextmanager
    def black_hole(self, host: int, mtu: int) -> Iterator[None]:
        """The switch's port to it passes packets of up to so many bytes, in both directions, and
        drops larger ones without a word (no ICMP: a switch has no address); the cards go on
        believing in theirs, and send with DF."""
        run("ip", "-n", self._switch, "link", "set", f"p{host}", "mtu", str(mtu))
        yield
        run("ip", "-n", self._switch, "link", "set", f"p{host}", "mtu", "1500")

    @contextlib.contextmanager
    def without_address(self, host: int) -> Iterator[None]:
        """Its address goes away, and comes back."""
        self._ip(host, "address", "delete", f"{self.address(host)}/24", "dev", self.card(host))
        yield
        self._ip(host, "address", "add", f"{self.address(host)}/24", "dev", self.card(host))

    def set_mtu(self, nbytes: int) -> None:
        """Of every card and every port."""
        for host in self._hosts:
            self._ip(host, "link", "set", self.card(host), "mtu", str(nbytes))
            run("ip", "-n", self._switch, "link", "set", f"p{host}", "mtu", str(nbytes))


def network_or_skip(hosts: int) -> Network:
    """Skips the test, with the reason, where there are no network namespaces to be had."""
    try:
        return Network(hosts)
    except OSError as error:
        pytest.skip(f"no network namespaces here, root is needed: {error}")

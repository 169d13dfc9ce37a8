"""Which RDMA device, port and GID a process would use, and what is in the way where it would use
none. Read from /sys, as the kernel tells it without a library; loaded() tries the library.

    a port                                  its fault
    is not active                           "down", or as the kernel names its state
    is iWARP's, without rdma_cm             its connections are made by rdma_cm alone: what is in
                                             the way of that (rdma_cm.py)
    is iWARP's, without an IPv4 address     rdma_cm connects by addresses of IP
    has link layer Ethernet, and no GID of  RoCE v1 alone goes through no router, and many switches
     type RoCE v2                           and drivers do without
    has no GID at all                       its network device has no address
    has not the GID that the user names     verbs_gid_index would fail each connection
    else                                    none

Usable ports come first: InfiniBand's, and of RoCE's those with a GID that maps an IPv4 address
before those with a global IPv6 one, before link-local ones, which reach no further than a switch;
then iWARP's. A GID is 128 bits that name a port to others (InfiniBand Architecture, vol. 1, 4.1.1;
RoCE v2 maps an IPv4 address as ::ffff:a.b.c.d). The GID of an iWARP port is the hardware address of
its network device, by which that is found; what is told of it in its place is the IPv4 address
there, mapped like RoCE's. Several devices for one connection are of InfiniBand or RoCE alone.

    pyverbs                                 refusal() says
    is not there                            what to install
    wants another rdma-core than there is   both releases have to be the same, and which is there
    lists no device                         the kernel has no ib_uverbs, or no device, or this is a
                                            container that was given none: by what /sys and /dev say
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import ipaddress
import os
import re
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

from shard.errors import ShardError
from shard.transport.rdma_cm import cm_refusal

DEVICES, NODES = "sys/class/infiniband", "dev/infiniband"
PROVIDERS = "etc/libibverbs.d"
NETWORKS = "sys/class/net"
RNIC = "4"  # of node_type
IWARP = "iWARP"
V2 = "RoCE v2"
ALL = "all"  # in the place of a device's name
RAILS_MAX = 8  # ports for one connection: as many adapters as hosts have
# Of a port's table of GIDs, after which no more is expected: the kernel takes the first free row,
# and a table of 1,024, as rxe's is, takes 10 ms to read.
EMPTY_ROWS_MAX = 32
MTUS = (256, 512, 1024, 2048, 4096)
HEADERS_BYTES = 96  # GRH, UDP, BTH, XRC, atomic, ICRC
NEEDS = (
    "verbs need rdma-core's libibverbs and pyverbs: apt-get install ibverbs-providers "
    "python3-pyverbs"
)


class NoVerbs(ShardError):
    """RDMA cannot be used here, and why."""


@dataclass(frozen=True)
class VerbsPort:
    """A port of an RDMA device, and the best of its GIDs.

    link     "InfiniBand", "RoCE v2", "RoCE v1" or "iWARP"
    gid      its best; None: it has none. Of iWARP the address of its network device
    mtu      bytes of a packet's payload, on Ethernet by its network device; 0: not known here
    fault    why it is not used; "": it may be
    """

    device: str
    number: int
    link: str
    gid_index: int
    gid: ipaddress.IPv6Address | None
    fault: str
    mtu: int = 0
    network: str = ""  # of iWARP: its network device

    def __str__(self) -> str:
        return f"{self.device}:{self.number}"

    @property
    def address(self) -> str:
        """What the GID stands for, as one writes it: an IPv4 address where it maps one."""
        if self.gid is None:
            return "no GID"
        return str(self.gid.ipv4_mapped or self.gid)


def ipv4_of(network: str) -> IPv4Address | None:
    """The first address of that network device, by netdevice(7); None: it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            found = fcntl.ioctl(sock, _ASK_ADDRESS, _REQUEST.pack(network.encode()))
        except OSError:
            return None
    return IPv4Address(found[_ADDRESS_AT : _ADDRESS_AT + 4])


_ASK_ADDRESS, _REQUEST, _ADDRESS_AT = 0x8915, struct.Struct("16s24x"), 20  # SIOCGIFADDR, ifreq


def verbs_ports(
    root: Path = Path("/"),
    gid_index: int | None = None,
    address_of: Callable[[str], IPv4Address | None] = ipv4_of,
) -> list[VerbsPort]:
    """All ports of all devices, usable ones first, the best of those before the others. `root`:
    where the machine's files lie. `gid_index`: which GID each is to use, as the setting
    verbs_gid_index has it; a port without it has that for its fault. `address_of`: a network
    device's.
    """
    found = []
    for device in _entries(root / DEVICES):
        kind = _read(root / DEVICES / device / "node_type").partition(":")[0]
        for number in _entries(root / DEVICES / device / "ports"):
            if number.isdecimal():
                folder = root / DEVICES / device / "ports" / number
                if kind == RNIC:
                    found.append(_iwarp_port(device, int(number), root, address_of))
                else:
                    found.append(_port(device, int(number), folder, gid_index))
    return [port for port, _ in sorted(found, key=lambda one: (bool(one[0].fault), one[1]))]


def _first_of(ports: list[VerbsPort], wanted: str | None, root: Path) -> VerbsPort:
    named = [port for port in ports if wanted in (None, port.device, str(port))]
    if not ports:
        raise NoVerbs(f"no RDMA device: {_why_none(root)}")
    if not named:
        raise NoVerbs(f"no RDMA device {wanted!r:.100}: {', '.join(map(str, ports))} are there")
    if named[0].fault:
        raise NoVerbs("; ".join(f"{port} is not used: {port.fault}" for port in named))
    return named[0]


def routed_network(port: VerbsPort, gid_index: int, root: Path = Path("/")) -> str:
    """The network device at which a GID of that port reaches others, where that is by IP, as with
    RoCE v2; else "".
    """
    folder = root / DEVICES / port.device / "ports" / str(port.number)
    if _read(folder / "gid_attrs" / "types" / str(gid_index)) != V2:
        return ""
    return _network(folder, gid_index)


def verbs_rails(
    wanted: str | None = None, root: Path = Path("/"), gid_index: int | None = None
) -> tuple[list[VerbsPort], list[str]]:
    """The usable ones of the ports that are wanted, each once, in the order in which they are
    named, and why each other one is not used. `wanted` is "device" or "device:port", several with
    commas, or ALL, of which the best come first; None: the first usable one. `gid_index` is as for
    verbs_ports(). Raises NoVerbs where none is usable, with what each port's fault is and what is
    allowed, where more than RAILS_MAX are named, or others beside ALL.
    """
    names = [name for name in map(str.strip, (wanted or "").split(",")) if name]
    ports = verbs_ports(root, gid_index)
    if ALL not in names and len(names) < 2:
        return [_first_of(ports, names[0] if names else None, root)], []
    others = ", ".join(name for name in names if name != ALL)
    if ALL in names and others:
        raise NoVerbs(f"{ALL!r} is each RDMA port, {others:.200} too: leave one of them out")
    if len(names) > RAILS_MAX:
        raise NoVerbs(f"{len(names)} RDMA ports are named, at most {RAILS_MAX} may be")
    if ALL in names:
        usable = [port for port in ports if not port.fault]
        left_out = [f"{port} is not used: {port.fault}" for port in ports if port.fault]
        used, more = used_together(usable or [_first_of(ports, None, root)])
        return used, left_out + more
    found: list[VerbsPort] = []
    left_out = []
    for name in names:
        try:
            port = _first_of(ports, name, root)
        except NoVerbs as error:
            left_out.append(str(error))
        else:
            if port not in found:
                found.append(port)
    if not found:
        raise NoVerbs("; ".join(left_out))
    used, more = used_together(found)
    return used, left_out + more


def used_together(ports: list[VerbsPort]) -> tuple[list[VerbsPort], list[str]]:
    """Those of them that one connection may have, and why not the others."""
    others = [port for port in ports if port.link != IWARP]
    kept = others[:RAILS_MAX] or ports[:1]
    return kept, [
        f"{port} is not used: a port of iWARP is used alone, without others"
        for port in ports
        if port.link == IWARP and port not in kept
    ]


def verbs_providers(root: Path = Path("/")) -> list[str]:
    """The drivers of devices that libibverbs knows, by name."""
    told = [_read(root / PROVIDERS / name) for name in _entries(root / PROVIDERS)]
    return sorted(text.removeprefix("driver ") for text in told if text.startswith("driver "))


def verbs_refusal(root: Path = Path("/")) -> str | None:
    """Why this process cannot use verbs, whatever the ports are; None: it can."""
    try:
        devices = loaded()
    except NoVerbs as error:
        return str(error)
    if devices:
        return None
    return f"pyverbs lists no device: {_why_none(root)}"


def loaded() -> list[str]:
    """The devices that pyverbs lists. Raises NoVerbs where it cannot be imported."""
    try:
        device: Any = importlib.import_module("pyverbs.device")
        error: Any = importlib.import_module("pyverbs.pyverbs_error").PyverbsError
    except ModuleNotFoundError as missing:
        raise NoVerbs(f"{missing.name} is not installed: {NEEDS}") from missing
    except ImportError as broken:
        raise NoVerbs(_mismatch(str(broken))) from broken
    try:
        return [one.name.decode() for one in device.get_device_list()]
    except error:  # a kernel without ib_uverbs; of one that has it the list is empty
        return []


def pyverbs(name: str) -> Any:
    """That module of it, once it is loaded()."""
    return importlib.import_module(f"pyverbs.{name}")


def _mismatch(text: str) -> str:
    """What an ImportError of pyverbs means. libibverbs exports to pyverbs a private interface,
    whose version is the release of rdma-core: PRIVATE_44 is of 44.
    """
    wanted = re.search(r"IBVERBS_PRIVATE_(\d+)", text)
    if wanted is not None:
        return (
            f"pyverbs is of rdma-core {wanted[1]}, and the libibverbs of this system of another "
            "release: both have to be of the same one; the distribution's own python3-pyverbs is "
            f"({text})"
        )
    missing = re.search(r"(lib\w+\.so[.\d]*)", text)
    if missing is not None:
        return f"pyverbs is there without {missing[1]}: {NEEDS} ({text})"
    return f"pyverbs cannot be imported: {text}"


def _why_none(root: Path) -> str:
    listed = _entries(root / DEVICES)
    if listed and not _entries(root / NODES):
        return (
            f"the kernel has {', '.join(listed)}, but there is no /dev/infiniband: a container "
            "needs --device /dev/infiniband, and --ulimit memlock=-1"
        )
    if listed:
        return f"the kernel has {', '.join(listed)}, and the library does not open them"
    if not (root / "sys/class/infiniband_verbs").exists():
        return "the kernel has no ib_uverbs: modprobe ib_uverbs, with a driver of a device"
    return "the kernel has ib_uverbs, and no device: see `rdma link`, of iproute2"


def _port(
    device: str, number: int, folder: Path, wanted_index: int | None
) -> tuple[VerbsPort, tuple[int, str, int]]:
    """And where it stands among the usable ones."""
    is_ethernet = _read(folder / "link_layer") == "Ethernet"
    best: tuple[int, int, ipaddress.IPv6Address | None, str] = (9, 0, None, "")
    empty = 0
    for index in sorted(map(int, filter(str.isdecimal, _entries(folder / "gids")))):
        text = _read(f"{folder}/gids/{index}")
        if not text.strip("0:"):
            empty += 1
            if empty == EMPTY_ROWS_MAX:
                break
            continue
        empty = 0
        with contextlib.suppress(ValueError):
            gid = ipaddress.IPv6Address(text)
            kind = _read(folder / "gid_attrs" / "types" / str(index))
            best = min(best, (_rank(gid, kind, is_ethernet), index, gid, kind))
    rank, gid_index, gid_or_none, kind = best
    state = _read(folder / "state").rpartition(" ")[2].lower() or "of unknown state"
    fault = ""
    if state != "active":
        fault = f"it is {state}"
    elif gid_or_none is None:
        fault = "it has no GID: its network device has no address"
    elif is_ethernet and kind != V2:
        fault = "it has GIDs of RoCE v1 alone: let its network device speak RoCE v2"
    elif wanted_index is not None and not _read(f"{folder}/gids/{wanted_index}").strip("0:"):
        fault = (
            f"row {wanted_index} of its table of GIDs is empty, which [transport] verbs_gid_index "
            "names: name another, or leave that out"
        )
    if wanted_index is not None and not fault:  # whatever the others are
        with contextlib.suppress(ValueError):
            gid_or_none = ipaddress.IPv6Address(_read(f"{folder}/gids/{wanted_index}"))
            gid_index = wanted_index
            kind = _read(folder / "gid_attrs" / "types" / str(gid_index))
    link = ("RoCE v2" if kind == V2 else "RoCE v1") if is_ethernet else "InfiniBand"
    mtu = 0
    if is_ethernet and gid_or_none is not None:
        mtu = _mtu(folder, gid_index)
    port = VerbsPort(device, number, link, gid_index, gid_or_none, fault, mtu)
    return port, (rank, device, number)


def _iwarp_port(
    device: str, number: int, root: Path, address_of: Callable[[str], IPv4Address | None]
) -> tuple[VerbsPort, tuple[int, str, int]]:
    """As _port()."""
    folder = root / DEVICES / device / "ports" / str(number)
    state = _read(folder / "state").rpartition(" ")[2].lower() or "of unknown state"
    gid_text = _read(folder / "gids" / "0")
    networks = _networks_of(folder, gid_text, root)
    address, network = None, ""
    for name in networks:
        address, network = address_of(name), name
        if address is not None:
            break
    refusal = cm_refusal(root)
    fault = ""
    if state != "active":
        fault = f"it is {state}"
    elif refusal is not None:
        fault = f"its connections are made by rdma_cm alone, and {refusal}"
    elif not networks:
        fault = f"no network device has its hardware address, of GID {gid_text or 'none'}"
    elif address is None:
        fault = f"rdma_cm connects by addresses, and {', '.join(networks)} has none of IPv4"
    gid = None if address is None else ipaddress.IPv6Address(f"::ffff:{address}")
    port = VerbsPort(device, number, IWARP, 0, gid, fault, 0, network)
    return port, (4, device, number)


def _networks_of(folder: Path, gid: str, root: Path) -> list[str]:
    """The network devices that an iWARP port may be of: the one that the kernel names, as newer
    ones do, or those with the hardware address that its GID begins with. Of these the ones below
    others come first, as a VLAN has the address of what it lies upon.
    """
    named = _network(folder, 0)
    if named:
        return [named]
    wanted = gid.replace(":", "")[:12]
    if len(wanted) < 12 or not wanted.strip("0"):
        return []
    found = []
    for name in _entries(root / NETWORKS):
        if _read(root / NETWORKS / name / "address").replace(":", "") == wanted:
            is_upper = any(one.startswith("lower_") for one in _entries(root / NETWORKS / name))
            found.append((is_upper, name))
    return [name for _, name in sorted(found)]


def _mtu(folder: Path, gid_index: int) -> int:
    """Of RoCE, from the network device that has that GID: the largest size of InfiniBand's that
    fits beside its headers, as iboe_get_mtu() of linux/rdma/ib_addr.h has it.
    """
    network = _network(folder, gid_index)
    told = _read(folder.parents[5] / "sys/class/net" / network / "mtu") if network else ""
    room = int(told) - HEADERS_BYTES if told.isdecimal() else 0
    return max((size for size in MTUS if size <= room), default=0)


def _network(folder: Path, gid_index: int) -> str:
    return _read(folder / "gid_attrs" / "ndevs" / str(gid_index))


def _rank(gid: ipaddress.IPv6Address, kind: str, is_ethernet: bool) -> int:
    """The less, the better."""
    if not is_ethernet:
        return 0
    if kind != V2:
        return 8
    return 1 if gid.ipv4_mapped is not None else 3 if gid.is_link_local else 2


def _entries(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _read(path: Path | str) -> str:
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read(4096).decode().strip()
    except (OSError, UnicodeDecodeError):  # EINVAL: that row of a table is empty
        return ""

"""Which RDMA port would be used: of machines that are files under a folder, and of pyverbs that
cannot be imported. tests/rdma asks a real device.
"""

from __future__ import annotations

import ipaddress
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shard.transport.rdma_cm import DEVICE, VERSION_FILE
from shard.transport.verbs_device import (
    NoVerbs,
    VerbsPort,
    routed_network,
    used_together,
    verbs_ports,
)
from tests.program import ROOT
from tests.rdma.port import chosen_port

LOCAL, IPV4 = "fe80:0000:0000:0000:0000:0aff:fe4d:0001", "0000:0000:0000:0000:0000:ffff:0a4d:0001"
GLOBAL, NONE = "fd00:0000:0000:0000:0000:0000:0000:0001", "0000:0000:0000:0000:0000:0000:0000:0000"
V1, V2 = "IB/RoCE v1", "RoCE v2"


def device(
    root: Path,
    name: str,
    gids: list[tuple[str, str]],
    state: str = "4: ACTIVE",
    layer: str = "Ethernet",
    node: str = "1: CA",
    port: int = 1,
) -> None:
    """As the kernel shows one."""
    folder = root / "sys/class/infiniband" / name
    files = {
        "node_type": node,
        f"ports/{port}/state": state,
        f"ports/{port}/link_layer": layer,
        **{f"ports/{port}/gids/{index}": gid for index, (gid, _) in enumerate(gids)},
        **{f"ports/{port}/gid_attrs/types/{index}": kind for index, (_, kind) in enumerate(gids)},
    }
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text + "\n")
    (root / "dev/infiniband").mkdir(parents=True, exist_ok=True)
    (root / "dev/infiniband/uverbs0").touch()


@pytest.mark.parametrize(
    ("gids", "index"),
    [
        ([(LOCAL, V2), (IPV4, V2)], 1),
        ([(LOCAL, V1), (LOCAL, V2), (IPV4, V1), (IPV4, V2)], 3),  # as mlx5 lists them
        ([(LOCAL, V2), (GLOBAL, V2)], 1),
        ([(NONE, V2), (LOCAL, V2)], 1),
        ([(IPV4, V2), ("0000:0000:0000:0000:0000:ffff:0a4d:0002", V2)], 0),
    ],
)
def test_of_the_gids_of_a_port_the_one_that_reaches_furthest_is_taken(
    tmp_path: Path, gids: list[tuple[str, str]], index: int
) -> None:
    device(tmp_path, "mlx5_0", gids)
    port = chosen_port(root=tmp_path)
    assert (str(port), port.link, port.gid_index) == ("mlx5_0:1", V2, index)
    assert port.gid == ipaddress.IPv6Address(gids[index][0])


def test_a_gid_that_is_reached_by_ip_names_its_network_device_and_others_none(
    tmp_path: Path,
) -> None:
    device(tmp_path, "mlx5_0", [(IPV4, V1), (IPV4, V2)])
    folder = tmp_path / "sys/class/infiniband/mlx5_0/ports/1/gid_attrs/ndevs"
    folder.mkdir()
    for index in (0, 1):
        (folder / str(index)).write_text("eth7\n")
    port = chosen_port(root=tmp_path)
    assert [routed_network(port, index, tmp_path) for index in (0, 1, 2)] == ["", "eth7", ""]


def test_usable_ports_come_first_and_each_other_says_what_its_fault_is(tmp_path: Path) -> None:
    device(tmp_path, "a_down", [(IPV4, V2)], state="1: DOWN")
    device(tmp_path, "b_old", [(IPV4, V1)])
    device(tmp_path, "c_bare", [])
    device(tmp_path, "d_iwarp", [(LOCAL, "")], node="4: RNIC")
    device(tmp_path, "e_local", [(LOCAL, V2)])
    device(tmp_path, "f_roce", [(IPV4, V2)])
    device(tmp_path, "g_ib", [(LOCAL, "IB/RoCE v1")], layer="InfiniBand")
    device(tmp_path, "g_ib", [(LOCAL, "IB/RoCE v1")], layer="InfiniBand", port=2, state="2: INIT")
    assert [(str(port), port.link) for port in verbs_ports(tmp_path) if not port.fault] == [
        ("g_ib:1", "InfiniBand"),
        ("f_roce:1", V2),
        ("e_local:1", V2),
    ]
    assert {str(port): port.fault for port in verbs_ports(tmp_path) if port.fault} == {
        "a_down:1": "it is down",
        "b_old:1": "it has GIDs of RoCE v1 alone: let its network device speak RoCE v2",
        "c_bare:1": "it has no GID: its network device has no address",
        "d_iwarp:1": "its connections are made by rdma_cm alone, and there is no "
        "/dev/infiniband/rdma_cm: modprobe rdma_ucm",
        "g_ib:2": "it is init",
    }
    assert str(chosen_port("f_roce", tmp_path)) == str(chosen_port("f_roce:1", tmp_path))
    with pytest.raises(NoVerbs, match=r"^a_down:1 is not used: it is down$"):
        chosen_port("a_down", tmp_path)
    with pytest.raises(NoVerbs, match=r"no RDMA device 'mlx5_9': .*f_roce:1.* are there"):
        chosen_port("mlx5_9", tmp_path)


MAC_GID = "0200:0a4d:0001:0000:0000:0000:0000:0000"


def iwarp(root: Path, name: str, gid: str = MAC_GID) -> None:
    """An iWARP device, and an rdma_cm."""
    device(root, name, [(gid, "")], node="4: RNIC")
    (root / DEVICE).touch()
    (root / VERSION_FILE).parent.mkdir(parents=True, exist_ok=True)
    (root / VERSION_FILE).write_text("4\n")


def network(root: Path, name: str, mac: str, upon: str = "") -> None:
    """A network device, such as a VLAN upon another one."""
    folder = root / "sys/class/net" / name
    folder.mkdir(parents=True)
    (folder / "address").write_text(f"{mac}\n")
    if upon:
        (folder / f"lower_{upon}").touch()


def address_of(name: str) -> ipaddress.IPv4Address | None:
    return {
        "eth0": ipaddress.IPv4Address("10.77.0.1"),
        "eth0.5": ipaddress.IPv4Address("10.5.0.1"),
    }.get(name)


def test_a_port_of_iwarp_has_the_address_of_the_network_device_with_its_hardware_address(
    tmp_path: Path,
) -> None:
    iwarp(tmp_path, "siw0")
    network(tmp_path, "eth0", "02:00:0a:4d:00:01")
    network(tmp_path, "bond", "02:00:0a:4d:00:01", upon="eth0")
    network(tmp_path, "another", "02:00:0a:4d:00:02")
    (port,) = verbs_ports(tmp_path, address_of=address_of)
    assert (port.link, port.address, port.network, port.fault) == ("iWARP", "10.77.0.1", "eth0", "")


def test_a_kernel_that_names_the_network_device_of_iwarp_is_believed(tmp_path: Path) -> None:
    iwarp(tmp_path, "siw0")
    network(tmp_path, "eth0", "02:00:0a:4d:00:01")
    named = tmp_path / "sys/class/infiniband/siw0/ports/1/gid_attrs/ndevs/0"
    named.parent.mkdir()
    named.write_text("eth0.5\n")
    (port,) = verbs_ports(tmp_path, address_of=address_of)
    assert (port.address, port.network) == ("10.5.0.1", "eth0.5")


@pytest.mark.parametrize(
    ("mac", "gid", "fault"),
    [
        ("02:00:0a:4d:00:01", MAC_GID, "rdma_cm connects by addresses, and eth1 has none of IPv4"),
        ("02:00:0a:4d:00:02", MAC_GID, f"no network device has its hardware address, of {MAC_GID}"),
        ("00:00:00:00:00:00", NONE, "no network device has its hardware address"),
    ],
)
def test_a_port_of_iwarp_without_an_address_says_so(
    tmp_path: Path, mac: str, gid: str, fault: str
) -> None:
    iwarp(tmp_path, "siw0", gid)
    network(tmp_path, "eth1", mac)
    (port,) = verbs_ports(tmp_path, address_of=address_of)
    assert fault.replace("of 0200", "of GID 0200") in port.fault


def test_ports_of_iwarp_come_last_and_are_used_alone() -> None:
    ports = [
        VerbsPort(name, 1, link, 0, None, "")
        for name, link in (("a", "iWARP"), ("b", V2), ("c", "iWARP"), ("d", "InfiniBand"))
    ]
    assert [str(port) for port in used_together(ports)[0]] == ["b:1", "d:1"]
    used, left_out = used_together(ports[:1] + ports[2:3])
    assert [str(port) for port in used] == ["a:1"]
    assert left_out == ["c:1 is not used: a port of iWARP is used alone, without others"]


def test_no_device_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(NoVerbs, match="the kernel has no ib_uverbs"):
        chosen_port(root=tmp_path)
    (tmp_path / "sys/class/infiniband_verbs").mkdir(parents=True)
    with pytest.raises(NoVerbs, match="the kernel has ib_uverbs, and no device"):
        chosen_port(root=tmp_path)
    (tmp_path / "sys/class/infiniband/mlx5_0/ports").mkdir(parents=True)
    with pytest.raises(NoVerbs, match="a container needs --device /dev/infiniband"):
        chosen_port(root=tmp_path)


@pytest.mark.parametrize(
    ("pyverbs", "said"),
    [
        (None, "pyverbs is not installed: verbs need"),
        (
            "raise ImportError('libibverbs.so.1: version `IBVERBS_PRIVATE_59 not found')",
            "pyverbs is of rdma-core 59, and the libibverbs of this system of another release",
        ),
        (
            "raise ImportError('librdmacm.so.1: cannot open shared object file')",
            "pyverbs is there without librdmacm.so.1: verbs need",
        ),
        ("raise ImportError('something else')", "pyverbs cannot be imported: something else"),
    ],
)
def test_a_library_that_cannot_be_imported_says_why(
    tmp_path: Path, pyverbs: str | None, said: str
) -> None:
    """In a process of its own: an import is remembered."""
    if pyverbs is not None:
        (tmp_path / "pyverbs").mkdir()
        (tmp_path / "pyverbs" / "__init__.py").write_text("")
        (tmp_path / "pyverbs" / "device.py").write_text(pyverbs)
    asked = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; sys.path.insert(0, sys.argv[1])\n"
            "from shard import verbs_refusal\nprint(verbs_refusal())",
            str(tmp_path),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert asked.stdout.startswith(said)

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

from shard.transport.verbs_device import NoVerbs, chosen_port, routed_network, verbs_ports
from tests.program import ROOT

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
        "d_iwarp:1": "its connections are made by rdma_cm alone",
        "g_ib:2": "it is init",
    }
    assert str(chosen_port("f_roce", tmp_path)) == str(chosen_port("f_roce:1", tmp_path))
    with pytest.raises(NoVerbs, match=r"^a_down:1 is not used: it is down$"):
        chosen_port("a_down", tmp_path)
    with pytest.raises(NoVerbs, match=r"no RDMA device 'mlx5_9': .*f_roce:1.* are there"):
        chosen_port("mlx5_9", tmp_path)


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

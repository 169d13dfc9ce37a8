"""What two ends of a verbs connection tell each other, and which of their ports are paired: no
device is needed. tests/rdma has those.
"""

from __future__ import annotations

import ipaddress
import struct
from pathlib import Path

import pytest

from shard import RemoteProtocolError, verbs_rails
from shard.transport.verbs_device import RAILS_MAX, NoVerbs
from shard.transport.verbs_introduction import FAR_END_BYTES, FarEnd, FarPair, gid_mark
from shard.transport.verbs_queue import SLOTS
from shard.transport.verbs_rails import paired
from shard.transport.verbs_records import pack_region, unpack_region
from tests.shard.test_verbs_device import IPV4, LOCAL, NONE, V2, device

INFINIBAND, ETHERNET = 1, 2
ALL_FIELDS = FarPair(link=2, mtu=5, lid=7, reads=8, number=9, psn=1 << 23, gid=bytes(range(16)))


def pair(address: str, link: int = ETHERNET, number: int = 1) -> FarPair:
    return FarPair(link=link, number=number, gid=gid(address))


def gid(address: str) -> bytes:
    return ipaddress.IPv6Address(address if ":" in address else f"::ffff:{address}").packed


@pytest.mark.parametrize("rails", [(), (ALL_FIELDS,), (FarPair(), ALL_FIELDS) * 3 + (ALL_FIELDS,)])
def test_an_introduction_says_the_same_of_each_rail_at_the_other_end(
    rails: tuple[FarPair, ...],
) -> None:
    end = FarEnd(**vars(ALL_FIELDS), slots=SLOTS, slot_bytes=1024, partner=11, rails=rails)
    told = end.pack()
    assert len(told) == FAR_END_BYTES == 256
    assert FarEnd.unpack(told) == end


def test_a_fault_of_any_length_comes_as_far_as_there_is_room() -> None:
    assert FarEnd.unpack(FarEnd(fault="it is down").pack()).fault == "it is down"
    assert FarEnd.unpack(FarEnd(fault="x" * 1000).pack()).fault == "x" * 210


def test_an_introduction_of_the_version_before_is_refused_by_both_numbers() -> None:
    with pytest.raises(RemoteProtocolError, match="in version 3, 4 expected: install the same"):
        FarEnd.unpack(struct.pack("<H254x", 3))


@pytest.mark.parametrize(
    ("rails", "said"),
    [
        (RAILS_MAX, f"introduced with {RAILS_MAX + 1} rails, at most {RAILS_MAX}"),
        (FarPair(number=1, reads=0), "and 0 reads at a time"),
        (FarPair(number=1, reads=1, mtu=0), "MTU 0, 1 to 5"),
        (FarPair(number=1, reads=1, mtu=255), "MTU 255, 1 to 5"),
    ],
)
def test_rails_that_no_end_has_are_refused(rails: int | FarPair, said: str) -> None:
    of = (rails,) if isinstance(rails, FarPair) else ()
    told = bytearray(FarEnd(**vars(ALL_FIELDS), slots=SLOTS, slot_bytes=1024, rails=of).pack())
    if isinstance(rails, int):
        struct.pack_into("<H", told, 40, rails)
    with pytest.raises(RemoteProtocolError, match=said):
        FarEnd.unpack(bytes(told))


@pytest.mark.parametrize("mtu", [0, 1, 5, 6, 255])
def test_the_mtu_of_the_pair_with_slots_is_one_that_a_device_has(mtu: int) -> None:
    told = bytearray(FarEnd(**vars(ALL_FIELDS), slots=SLOTS, slot_bytes=1024).pack())
    told[3] = mtu
    if mtu in (1, 5):
        assert FarEnd.unpack(bytes(told)).mtu == mtu
        return
    with pytest.raises(RemoteProtocolError, match=rf"MTU {mtu}, 1 to 5 \(IBV_MTU\)"):
        FarEnd.unpack(bytes(told))


@pytest.mark.parametrize(
    ("far", "near", "expected"),
    [
        # each pair of a subnet, whatever the order
        (["10.0.1.5", "10.0.2.5"], ["10.0.2.9", "10.0.1.9"], [1, 0]),
        # by order, where all are of one subnet as far as anybody can tell
        (["10.0.0.1", "10.0.0.1"], ["10.0.0.2", "10.0.0.2"], [0, 1]),
        (["10.0.1.5"], ["10.0.2.9", "10.0.1.9"], [1]),
        (["10.0.1.5", "10.0.2.5"], ["10.0.2.9"], [0, None]),
        (["fe80::1", "fd00::1:5"], ["fd00::1:6", "fe80::2"], [1, 0]),
        ([], ["10.0.0.1"], []),
    ],
)
def test_ports_are_paired_by_what_their_gids_have_in_common_at_the_beginning(
    far: list[str], near: list[str], expected: list[int | None]
) -> None:
    assert paired([pair(it) for it in far], [pair(it) for it in near]) == expected


def test_the_first_queue_pair_gets_the_partner_that_the_peer_names_and_others_what_is_left() -> (
    None
):
    far = [pair("10.0.1.5"), pair("10.0.2.5")]
    near = [pair("10.0.1.9"), pair("10.0.2.9")]
    assert paired(far, near, gid_mark(near[1].gid)) == [1, 0]
    assert paired(far, near, gid_mark(gid("10.0.3.9"))) == [0, 1]
    other = [pair("10.0.1.9"), pair("10.0.2.9", INFINIBAND)]  # no packet would pass
    assert paired(far, other, gid_mark(other[1].gid)) == [0, None]


def test_ports_of_two_kinds_of_link_are_not_paired_and_a_hole_is_with_none() -> None:
    far = [pair("fe80::1", INFINIBAND), pair("10.0.0.1", number=0), pair("10.0.0.1")]
    assert paired(far, [pair("10.0.0.2"), pair("fe80::2", INFINIBAND)]) == [1, None, 0]
    assert paired(far[:1], [pair("10.0.0.2")]) == [None]


def test_a_region_is_told_with_as_many_keys_as_there_are_rails() -> None:
    told = pack_region(3, 1 << 40, 1 << 30, [7, 0, 9])
    assert unpack_region(told, 3) == (3, 1 << 40, 1 << 30, (7, 0, 9))
    for count in (1, 2, 4):
        with pytest.raises(struct.error):
            unpack_region(told, count)


def test_the_ports_that_are_named_are_used_in_that_order_and_the_others_say_why_not(
    tmp_path: Path,
) -> None:
    for name in ("mlx5_0", "mlx5_1", "mlx5_3"):
        device(tmp_path, name, [(LOCAL, V2), (IPV4, V2)])
    device(tmp_path, "mlx5_2", [(IPV4, V2)], state="1: DOWN")

    def found(wanted: str | None) -> tuple[list[str], list[str]]:
        ports, left_out = verbs_rails(wanted, tmp_path)
        return [str(port) for port in ports], left_out

    down = ["mlx5_2:1 is not used: it is down"]
    assert found(None) == (["mlx5_0:1"], [])
    assert found("") == found(" , ") == (["mlx5_0:1"], [])
    assert found("mlx5_1") == (["mlx5_1:1"], [])
    assert found("mlx5_3,mlx5_0") == (["mlx5_3:1", "mlx5_0:1"], [])
    assert found("mlx5_1, mlx5_1:1 ,mlx5_2,") == (["mlx5_1:1"], down)
    every = ["mlx5_0:1", "mlx5_1:1", "mlx5_3:1"]
    assert found("all") == found(" all ") == found("all,all") == (every, down)
    assert found("mlx5_0,mlx5_9") == (
        ["mlx5_0:1"],
        ["no RDMA device 'mlx5_9': mlx5_0:1, mlx5_1:1, mlx5_3:1, mlx5_2:1 are there"],
    )
    with pytest.raises(NoVerbs, match=r"^mlx5_2:1 is not used: it is down; no RDMA device 'x': "):
        found("mlx5_2,x")
    with pytest.raises(NoVerbs, match=f"^9 RDMA ports are named, at most {RAILS_MAX} may be$"):
        found(",".join(f"mlx5_{number}" for number in range(9)))
    with pytest.raises(NoVerbs, match=r"^'all' is each RDMA port, mlx5_0, x too: "):
        found("all,mlx5_0,x")


def test_a_port_without_the_gid_that_the_setting_names_is_not_used(tmp_path: Path) -> None:
    device(tmp_path, "mlx5_0", [(LOCAL, V2), (IPV4, V2)])
    device(tmp_path, "mlx5_1", [(LOCAL, V2), (IPV4, V2), (NONE, V2)])
    device(tmp_path, "mlx5_2", [(LOCAL, V2), (IPV4, V2), (IPV4, V2)])
    for index in (None, 0, 1):
        assert len(verbs_rails("all", tmp_path, index)[0]) == 3
    ports, left_out = verbs_rails("all", tmp_path, 2)
    assert [str(port) for port in ports] == ["mlx5_2:1"]
    assert len(left_out) == 2
    assert all("row 2 of its table of GIDs is empty, which [transport] " in one for one in left_out)
    with pytest.raises(NoVerbs, match=r"^mlx5_0:1 is not used: row 5 .*verbs_gid_index names"):
        verbs_rails("mlx5_0", tmp_path, 5)


def test_of_all_ports_as_many_are_used_as_one_connection_may_have(tmp_path: Path) -> None:
    for number in range(RAILS_MAX + 2):
        device(tmp_path, f"mlx5_{number:02}", [(IPV4, V2)])
    ports, _ = verbs_rails("all", tmp_path)
    assert [port.device for port in ports] == [f"mlx5_{number:02}" for number in range(RAILS_MAX)]
    (tmp_path / "none").mkdir()
    with pytest.raises(NoVerbs, match="no RDMA device"):
        verbs_rails("all", tmp_path / "none")

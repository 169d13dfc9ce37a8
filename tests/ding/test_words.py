"""Addresses, greetings and device maps: texts and values in, values out."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import pytest

from prpc_engine.archive import Archive
from prpc_engine.ding import rendezvous_file
from prpc_engine.ding.device_map import DeviceMapEntry, parse_device_map, parse_devices
from prpc_engine.ding.greeting import (
    Interest,
    NodeGreeting,
    read_greeting,
    read_interest,
    told,
)
from prpc_engine.ding.hosts import dialled_address, is_own_host, listening_address
from prpc_engine.ding.place import NodePlace
from prpc_engine.errors import ConfigError, NotSent, RpcError
from prpc_engine.settings.address import Address
from prpc_engine.settings.user_secret import UserSecret

GREETING = NodeGreeting(
    1, "node 0", "tcp://h:1", 3, 2, Interest(4, True, frozenset({b"a", b"\xff"}))
)
JOB, USER = b"a secret of the job, long enough", UserSecret(b"a secret of the user")
ELSEWHERE = "198.51.100.7"  # of a block that is for documents


@pytest.mark.parametrize("text", ["tcp://10.0.0.1:50515", "tcp://[::1]:7", "ipc:///tmp/a.ipc"])
def test_an_address_is_read_and_written_as_di_engine_writes_it(text: str) -> None:
    assert str(NodePlace.parse(text, "attach_to")) == text


def test_two_spellings_of_one_address_are_one_place() -> None:
    assert NodePlace.parse("tcp://HOST:0080", "x") == NodePlace.parse("tcp://host:80", "x")


@pytest.mark.parametrize(
    "text", ["", "host:1", "tcp://host", "tcp://:1", "ipc://relative", "udp://h:1", 7, None]
)
def test_what_is_no_address_is_refused_with_the_settings_name(text: object) -> None:
    with pytest.raises(ConfigError, match="attach_to="):
        NodePlace.parse(text, "attach_to")


def test_a_greeting_arrives_as_it_was_told() -> None:
    archive = Archive()
    body, blocks = archive.encode_arguments(tuple(told(GREETING)))
    assert read_greeting(list(archive.decode(body, list(blocks))), "somebody") == GREETING


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([2, *told(GREETING)[1:]], "version 2"),
        ([1, "n"], "greets, but not"),
        (None, "greets, but not"),
        ([1, "n", "p", "3", 2, [1, True, []]], "greets, but not"),
    ],
)
def test_what_is_no_greeting_of_this_release_is_refused(values: object, text: str) -> None:
    with pytest.raises(RpcError, match=text):
        read_greeting(values, "somebody")


def test_what_are_no_topics_is_refused() -> None:
    with pytest.raises(RpcError, match="topics were told"):
        read_interest(1, True, ["text"])  # type: ignore[list-item]


def test_a_node_that_starts_wants_every_topic() -> None:
    assert Interest(1, False, frozenset()).wants(b"anything")
    assert not Interest(1, True, frozenset({b"a"})).wants(b"anything")


def test_a_device_map_is_read_as_torchrpc_writes_it() -> None:
    assert parse_device_map("0_0_0,0_1_2, 1_1_4") == (
        DeviceMapEntry(0, 0, 0),
        DeviceMapEntry(0, 1, 2),
        DeviceMapEntry(1, 1, 4),
    )


@pytest.mark.parametrize("text", ["", "1_0", "1_0_x", "1_0_1,", "-1_0_1", "1_0_1_2", "0_0_0 0_1_1"])
def test_what_is_no_device_map_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="NODE_LOCALGPU_PEERGPU"):
        parse_device_map(text)


@pytest.mark.parametrize("text", ["1_0_1,1_0_2", "1_0_1,1_2_1"])
def test_a_device_map_is_one_to_one(text: str) -> None:
    with pytest.raises(ConfigError, match="one to one"):
        parse_device_map(text)


def test_each_worker_has_a_device() -> None:
    assert parse_devices(None, 3) == (0, 1, 2)
    assert parse_devices("2, 0", 2) == (2, 0)
    assert parse_devices([1], 1) == (1,)
    for wrong in ("0", "0,1,2", "0,x"):
        with pytest.raises(ConfigError, match="2 numbers"):
            parse_devices(wrong, 2)


def test_without_a_secret_of_the_job_a_node_is_reached_from_this_host_alone() -> None:
    # all addresses of 127.0.0.0/8 are of this host
    assert listening_address(Address("127.3.4.5", 80), USER) == Address("127.3.4.5", 80)
    assert listening_address(Address("0.0.0.0", 80), USER) == Address("127.0.0.1", 80)
    assert dialled_address(Address("0.0.0.0", 80), USER) == Address("127.0.0.1", 80)
    for asked in (listening_address, dialled_address):
        with pytest.raises(ConfigError, match="PRPC_SECRET_FILE"):
            asked(Address(ELSEWHERE, 80), USER)


def test_with_a_secret_of_the_job_an_address_counts_as_it_is() -> None:
    assert listening_address(Address("0.0.0.0", 80), JOB) == Address("0.0.0.0", 80)
    assert dialled_address(Address(ELSEWHERE, 80), JOB) == Address(ELSEWHERE, 80)


def test_a_node_whose_name_is_of_no_interface_listens_at_all() -> None:
    assert listening_address(Address(ELSEWHERE, 80), JOB) == Address("0.0.0.0", 80)
    assert listening_address(Address("2001:db8::7", 80), JOB) == Address("::", 80)


def test_a_name_that_nobody_knows_is_no_host_of_ours() -> None:
    assert not is_own_host("no-such-host.invalid")


def test_a_file_tells_addresses_and_is_removed_by_who_wrote_it(tmp_path: Path) -> None:
    path = str(tmp_path / "node.ipc")
    rendezvous_file.write(path, ["shm://a"])
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert rendezvous_file.read(path) == ["shm://a"]
    rendezvous_file.write(path, ["shm://b"])
    rendezvous_file.remove(path, ["shm://a"])
    assert rendezvous_file.read(path) == ["shm://b"], "the one after it has written its own"
    rendezvous_file.remove(path, ["shm://b"])
    assert os.listdir(tmp_path) == []
    rendezvous_file.remove(path, ["shm://b"])


@pytest.mark.parametrize("content", [b"", b"{}", b'{"addresses": []}', b"nng"])
def test_a_file_of_another_kind_is_as_good_as_none(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "node.ipc"
    path.write_bytes(content)
    with pytest.raises(NotSent, match=re.escape(str(path))):
        rendezvous_file.read(str(path))
    with pytest.raises(NotSent, match="nobody listens"):
        rendezvous_file.read(str(tmp_path / "none"))


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="missing"):
        rendezvous_file.write(str(tmp_path / "missing" / "node.ipc"), ["shm://a"])


def test_a_file_that_no_node_has_written_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    path.write_text("three days of training")
    with pytest.raises(ConfigError, match=r"weights\.pt: what is there is kept"):
        rendezvous_file.write(str(path), ["shm://a"])
    assert path.read_text() == "three days of training"
    assert os.listdir(tmp_path) == ["weights.pt"]


def test_what_holds_nothing_is_replaced(tmp_path: Path) -> None:
    """A name that tempfile made, and the socket of DI-engine's nng that was killed."""
    empty, left = tmp_path / "empty", tmp_path / "left"
    empty.touch()
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(left))
    for path in (empty, left):
        rendezvous_file.write(str(path), ["shm://a"])
        assert rendezvous_file.read(str(path)) == ["shm://a"]

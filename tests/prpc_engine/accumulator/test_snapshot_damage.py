"""A snapshot that somebody else has made up is a ConfigError with its path, and a save that fails
leaves the old one.
"""

from __future__ import annotations

import resource
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prpc_engine import Master, RpcService
from prpc_engine.accumulator import AccumulatorServer, snapshot_file
from prpc_engine.accumulator.server import AccumulatorShard
from prpc_engine.accumulator.snapshot_file import HEADER, LENGTHS_OFFSET, MAGIC, SIZES
from prpc_engine.errors import ConfigError


@pytest.fixture
def service() -> Iterator[RpcService]:
    with Master() as master, RpcService(master=master.address) as one:
        yield one


def state_of_one() -> dict[str, Any]:
    shard = AccumulatorShard()
    shard.push(1, 1, 1, False, 0, [("one", "sum", {}, ((), 1))])
    return shard.snapshot()


def with_checksum(content: bytes) -> bytes:
    """What follows the header, with a checksum that fits."""
    return HEADER.pack(MAGIC, zlib.crc32(content)) + content


SIZES_OF = {
    "more blocks than bytes": (0xFFFFFFFF, 0),
    "a body of 2**64 - 1 bytes": (0, (1 << 64) - 1),
    "a body shorter than it is": (0, 1),
    "no body": (0, 0),
}


@pytest.mark.parametrize("name", SIZES_OF)
def test_lengths_that_do_not_fit_the_file_are_refused(
    tmp_path: Path, service: RpcService, name: str
) -> None:
    path = tmp_path / "snapshot"
    snapshot_file.save(path, [state_of_one()])
    good = path.read_bytes()
    path.write_bytes(with_checksum(SIZES.pack(*SIZES_OF[name]) + good[LENGTHS_OFFSET:]))
    with pytest.raises(ConfigError, match=f"{path} is no snapshot of accumulators, or damaged"):
        AccumulatorServer(service, snapshot_path=path)


@pytest.mark.parametrize("length", [1, 1 << 31, 1 << 63, (1 << 64) - 1])
def test_a_block_that_is_not_there_is_refused(
    tmp_path: Path, service: RpcService, length: int
) -> None:
    path = tmp_path / "snapshot"
    path.write_bytes(with_checksum(SIZES.pack(1, 1) + struct.pack("<Q", length) + b"\xc0"))
    with pytest.raises(ConfigError, match=f"{path} is no snapshot of accumulators, or damaged"):
        AccumulatorServer(service, snapshot_path=path)


GOOD = ("one", "sum", {}, ((), 1))
STATES: dict[str, Any] = {
    "no window": {"counters": []},
    "no counters": {"window": []},
    "a window that is a number": {"window": 5, "counters": []},
    "a window of numbers": {"window": [5], "counters": []},
    "a window of texts": {"window": [("a", "b", "c", {})], "counters": []},
    "a client that pushed -1 times": {"window": [(1, 1, -1, {})], "counters": []},
    "counters that are a number": {"window": [], "counters": 5},
    "counters of numbers": {"window": [], "counters": [5]},
    "a counter without a name": {"window": [], "counters": [([], *GOOD[1:])]},
    "a counter whose name is a number": {"window": [], "counters": [(5, *GOOD[1:])]},
    "a counter of a kind that is none": {"window": [], "counters": [("one", "nothing", {}, 1)]},
    "parameters that are none": {"window": [], "counters": [("one", "sum", {"a": 1}, ((), 1))]},
    "a state that is none": {"window": [], "counters": [("one", "sum", {}, {"a": 1})]},
    "a state that is too large": {"window": [], "counters": [("one", "avg", {}, (1.0, 1 << 80))]},
    "an id that is a text": {"window": [], "counters": [], "server_id": "0"},
    "an id that is a list": {"window": [], "counters": [], "server_id": []},
    "a name that is a number": {"window": [], "counters": [], "name": 5},
}


@pytest.mark.parametrize("name", STATES)
def test_a_state_with_a_fitting_checksum_that_is_none_is_refused(
    tmp_path: Path, service: RpcService, name: str
) -> None:
    path = tmp_path / "snapshot"
    snapshot_file.save(path, [STATES[name]])
    with pytest.raises(
        ConfigError, match=f"{path} (cannot be restored by this program|was saved by server)"
    ):
        AccumulatorServer(service, snapshot_path=path)
    snapshot_file.save(path, [state_of_one()])
    # nothing of the attempt is left: no lock, no server
    AccumulatorServer(service, snapshot_path=path).close()


@pytest.mark.parametrize("content", [[], {}, [5], "text", [[]], None])
def test_something_else_with_a_fitting_checksum_is_refused(
    tmp_path: Path, service: RpcService, content: Any
) -> None:
    path = tmp_path / "snapshot"
    snapshot_file.save(path, content)
    with pytest.raises(
        ConfigError, match=f"{path} (is no snapshot of accumulators|was saved by 0 servers)"
    ):
        AccumulatorServer(service, snapshot_path=path)


@pytest.mark.parametrize("path", ["", ".", "/", "a\0b"])
def test_a_path_that_names_no_file_is_refused(service: RpcService, path: str) -> None:
    with pytest.raises(ConfigError, match="snapshot_path="):
        AccumulatorServer(service, snapshot_path=path)


def test_a_folder_is_refused_as_a_snapshots_path_and_nothing_is_left_beside_it(
    tmp_path: Path, service: RpcService
) -> None:
    folder = tmp_path / "snapshots"
    folder.mkdir()
    with pytest.raises(ConfigError, match=f"snapshot_path='{folder}' is a folder; give the name"):
        AccumulatorServer(service, snapshot_path=folder)
    assert list(tmp_path.iterdir()) == [folder]


def test_a_snapshot_that_finds_no_room_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "snapshot"
    snapshot_file.save(path, [state_of_one()])
    good = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(good) - 1, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            snapshot_file.save(path, [state_of_one()])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == good
    snapshot_file.save(path, [state_of_one()])
    assert path.read_bytes() == good


def test_a_snapshot_is_not_written_through_a_link_that_somebody_has_put_beside_it(
    tmp_path: Path,
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "snapshot.new").symlink_to(victim)
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        snapshot_file.save(tmp_path / "snapshot", [state_of_one()])
    (tmp_path / "other.lock").symlink_to(victim)
    with pytest.raises(ConfigError, match="Too many levels of symbolic links"):
        snapshot_file.Lock(tmp_path / "other")
    assert victim.read_text() == "precious"

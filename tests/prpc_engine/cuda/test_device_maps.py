"""What a device map may say."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prpc_engine import errors
from prpc_engine import remote as rpc
from prpc_engine.remote import device_maps


@pytest.mark.parametrize(
    ("device", "index"),
    [
        (0, 0),
        (3, 3),
        ("cuda:1", 1),
        ("cpu", -1),
        (SimpleNamespace(type="cuda", index=2), 2),
        (SimpleNamespace(type="cpu", index=None), -1),
    ],
)
def test_a_device_is_a_number_a_name_or_torchs(device: Any, index: int) -> None:
    assert device_maps.index_of(device) == index


@pytest.mark.parametrize(
    "device",
    [-1, True, 1024, "cuda", "cuda:", "gpu:0", None, SimpleNamespace(type="cuda", index=None)],
)
def test_another_is_refused_by_name(device: Any) -> None:
    with pytest.raises(errors.ConfigError, match="is allowed"):
        device_maps.index_of(device)


def test_maps_grow_and_stay_one_to_one() -> None:
    options = rpc.Options()
    options.set_device_map("b", {0: 1})
    options.set_device_map("b", {"cuda:1": "cuda:0"})
    options.set_device_map("c", {0: "cpu"})
    with pytest.raises(ValueError, match="cuda:1 and cuda:2 both go to its cuda:0"):
        options.set_device_map("b", {2: 0})
    assert options.device_maps == {"b": {0: 1, 1: 0}, "c": {0: -1}}
    assert device_maps.inverse(options.device_maps["b"]) == {1: 0, 0: 1}


def test_a_map_for_anybody_is_for_those_without_one() -> None:
    options = rpc.Options()
    options.set_device_map("*", {0: 0})
    options.set_device_map("b", {0: 1})
    maps = rpc.DeviceMap.of(options.device_maps)
    assert maps.of_peer("b") == {0: 1}
    assert maps.of_peer("c") == {0: 0}
    assert rpc.DeviceMap("b", {0: 1}).of_peer("c") is None


def test_maps_in_parallel_lists_are_torchrpcs() -> None:
    made = rpc.DeviceMap("a", ["b", "b", "c"], [0, 1, 0], [1, 0, 2])
    assert dict(made) == {"b": {0: 1, 1: 0}, "c": {0: 2}}
    assert made.lines("a") == [
        "a : cuda:0 --> b : cuda:1",
        "a : cuda:1 --> b : cuda:0",
        "a : cuda:0 --> c : cuda:2",
    ]
    assert dict(rpc.DeviceMap("b", {0: 1})) == {"b": {0: 1}}
    with pytest.raises(errors.ConfigError, match="lists of one length"):
        rpc.DeviceMap("a", ["b"], [0, 1], [1])


@pytest.mark.parametrize("maps", [5, {"b": 1}, {5: {0: 0}}, {"b": {0: 1, 1: 1}}, {"b": {0: "x"}}])
def test_options_refuse_what_is_no_map(maps: Any) -> None:
    with pytest.raises(errors.ConfigError, match="device"):
        rpc.Options(device_maps=maps)


@pytest.mark.parametrize("devices", [["cpu"], [0, 0], ["x"]])
def test_options_refuse_what_are_no_devices(devices: Any) -> None:
    with pytest.raises(errors.ConfigError, match="device"):
        rpc.Options(devices=devices)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"device_maps": {"there": {7: 0}}}, "name cuda:7, and this process sees"),
        ({"devices": [900]}, "name cuda:900, and this process sees"),
        ({"device_maps": {"there": {1: 0}}, "devices": [0]}, "cuda:1, which `devices` does not"),
    ],
)
def test_devices_that_are_not_there_keep_a_worker_from_joining(
    options: dict[str, Any], text: str, tmp_path: Path
) -> None:
    with pytest.raises(errors.ConfigError, match=text):
        rpc.init_rpc("here", 0, 1, f"file://{tmp_path / 'meet'}", rpc.Options(**options))

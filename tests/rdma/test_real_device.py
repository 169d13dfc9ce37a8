"""A real verbs device: what /sys says of it, beside what the library does."""

from __future__ import annotations

import ctypes
import importlib
import ipaddress
import mmap
import os
from typing import Any

from shard import verbs_dmabuf_refusal, verbs_ports, verbs_refusal
from shard.transport.verbs_device import V2, loaded
from tests.program import PATIENCE_S, run_to_end
from tests.rdma.port import chosen_port


def test_the_library_lists_the_devices_that_the_kernel_does() -> None:
    assert verbs_refusal() is None
    assert sorted(loaded()) == sorted({port.device for port in verbs_ports()})


def test_the_port_that_is_chosen_opens_and_has_that_gid() -> None:
    device: Any = importlib.import_module("pyverbs.device")
    port = chosen_port()
    assert port.link in ("InfiniBand", V2) and port.gid is not None
    with device.Context(name=port.device) as context:
        told = context.query_gid(port.number, port.gid_index).gid
        assert ipaddress.IPv6Address(told) == port.gid
        assert context.query_port(port.number).state == 4  # IBV_PORT_ACTIVE


def test_memory_is_registered_by_its_address_and_given_back() -> None:
    device: Any = importlib.import_module("pyverbs.device")
    pd: Any = importlib.import_module("pyverbs.pd")
    mr: Any = importlib.import_module("pyverbs.mr")
    memory = mmap.mmap(-1, 1 << 20)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    with device.Context(name=chosen_port().device) as context, pd.PD(context) as domain:
        registered = mr.MR(domain, len(memory), 1, address=address)  # 1: IBV_ACCESS_LOCAL_WRITE
        assert registered.lkey and registered.buf == address
        registered.close()


def test_a_driver_without_dma_bufs_says_so() -> None:
    """rxe of Linux 6.1 is one."""
    port = chosen_port()
    refusal = verbs_dmabuf_refusal(port)
    assert refusal is not None
    assert refusal.startswith(f"{port} registers no dma-buf: ")
    assert "Operation not supported" in refusal


def test_doctor_names_the_port_that_verbs_would_use() -> None:
    said = run_to_end(
        "prpc_engine.cli", "doctor", "--json", env=os.environ, timeout_s=PATIENCE_S
    ).stdout
    port = chosen_port()
    assert f"verbs would use {port}" in said
    assert f"{port} {port.link}, {port.address}" in said

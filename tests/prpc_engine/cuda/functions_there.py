"""What tests have workers with devices do."""

from __future__ import annotations

import asyncio
import sys
import threading
from typing import Any

import numpy as np

from prpc_engine import remote as rpc

event = threading.Event()
PATIENCE_S = 20.0


def device_and_sum(value: Any) -> tuple[int, float]:
    """Where it arrived (-1: as numpy's), and its sum."""
    if isinstance(value, np.ndarray):
        return -1, float(value.sum())
    return value.device.id, float(value.get().sum())


def give_back(value: Any) -> Any:
    return value


async def give_back_later(value: Any) -> Any:
    await asyncio.sleep(0)
    return value


def give_back_when_told(value: Any) -> Any:
    event.wait(PATIENCE_S)
    return value


def tell() -> None:
    event.set()


def made(size: int, device: int) -> Any:
    cupy = sys.modules["cupy"]
    with cupy.cuda.Device(device):
        return cupy.asarray(np.arange(size, dtype=np.float32))


class Kept:
    """State behind an RRef."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def get(self) -> Any:
        return self.value


def figures() -> dict[str, int]:
    return rpc.statistics()

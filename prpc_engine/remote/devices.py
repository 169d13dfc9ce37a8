"""The device maps of a worker at work: whom a call's tensors are for, and how they get there.

    of a peer   its tensors go
    not known   by the host, while it is asked to open a block of our pool on each mapped device
    opens       by our pool: what is sent is copied there, and it copies it out
    does not    by the host: another host, a container that does not see our devices, no CUDA; where
                Options(gpu_direct=True) asks for it, by RDMA ports that read and write devices

A call to a peer with a map is the verb "mapped" (of a value "mapped_fetch", which may be repeated
as "fetch" may), with the inverse map for its answer: so the peer needs to know no map of ours. One
without is sent as ever.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from inspect import iscoroutine
from typing import Any

import numpy as np

from prpc_engine import errors
from prpc_engine.cuda import transfers
from prpc_engine.cuda.direct import DirectSupport, direct_refusal, direct_support
from prpc_engine.cuda.direct_blocks import DirectBlocks
from prpc_engine.cuda.driver import CudaError, driver, find
from prpc_engine.cuda.opened import opened
from prpc_engine.cuda.placement import HOST, DevicePlacement, PlacedValue
from prpc_engine.cuda.pool import Pool
from prpc_engine.remote.device_maps import DeviceMap, inverse, name_of
from prpc_engine.remote.members import Members
from prpc_engine.rpc.deferred import Deferred
from shard import Future, Slab

logger = logging.getLogger("prpc")
PATTERN_BYTES = 16  # that a peer reads to show that it can
Tell = Callable[..., Future]
VERBS = frozenset({"run", "create", "method", "create_by_method"})


class Devices:
    """Of one worker. Owned by it. Any thread may call.

    maps  of its peers, as they were at init_rpc()
    """

    def __init__(
        self,
        maps: DeviceMap,
        shares: bool,
        is_direct: bool,
        members: Members,
        tell: Tell,
        slab: Slab,
    ) -> None:
        """`shares`: others may open our pool; `is_direct`: RDMA ports may. `tell` has a worker of a
        rank run a verb: RemoteCalls.tell().
        """
        self._shares = shares
        self.maps = maps
        self._members = members
        self._tell = tell
        support: Sequence[DirectSupport] = ()
        if is_direct:
            try:
                support = direct_support()
                why = direct_refusal(support, None, has_peer_module=True)
            except CudaError as error:
                why = f"the CUDA driver does not say: {error}"
            if why is not None:
                logger.warning("gpu_direct: %s; tensors go by the host's memory", why)
        self._pool = Pool(slab, direct=support)
        self._direct: DirectBlocks | None = None
        self._slab = slab
        if is_direct:
            self._direct = slab.device_rooms = DirectBlocks(self._pool)
        self._opens: dict[int, bool] = {}  # by incarnation
        self._owners: dict[int, int] = {}  # by incarnation, of the pools that we have opened

    def placed(
        self, rank: int, verb: str, arguments: tuple[Any, ...]
    ) -> tuple[str, tuple[Any, ...]]:
        """A call as it is sent to that worker: with its map, if there is one."""
        members = self._members
        targets = self.maps.of_peer(members.info_of(rank).name)
        if targets is None:
            return verb, arguments
        placement = self._placement(rank, members.incarnation_of(rank), targets)
        back = [number for pair in inverse(targets).items() for number in pair]
        header = (members.rank, members.incarnation, back)
        if verb == "fetch":
            return "mapped_fetch", (*header, *arguments)
        return "mapped", (*header, verb, PlacedValue(arguments, placement))

    def answer(self, value: Any, rank: int, incarnation: int, back: Sequence[int]) -> Any:
        """What a function returned to a peer, for its devices."""
        placement = self._placement(
            rank, incarnation, dict(zip(back[::2], back[1::2], strict=True))
        )
        if iscoroutine(value):

            async def awaited() -> PlacedValue:
                return PlacedValue(await value, placement)

            return awaited()
        if isinstance(value, Deferred):
            later = Deferred()

            def settle(done: Any) -> None:
                error = done.error()
                if error is not None:
                    later.fail(error)
                else:
                    later.reply(PlacedValue(done.result(), placement))

            value.when_done(settle)
            return later
        return PlacedValue(value, placement)

    def _placement(
        self, rank: int, incarnation: int, targets: Mapping[int, int]
    ) -> DevicePlacement:
        sources = [device for device, target in targets.items() if HOST not in (device, target)]
        opens = self._opens.get(incarnation)
        if opens is None and sources and self._shares:
            self._opens[incarnation] = opens = False
            cuda = find()
            if cuda is not None:
                ours = [device for device in sources if device < len(cuda.uuids)]
                self._ask_to_open(rank, incarnation, ours)
        if opens:
            return DevicePlacement(targets, self._pool)
        return DevicePlacement(targets, direct=self._direct)

    # -- whether a peer can open our pool ----------------------------------------------------------

    def _ask_to_open(self, rank: int, incarnation: int, devices: Sequence[int]) -> None:
        """Without waiting; until its answer what is sent to it goes by the host."""
        cuda = driver()
        shown: list[Any] = []
        for device in devices:
            room = self._pool.take(device, PATTERN_BYTES)
            if room is None:
                return
            pattern = os.urandom(PATTERN_BYTES)
            written = np.frombuffer(pattern, np.uint8)
            with cuda.on(device):
                cuda.copy(room.address, written.ctypes.data, PATTERN_BYTES)
                cuda.synchronize()
            shown.append([room.ticket, list(room.share), pattern])
        if not shown:
            return

        def heard(done: Any) -> None:
            if incarnation in self._opens:  # else it has died meanwhile
                self._opens[incarnation] = done.error() is None and done.result() is True

        asked = self._tell(rank, "can_open", self._members.incarnation, shown)
        asked.when_done(heard)

    def can_open(self, incarnation: int, shown: Sequence[Any]) -> bool:
        """Whether this process reads from a peer's pool what the peer says is there."""
        try:
            for ticket, share, pattern in shown:
                self._owners[incarnation] = share[0]
                found = transfers.to_host(ticket, share, len(pattern))
                if found.tobytes() != pattern:
                    return False
        except Exception as error:  # of the driver or of what the peer says: it goes by the host
            logger.warning(
                "device memory of %s cannot be opened here, so its tensors come by the host: %s",
                self._members.named(incarnation),
                errors.text_of(error),  # the error itself has the ticket in its traceback
            )
            return False
        return True

    # -- ends --------------------------------------------------------------------------------------

    def worker_gone(self, incarnation: int) -> None:
        """That worker has left or died: its memory is closed."""
        self._opens.pop(incarnation, None)
        # stays there: one that was only silent sends on, and may die later
        owner = self._owners.get(incarnation)
        if owner is not None:
            opened().forget(owner)

    def statistics(self) -> dict[str, int]:
        """`peers_that_open` our pool, and its figures; of `gpu_direct` those of DirectBlocks."""
        return {
            "peers_that_open": sum(self._opens.values()),
            **(self._direct.statistics() if self._direct is not None else {}),
            **{f"device_{name}": figure for name, figure in self._pool.statistics().items()},
        }

    def close(self) -> None:
        """Give all device memory back, ours and others'."""
        for incarnation in list(self._owners):
            self.worker_gone(incarnation)
        if self._direct is not None and self._slab.device_rooms is self._direct:
            self._slab.device_rooms = None
        self._pool.close()


def check_devices(maps: DeviceMap, devices: Sequence[int]) -> None:
    """Of init_rpc(). Raises ConfigError for devices that this process does not see."""
    ours = {device for each in maps.values() for device in each if device != HOST}
    outside = sorted(ours - set(devices)) if devices else []
    if outside:
        raise errors.ConfigError(
            f"device_maps name {', '.join(map(name_of, outside))}, which `devices` does not: "
            f"{', '.join(map(name_of, devices))}"
        )
    ours |= set(devices)
    if not ours:
        return
    found = find()
    count = 0 if found is None else len(found.uuids)
    missing = [name_of(device) for device in sorted(ours) if device >= count]
    if missing:
        raise errors.ConfigError(
            f"device_maps and devices name {', '.join(missing)}, and this process sees {count} "
            "CUDA devices (CUDA_VISIBLE_DEVICES, nvidia-smi)"
        )

"""Where a task is reached: what listens for it, on one reactor that whoever waits turns (shard/driver.py) and one slab.

    node      listens at                                    serves
    data      shared memory, and tcp by the rule of         receive, abort
              endpoint_map.py: its address, or any port
    control   tcp, the task's address in the cluster        hello

Both live in this process. Communication shards (relay.py) take the answers over tcp out of it, where somebody asks for them.
"""

from __future__ import annotations

import contextlib
import logging
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from prpc_engine import errors, slab
from prpc_engine.address import Address
from prpc_engine.cluster.config import ServerConfig
from prpc_engine.cluster.control import CONTROL_TARGET, DATA_TARGET, HELLO, Facts, check_plan
from prpc_engine.cluster.relay import Relays
from prpc_engine.config import TlsSettings, allow_from, limits_from, secret_from, transports_from
from prpc_engine.endpoint_map import Rule
from prpc_engine.master.master import close_in_reactor
from prpc_engine.method import ENGINE
from prpc_engine.network import NetworkSettings
from prpc_engine.node import Node
from prpc_engine.peer import Peer
from prpc_engine.server import Server as Methods
from shard import Driver, Limits, usable_cores

LINGER_S = 0.2  # at close(), for receivers to drop arrays that we lent them

logger = logging.getLogger("prpc")


@dataclass(frozen=True)
class Place:
    """What an endpoint is made of."""

    task: str
    plan: str
    control: Address
    data: Address  # port 0: any
    transports: tuple[str, ...]
    secret: bytes = field(repr=False)
    limits: Limits
    tls: TlsSettings | None
    polling: bool
    pin_cores: bool
    shards: int


def place_from(
    task: str,
    plan: str,
    rule: Rule,
    control: Address,
    data: Address | None,
    config: ServerConfig,
    settings: NetworkSettings,
) -> Place:
    """From what the user said. Raises ConfigError."""
    transports = transports_from(config.transports)
    return Place(
        task=task,
        plan=plan,
        control=control,
        data=data or replace(control, port=0),
        transports=transports,
        secret=secret_from(config.secret),
        limits=limits_from(config.limits),
        tls=config.tls,
        polling=settings.polling,
        pin_cores=settings.pin_cores,
        shards=_shards_from(task, rule, transports, config, settings),
    )


def _shards_from(task: str, rule: Rule, transports: tuple[str, ...], config: ServerConfig, settings: NetworkSettings) -> int:
    """How many communication shards. Raises ConfigError where the config wants some, and there can be none."""
    asked, why = config.shards, ""
    if asked is None:
        # A script that asked for none need not be one that can start processes.
        is_asked = settings.cores > 1 and not settings.origins["cores"].startswith("default")
        asked = settings.cores if is_asked else 0
        if len(usable_cores()) <= asked:
            why = f"{len(usable_cores())} usable cores are not one for each, and one for the application"
    if rule != "exchange":
        why = f"by rule {rule!r} the task has one data port, and each shard listens at one of its own"
    elif set(transports) != {"shm", "tcp"}:
        why = f"they need shared memory and tcp, and transports are {', '.join(transports)}"
    if settings.pin_cores and (not asked or why):
        logger.warning("%s has no effect: there are no communication shards to bind", settings.origins["pin_cores"])
    if not asked or not why:
        return asked
    text = f"{task} has no communication shards, {asked} were asked for: {why}; its own process answers"
    if config.shards is not None:
        raise errors.ConfigError(text)
    logger.warning("%s", text)
    return 0


class Endpoint:
    """See the file's head. Owned by a Server. `methods` are those of the data node. Raises AddressInUse, ConfigError."""

    def __init__(self, place: Place, methods: Mapping[str, Callable[..., Any]], on_peer_lost: Callable[[Peer], None]) -> None:
        self._place = place
        self._methods = methods
        self._relays: Relays | None = None
        self.driver = driver = Driver(place.polling, "prpc-server", engine=ENGINE)
        with contextlib.ExitStack() as closing:
            closing.callback(driver.close)
            self.data = self._node("data", place.transports, place.data)
            closing.callback(close_in_reactor, driver, self.data)
            self.data.on_peer_lost = on_peer_lost
            incarnation = int(self.data.addresses[0].rpartition("/")[2], 16)
            self.me = Facts(place.plan, place.task, incarnation, tuple(self.data.addresses))
            self.control = self._node("control", ("tcp",), place.control)
            closing.callback(driver.reactor.call_soon, self.control.close)
            if place.shards:
                self._relays = Relays(place.shards, place.polling, place.pin_cores, driver)
                closing.callback(self._relays.close)
                host = _listening_host(place.control.host)
                self._relays.listen(place.task, self.data.addresses, place.secret, place.limits, host, place.tls)
            self._closing = closing.pop_all()
        self.address = replace(place.control, port=int(self.control.address("tcp").rpartition(":")[2]))

    def _node(self, what: str, transports: Sequence[str], address: Address) -> Node:
        place = self._place
        limits = replace(place.limits, bulk_lanes=0) if what == "control" else place.limits  # its messages are all small
        text = f"{place.task} cannot listen for {what} at {address}"
        host = _listening_host(address.host)
        try:
            return Node(
                self.driver.reactor,
                self.driver,
                slab.default_slab(),
                place.secret,
                limits,
                transports,
                host,
                address.port,
                place.tls,
            )
        except errors.AddressInUse as error:
            raise errors.AddressInUse(
                f"{text}: the port is taken; end who has it (ss -ltnp names it), perhaps an earlier run of this task, or give "
                "all tasks a cluster or .endpoint_map with another"
            ) from error
        except errors.ConfigError as error:
            raise errors.ConfigError(f"{text}: {error}") from error

    def serve(self) -> None:
        """Answer. Who came before finds no service, and asks again (link.py)."""
        allow = allow_from(None)
        self.data.servers[DATA_TARGET] = Methods("data", 0, DATA_TARGET, self._methods, allow=allow)
        self.control.servers[CONTROL_TARGET] = Methods("control", 0, CONTROL_TARGET, {HELLO: self._hello}, allow=allow)
        self.driver.take_over()

    @property
    def living_shards(self) -> int:
        """How many communication shards there are now."""
        return len(self._relays.living()) if self._relays is not None else 0

    def _hello(self, plan: str, task: str, incarnation: int) -> list[Any]:
        me = self.me
        try:
            check_plan(me.plan, me.task, plan, task)
        except errors.ConfigError as error:
            logger.warning("%s", str(error))  # who asked compares too, and fails
        data = list(me.data)
        living = self._relays.living() if self._relays is not None else []
        if living:
            theirs = living[zlib.crc32(task.encode()) % len(living)]
            data = [theirs if address.startswith("tcp://") else address for address in data]
        return [me.plan, me.task, me.incarnation, data]

    def close(self) -> None:
        """End the shards, hang up on everybody."""
        self._closing.close()
        self.data.slab.wait_for_readers(LINGER_S)


def _listening_host(host: str) -> str:
    """All addresses of this host, as a cluster's name for it may be none of them; but a loopback one stays what it is."""
    if host == "localhost" or host.startswith("127.") or host == "::1":
        return host
    return "::" if ":" in host else "0.0.0.0"

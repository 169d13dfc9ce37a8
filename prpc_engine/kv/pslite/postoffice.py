"""This process's place in a job: its node ids, the way to all other nodes, and who here gets what arrives.

    state    event                                             next
    new      the scheduler's master answers                    member
    member   a customer starts: a node id of its role is free  one more place; what is sent to that id is answered here
    member   all ids of the role are taken by living nodes     waits until one is free, by the deadline
    any      close()                                           closed: the places are free at once, as when the process dies

A node id is the server id of a server of one service, which the master gives to one living session only: so the id of a process
that died is free when its session is over, and whoever starts next takes it: as often as wanted.

A message for an application that has no handler yet waits for it, within bounds.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from prpc_engine import errors
from prpc_engine.config import limits_from
from prpc_engine.kv.pslite import ids
from prpc_engine.kv.pslite.environment import Settings
from prpc_engine.kv.pslite.reliable import Dice, Remembered, follow
from prpc_engine.master.master import Master
from prpc_engine.service import SERVERS_PATH, RpcService
from shard import Driver, Future

SERVICE = "pslite"
JOB_PATH = "/_pslite_"  # in the master's tree: the number of the job
START_TIMEOUT_S = 60.0  # for the scheduler to listen, for a free place, for servers to be there
BARRIER_TIMEOUT_S = 600.0  # members may have much to do before they come
LEAVE_TIMEOUT_S = 10.0  # for the others to hear that the last barrier is open, before the scheduler ends
CONNECT_TIMEOUT_S = 5.0  # for one attempt at the scheduler
CONNECT_PAUSE_S = 0.02  # between attempts, as nobody tells us when a port opens
EARLY_MESSAGES_MAX, EARLY_BYTES_MAX = 4096, 256 << 20  # that wait for a handler

logger = logging.getLogger("prpc")
Handler = Callable[..., Any]  # (sender, customer id, timestamp, *payload) -> the answer, or a Future of it


class Endpoint:
    """What other nodes call: one for each node id that this process has."""

    def __init__(self, postoffice: Postoffice, node: int, customer_id: int) -> None:
        self._receive = partial(postoffice.receive, customer_id)
        self._dice = Dice(postoffice.settings.drop_percent, postoffice.settings.drop_seed, node)
        self._loses = postoffice.settings.drop_percent > 0
        self._remembered = Remembered()

    def hello(self) -> None:
        """Connect."""

    def post(self, kind: str, app_id: int, sender: int, customer_id: int, timestamp: int, *payload: Any) -> Any:
        """One message; its answer."""
        if self._loses and self._dice.drops():
            return Future()  # the caller's deadline ends it
        return self._receive(kind, app_id, sender, customer_id, timestamp, *payload)

    def post_once(self, incarnation: int, sequence: int, *message: Any) -> Any:
        """The same, of a message that may come again."""
        if self._loses and self._dice.drops():
            return Future()
        return self._remembered.answer(incarnation, sequence, partial(self._receive, *message))


class Postoffice:
    """See the file's head. Thread-safe. Owned by lifecycle.py, which closes it.

    left_job  number of the job that this process has left: its scheduler may still listen for a moment, and is not taken

    Raises ConfigError, AddressInUse (the scheduler's address is taken), MasterUnreachable (no scheduler in timeout_s seconds).
    """

    def __init__(self, settings: Settings, timeout_s: float = START_TIMEOUT_S, left_job: int = 0) -> None:
        self.settings = settings
        self.role = settings.role
        self.key_ranges = ids.key_ranges(settings.servers)
        self.incarnation = secrets.randbits(63) | 1
        self.job = 0
        self.sequences = itertools.count()  # of messages that may be sent again
        self.is_recovery = False
        self.places: dict[int, int] = {}  # customer id -> node id
        self._leaving = contextlib.ExitStack()
        self._guard = threading.Lock()
        self._handlers: dict[tuple[str, int, int], Handler] = {}  # by kind, app id, customer id
        self._early: dict[tuple[str, int, int], deque[tuple[Future, tuple[Any, ...]]]] = {}
        self._early_messages = self._early_bytes = 0
        self._meeting = threading.Condition()
        self._in_barriers = 0
        self._changed = threading.Condition()  # a node came or went
        self._changes = 0
        self._master: Master | None = None
        if self.role == "scheduler":
            self._master = Master(f"{_bracketed(settings.scheduler_host)}:{settings.root.port}")
        try:
            self._service = self._join(left_job, timeout_s)
        except BaseException:
            if self._master is not None:
                self._master.close()
            raise
        try:
            self.client = self._service.create_client(SERVICE, expected_servers=0)
            self._service.master_client.tree_watch(f"{SERVERS_PATH}/{SERVICE}", self._note_change)
        except BaseException:
            self.close()
            raise

    def _join(self, left_job: int, timeout_s: float) -> RpcService:
        """Connect to the scheduler, as soon as there is one of another job than `left_job`."""
        settings = self.settings
        lanes = replace(limits_from(None), bulk_lanes=0)  # one lane: messages of one worker to one server stay in order
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                service = RpcService(
                    str(settings.root),
                    bind=f"{_bracketed(settings.host)}:{settings.port}",
                    transports=settings.transports,
                    limits=lanes,
                    lease_s=settings.dead_after_s,
                    timeout_s=CONNECT_TIMEOUT_S,
                )
            except errors.MasterUnreachable as error:
                why = str(error)
            else:
                try:
                    self.job = self._job_of(service)
                    if self.job != left_job:
                        return service
                    why = "the one there is about to end, with the job that this process has left"
                except errors.RpcError as error:
                    why = str(error)
                service.close()
            if time.monotonic() >= deadline:
                raise errors.MasterUnreachable(
                    f"{self.role}: no scheduler at {settings.root} within {timeout_s} s; start one with DMLC_ROLE=scheduler, "
                    f"or mend DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT ({why})"
                )
            time.sleep(CONNECT_PAUSE_S)

    def _job_of(self, service: RpcService) -> int:
        """What the scheduler calls this job; no other has that number."""
        if self.role == "scheduler":
            service.master_client.tree_node_add(JOB_PATH, str(self.incarnation))
        return int(service.master_client.tree_wait(JOB_PATH, CONNECT_TIMEOUT_S).value)

    @property
    def driver(self) -> Driver:
        """Who makes progress while a thread waits for what comes from other nodes."""
        return self._service._driver

    def _note_change(self, event: object) -> None:
        with self._changed:
            self._changes += 1
            self._changed.notify_all()

    def _wait_for_change(self, seen: int, deadline: float) -> bool:
        """Until a node comes or goes after the `seen`-th change; False when the deadline passes first."""
        with self._changed:
            while self._changes == seen:
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    return False
            return time.monotonic() < deadline

    # -- places --------------------------------------------------------------------------------------------------------

    def add_customer(self, customer_id: int, rank: int = -1, timeout_s: float = START_TIMEOUT_S) -> int:
        """Take a place for that customer; its node id. `rank` is wanted, else the smallest free one is taken.

        Raises ConfigError for a customer that has one, DeadlineExceeded where all are taken for `timeout_s` seconds."""
        with self._guard:
            if customer_id in self.places:
                raise errors.ConfigError(
                    f"customer {customer_id} of this process was started before: finalize() it, or take another id"
                )
            self.places[customer_id] = 0  # being taken
        try:
            node = self._take_place(customer_id, rank, timeout_s)
        except BaseException:
            del self.places[customer_id]
            raise
        with self._guard:
            self.places[customer_id] = node
        return node

    def _take_place(self, customer_id: int, rank: int, timeout_s: float) -> int:
        count = len(self.members(ids.GROUP_OF[self.role]))
        deadline = time.monotonic() + timeout_s
        while True:
            seen = self._changes
            for wanted in [rank] if rank >= 0 else range(count):
                node = ids.node_id(self.role, wanted)
                try:
                    server = self._service.create_server(SERVICE, Endpoint(self, node, self._customer_of(customer_id)), node)
                except errors.Rejected:
                    continue  # a living node has it
                self._leaving.callback(server.close)
                self.is_recovery = self._service.master_client.generate_id(f"{SERVICE} {node}") > 0
                return node
            if not self._wait_for_change(seen, deadline):
                what = ids.name_of(ids.node_id(self.role, rank)) if rank >= 0 else f"each of {count} {self.role}s"
                raise errors.DeadlineExceeded(
                    f"no place for one more {self.role} within {timeout_s} s: {what} is a living node; a larger "
                    f"DMLC_NUM_{self.role.upper()} at every node allows more"
                )

    def _customer_of(self, customer_id: int) -> int:
        """Whose handlers get what is sent to a place: a worker's customers are told apart, elsewhere applications are."""
        return customer_id if self.role == "worker" else 0

    # -- facts -----------------------------------------------------------------------------------------------------------

    @property
    def my_rank(self) -> int:
        """Of the customer that started first. Raises ConfigError before start()."""
        return ids.rank_of(self.node_of(min(self.places, default=0)))

    def node_of(self, customer_id: int) -> int:
        """The node id of that customer. Raises ConfigError where it was not started."""
        node = self.places.get(customer_id, 0)
        if not node:
            raise errors.ConfigError(f"customer {customer_id} was not started in this process: start({customer_id}) comes first")
        return node

    def members(self, group: int) -> tuple[int, ...]:
        """The node ids of a group, or of one node. Raises ConfigError."""
        return ids.members(group, self.settings.servers, self.settings.workers)

    def get_dead_nodes(self, timeout_s: float = CONNECT_TIMEOUT_S) -> list[int]:
        """Ids of those that should be there and are not: not started yet, or found dead. A process that died on the scheduler's
        host is so at once, a silent host after PS_HEARTBEAT_TIMEOUT seconds. Raises DeadlineExceeded."""
        found = self._service.master_client.get_rpc_service_info_of("RpcService", SERVICE, timeout_s)
        living = {server.server_id for server in found.servers} if found is not None else set()
        return [node for node in self.members(ids.ALL) if node not in living]

    def connect(self, nodes: tuple[int, ...], timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until those nodes are there and connected: from then on messages to one of them stay in order.

        Raises DeadlineExceeded with the names of those that are not."""
        deadline = time.monotonic() + timeout_s
        missing = list(nodes)
        while missing:
            seen = self._changes
            self.client.refresh()
            try:
                while missing and missing[0] in self.client.server_ids:
                    self.client.call_to(missing[0], "hello", timeout_s=CONNECT_TIMEOUT_S)
                    del missing[0]
            except (errors.NotSent, errors.MaybeExecuted, errors.UnknownService):
                time.sleep(CONNECT_PAUSE_S)  # it is just coming up, or has died and the master does not know yet
                seen -= 1
            if missing and not self._wait_for_change(seen, deadline):
                names = ", ".join(map(ids.name_of, missing))
                raise errors.DeadlineExceeded(f"not there within {timeout_s} s: {names}; start them, or look why they died")

    # -- barriers ----------------------------------------------------------------------------------------------------------

    def barrier(self, customer_id: int, group: int, timeout_s: float = BARRIER_TIMEOUT_S) -> None:
        """Wait until every node of a group is here.

        Raises ConfigError where this node is not one of them, DeadlineExceeded with the names of those that are missing."""
        node = self.node_of(customer_id)
        expected = self.members(group)
        if node not in expected:
            raise errors.ConfigError(f"{ids.name_of(node)} is not in group {group}, whose barrier it came to")
        if len(expected) > 1:
            names = [ids.name_of(each) for each in expected]
            with self._inside():
                self._service.master_client.barrier(f"{SERVICE} {group}", len(names), timeout_s, ids.name_of(node), names)

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        with self._meeting:
            self._in_barriers += 1
        try:
            yield
        finally:
            with self._meeting:
                self._in_barriers -= 1
                self._meeting.notify_all()

    # -- messages ----------------------------------------------------------------------------------------------------------

    def add_handler(self, kind: str, app_id: int, customer_id: int, handler: Handler) -> None:
        """From now on that application gets its messages: first those that wait. Raises ConfigError where it has a handler."""
        key = kind, app_id, self._customer_of(customer_id)
        with self._guard:
            if key in self._handlers:
                raise errors.ConfigError(
                    f"app {app_id}, customer {customer_id} has a handler of {kind!r} messages in this process"
                )
            self._handlers[key] = handler
        self.driver.reactor.call_soon(partial(self._handle_early, key))  # there, where all others are handled

    def remove_handler(self, kind: str, app_id: int, customer_id: int) -> None:
        """Messages of that application wait again."""
        with self._guard:
            self._handlers.pop((kind, app_id, self._customer_of(customer_id)), None)

    def receive(self, customer_id: int, kind: str, app_id: int, *message: Any) -> Any:
        """One message, in the reactor's thread: the answer, or a Future of it. Raises Backpressure."""
        key = kind, app_id, customer_id
        handler = self._handlers.get(key)
        if handler is not None and key not in self._early:
            return handler(*message)
        nbytes = sum(each.nbytes for each in message if isinstance(each, np.ndarray))
        if self._early_messages >= EARLY_MESSAGES_MAX or self._early_bytes + nbytes > EARLY_BYTES_MAX:
            raise errors.Backpressure(
                f"{self._early_messages} messages of {self._early_bytes} bytes wait for handlers at this {self.role}, this is "
                f"for app {app_id}: make its KVServer or SimpleApp there, and set its request handle"
            )
        answer = Future()
        self._early_messages += 1
        self._early_bytes += nbytes
        self._early.setdefault(key, deque()).append((answer, message))
        return answer

    def _handle_early(self, key: tuple[str, int, int]) -> None:
        """In the reactor's thread; what comes meanwhile waits behind."""
        waiting = self._early.get(key, deque())
        handler = self._handlers.get(key)
        while waiting and handler is not None:
            answer, message = waiting.popleft()
            self._early_messages -= 1
            self._early_bytes -= sum(each.nbytes for each in message if isinstance(each, np.ndarray))
            if answer.finished:
                continue  # given up by its sender
            try:
                follow(answer, handler(*message))
            except Exception as error:
                answer.set_error(error)
        if not waiting:
            self._early.pop(key, None)

    # -- the end -----------------------------------------------------------------------------------------------------------

    def close(self, after_barrier: bool = False) -> None:
        """Leave. `after_barrier` of all: the scheduler stays until the others, who have heard that it is open, have left."""
        with self._meeting:  # another customer of this process may be about to hear of it
            self._meeting.wait_for(lambda: not self._in_barriers, LEAVE_TIMEOUT_S)
        if after_barrier:
            with contextlib.suppress(errors.RpcError):  # the scheduler is gone: nobody waits for us to leave
                if self._master is not None:
                    self._wait_until_others_left()
                else:
                    self._leaving.close()
        self._service.close()
        if self._master is not None:
            self._master.close()

    def _wait_until_others_left(self) -> None:
        deadline = time.monotonic() + LEAVE_TIMEOUT_S
        everybody = len(self.members(ids.ALL))
        while True:
            seen = self._changes
            if len(self.get_dead_nodes()) == everybody - 1:
                return
            if not self._wait_for_change(seen, deadline):
                logger.warning("the scheduler ends with nodes that are still there %s s after the last barrier", LEAVE_TIMEOUT_S)
                return


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host

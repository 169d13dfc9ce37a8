"""This process's place in a job: its node ids, the way to all other nodes, and their barriers.

    state   event                                          next
    new     the scheduler's master answers                 member
    member  a customer starts: node ids of its roles are   one more place for each; what is sent
            free                                           there is answered here
    member  all ids of the role are taken by living nodes  waits until one is free, by the deadline
    any     close()                                        closed: the places are free at once, as
                                                           when the process dies

A place is a role, a customer and an instance. Its node id is the server id of a server of one
service, which the master gives to one living session only: so the id of a process that died is free
when its session is over, and whoever starts next takes it: as often as wanted.

A barrier is one call to the node that holds it, answered when the last one has come: to the
scheduler where it is one of the group, else to the group's first, so that nobody else has to run
for it. When the holder dies, those that wait wait for the next process of its node id, as they do
for any other that died, and come to it again.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from prpc_engine import errors
from prpc_engine.client.retry import AT_ONCE
from prpc_engine.master.master import Master
from prpc_engine.master.opening import LAST_S
from prpc_engine.pslite import ids
from prpc_engine.pslite.barriers import ANY
from prpc_engine.pslite.customer_router import CustomerRouter
from prpc_engine.pslite.endpoint import NodeEndpoint
from prpc_engine.pslite.environment import JobSettings
from prpc_engine.pslite.reliable import Dice, follow
from prpc_engine.service.service import SERVERS_PATH, RpcService
from prpc_engine.service.serving import RpcServer
from prpc_engine.settings.cluster_spec import PS, WORKER
from prpc_engine.settings.config import TIMEOUT_S_MAX
from prpc_engine.settings.node_config import NodeConfig
from shard import ClosedError, Driver, Future, runtime

SERVICE = "pslite"
# whose variables a role reads, beside its own: a joint one serves, and a scheduler checks them
VARIABLES_OF = {"server": PS, ids.JOINT: PS, "scheduler": PS, "worker": WORKER}
JOB_PATH = "/_pslite_"  # in the master's tree: the number of the job, and how many nodes it counts
START_TIMEOUT_S = 60.0  # for the scheduler to listen, for a free place, for servers to be there
BARRIER_TIMEOUT_S = 600.0  # members may have much to do before they come
BARRIER_ANSWER_S = 5.0  # for the holder, which ends a barrier's wait, to say who is missing
# for the others to hear that the last barrier is open, before the scheduler ends
LEAVE_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 5.0  # for one question to the scheduler, or to another node
CONNECT_PAUSE_S = 0.02  # between attempts, as nobody tells us when a port opens
# what is raised where the scheduler does not answer
UNANSWERED = errors.MasterUnreachable, errors.MaybeExecuted, errors.DeadlineExceeded
# What is raised when a node has died, has not come up, or leaves; of what was under way there as it
# left, Cancelled.
GONE = (
    errors.NotSent,
    errors.MaybeExecuted,
    errors.UnknownService,
    errors.Stopping,
    errors.Cancelled,
)

logger = logging.getLogger("prpc")
Place = tuple[str, int, int]  # role, customer id, instance


class Postoffice:
    """The Postoffice is this process's place in a job: node ids, the way to other nodes, barriers.

    Thread-safe. Owned by lifecycle.py, which closes it. States: the table at the file's head.

    timeout_s  for the scheduler to answer, in seconds
    left_job   number of the job that this process has left: its scheduler may still listen for a
               moment, and is not taken
    answer_s   for who holds a barrier, and ends its wait, to say who is missing, in seconds

    make_service: how it joins the scheduler's cluster

    Raises ConfigError, AddressInUse (the scheduler's address is taken), MasterUnreachable (no
    scheduler in timeout_s seconds).
    """

    def __init__(
        self,
        settings: JobSettings,
        timeout_s: float = START_TIMEOUT_S,
        left_job: int = 0,
        *,
        answer_s: float = BARRIER_ANSWER_S,
        make_service: Callable[..., RpcService] = RpcService,
    ) -> None:
        self.settings = settings
        self._answer_s, self._make_service = answer_s, make_service
        self.role = settings.role
        self.key_ranges = ids.key_ranges(settings.servers)
        self.incarnation = runtime.randbits(63) | 1
        self.job = 0
        self.customers = itertools.count()  # numbers of Customer objects
        self.is_recovery = False
        self._places: dict[Place, int] = {}  # node ids; 0: being taken
        self._customer_routers: dict[int, CustomerRouter] = {}  # by node id
        self._endpoints: dict[int, NodeEndpoint] = {}
        self._servers: dict[int, RpcServer] = {}
        self._passed: dict[tuple[int, int], int] = {}  # barriers, by customer and group
        self._on_close: list[Callable[[], object]] = []
        # of _places, and of what is expected: any thread makes customers
        self._guard = runtime.Lock()
        self._meeting = runtime.Condition()  # of _in_barriers: who leaves waits for those inside
        self._in_barriers = 0
        self._expects_requests = False
        self._changed = runtime.Condition()  # a node came or went
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
            self.client = self._service.create_client(SERVICE, expected_servers=0, retry=AT_ONCE)
            # what came before is not missed: whoever waits for a change asks the scheduler first
            self._service.master_client.tree_watch(f"{SERVERS_PATH}/{SERVICE}", self._note_change)
        except BaseException:
            self.close()
            raise

    def _join(self, left_job: int, timeout_s: float) -> RpcService:
        """Connect to the scheduler, as soon as there is one of another job than `left_job`."""
        settings = self.settings
        config = self._node_config()
        deadline = runtime.monotonic() + timeout_s
        while True:
            # all that is left, so that the log says once, and truly, for how long this waits
            left_s = max(CONNECT_PAUSE_S, min(deadline - runtime.monotonic(), TIMEOUT_S_MAX))
            try:
                service = self._make_service(str(settings.root), config, timeout_s=left_s)
            except errors.MasterUnreachable as error:
                why = str(error)
            else:
                try:
                    self.job, counts = self._job_of(service)
                except errors.RpcError as error:
                    why = str(error)
                else:
                    if self.job != left_job:
                        self._check_counts(counts, service)
                        return service
                    why = "the one there is about to end, with the job that this process has left"
                service.close()
            if deadline - runtime.monotonic() <= LAST_S:  # a session's last attempt was made
                raise errors.MasterUnreachable(
                    f"{self.role}: no scheduler at {settings.root} within {timeout_s} s; "
                    "start one with DMLC_ROLE=scheduler, "
                    f"or mend DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT ({why})"
                )
            runtime.sleep(CONNECT_PAUSE_S)

    def _node_config(self) -> NodeConfig:
        """What this node is told: by DMLC_* and PS_*, above the variables of its role and of every
        node. Raises ConfigError.
        """
        settings = self.settings
        config = NodeConfig.load(
            VARIABLES_OF[self.role],
            bind=f"{_bracketed(settings.host)}:{settings.port}",
            transports=settings.transports,
            lease_s=settings.dead_after_s,
            polling=settings.polling or None,
        )
        if self.role == "scheduler":  # it serves no keys: a core of its own would serve nobody
            config = config.override(shards=0, polling=settings.polling, pin_cores=False)
        if config.shards.count:
            logger.warning(
                "%s: a %s of ps-lite has no shards, as its handles use what the process holds: "
                "start "
                "more servers, or give KVServer handler_threads",
                config.origins["shards.count"],
                self.role,
            )
            config = config.override(shards=0)
        # one lane: messages of one worker to one server stay in order
        return config.limited_to(replace(config.limits, connections_per_peer=1))

    @property
    def _counts(self) -> tuple[int, ...]:
        return self.settings.servers, self.settings.workers, self.settings.group_size

    def _job_of(self, service: RpcService) -> tuple[int, tuple[int, ...]]:
        """What the scheduler calls this job, which no other is called; its _counts."""
        if self.role == "scheduler":
            # an attempt before this one got no answer, or no further
            with contextlib.suppress(errors.NodeExists):
                service.master_client.tree_node_add(
                    JOB_PATH, " ".join(map(str, (self.incarnation, *self._counts)))
                )
        number, *counts = map(
            int, service.master_client.tree_wait(JOB_PATH, CONNECT_TIMEOUT_S).value.split()
        )
        return number, tuple(counts)

    def _check_counts(self, theirs: tuple[int, ...], service: RpcService) -> None:
        """Nodes that count differently would send one key to different servers.
        Raises ConfigError.
        """
        if theirs != self._counts:
            service.close()
            names = "DMLC_NUM_SERVER", "DMLC_NUM_WORKER", "DMLC_GROUP_SIZE"
            wrong = [
                f"{name} is {own} here and {their} at the scheduler"
                for name, own, their in zip(names, self._counts, theirs, strict=True)
                if own != their
            ]
            raise errors.ConfigError(
                f"{'; '.join(wrong)} ({self.settings.root}): all nodes of a job need the same"
            )

    @property
    def driver(self) -> Driver:
        """Who makes progress while a thread waits for what comes from other nodes."""
        return self._service.driver

    def _note_change(self, event: object) -> None:
        with self._changed:
            self._changes += 1
            self._changed.notify_all()

    def _wait_for_change(self, seen: int, deadline: float) -> bool:
        """Until a node comes or goes after the `seen`-th change; False when the deadline passes
        first.
        """
        with self._changed:
            while self._changes == seen:
                if not self._changed.wait(_left_s(deadline)):
                    return False
            return runtime.monotonic() < deadline

    # -- places ------------------------------------------------------------------------------------

    def add_customer(
        self, customer_id: int, rank: int = -1, timeout_s: float = START_TIMEOUT_S
    ) -> int:
        """Take the places of that customer, one for each role and instance; the node id of the
        first. `rank` is wanted, else the smallest free one is taken.

        Raises ConfigError for a customer that has one, DeadlineExceeded where all are taken for
        `timeout_s` seconds, Rejected for what else the scheduler refuses."""
        instances = 1 if self.role == "scheduler" else self.settings.group_size
        places = [
            (role, customer_id, instance)
            for role in self.settings.roles
            for instance in range(instances)
        ]
        with self._guard:
            if places[0] in self._places:
                raise errors.ConfigError(
                    f"customer {customer_id} of this process was started before: finalize() it, "
                    "or take another id"
                )
            self._places.update(dict.fromkeys(places, 0))
        deadline = runtime.monotonic() + timeout_s
        try:
            for place in places:
                node = self._take_place(place, rank, deadline, timeout_s)
                with self._guard:
                    self._places[place] = node
        except BaseException:
            with self._guard:
                taken = [self._places.pop(place) for place in places]
            for node in filter(None, taken):
                self._give_back(node)
            raise
        with self._guard:
            if self.role == "worker" and not self._expects_requests:
                self.driver.prompt = False  # it asks, and is hardly ever asked
        return self._places[places[0]]

    def _take_place(self, place: Place, rank: int, deadline: float, timeout_s: float) -> int:
        role, _, instance = place
        size = self.settings.group_size
        count = len(self.members(ids.GROUP_OF[role]))
        while True:
            seen = self._changes
            for wanted in [rank * size + instance] if rank >= 0 else range(count):
                node = ids.node_id(role, wanted)
                customer_router = CustomerRouter(ids.name_of(node), self.driver.reactor)
                settings = self.settings
                dice = (
                    Dice(settings.drop_percent, settings.drop_seed, node)
                    if settings.drop_percent
                    else None
                )
                endpoint = NodeEndpoint(customer_router, self.driver.reactor, self.members, dice)
                try:
                    server = self._service.create_server(
                        SERVICE, endpoint, node, inline=True, timeout_s=_left_s(deadline)
                    )
                except errors.NodeExists:
                    continue  # a living node has it
                except UNANSWERED as error:
                    raise self._scheduler_lost(role, error) from error
                self._customer_routers[node], self._endpoints[node] = customer_router, endpoint
                self._servers[node] = server
                try:
                    counted = self._service.master_client.count_up(
                        f"{SERVICE} {node}", _left_s(deadline)
                    )
                except BaseException as error:
                    self._give_back(node)
                    if isinstance(error, UNANSWERED):
                        raise self._scheduler_lost(role, error) from error
                    raise
                if counted > 0:
                    self.is_recovery = True
                return node
            if not self._wait_for_change(seen, deadline):
                what = (
                    ids.name_of(ids.node_id(role, rank))
                    if rank >= 0
                    else f"each of {count} {role}s"
                )
                more = (
                    f"a larger DMLC_NUM_{role.upper()} at every node allows more"
                    if role != "scheduler"
                    else "a job has one"
                )
                raise errors.DeadlineExceeded(
                    f"no place for one more {role} within {timeout_s} s: {what} is a living node; "
                    f"{more}"
                )

    def _scheduler_lost(self, role: str, error: Exception) -> errors.MasterUnreachable:
        return errors.MasterUnreachable(
            f"the scheduler at {self.settings.root} did not answer in time, where this {role} took "
            f"its place: look whether it ended ({error})"
        )

    def _give_back(self, node: int) -> None:
        """Somebody else may take that node id."""
        del self._customer_routers[node], self._endpoints[node]
        self._servers.pop(node).close()

    # -- facts -------------------------------------------------------------------------------------

    @property
    def my_rank(self) -> int:
        """Of the customer that started first, within its (first) role. Raises ConfigError before
        start().
        """
        role, places = self.settings.roles[0], self._places.copy().items()
        first = min(
            (place for place, node in places if node and place[0] == role), default=(role, 0, 0)
        )
        return ids.rank_of(self.node_of(first[1])) // self.settings.group_size

    def node_of(self, customer_id: int, role: str | None = None, instance: int = 0) -> int:
        """The node id of that customer; of a joint process's `role`, "server" or "worker". Raises
        ConfigError where it was not started."""
        role = role or self.settings.roles[0]
        node = self._places.get((role, customer_id, instance), 0)
        if not node:
            # a place that is being taken has no node yet
            if self._places.get((role, customer_id, 0)):
                raise errors.ConfigError(
                    f"instance {instance} of {self.settings.group_size} (DMLC_GROUP_SIZE): "
                    "they begin with 0"
                )
            raise errors.ConfigError(
                f"customer {customer_id} was not started in this process: start({customer_id}) "
                "comes first"
            )
        return node

    def expect_requests(self) -> None:
        """Others ask this process, whatever its threads do: somebody must always listen, which
        costs each wait a thread switch. Of a worker where nobody expects them, requests may wait
        for the engine's STANDBY_S, 20 ms."""
        with self._guard:
            self._expects_requests = True
            self.driver.take_over()

    def customer_router(self, node: int) -> CustomerRouter:
        """That of one of this process's node ids."""
        return self._customer_routers[node]

    def on_close(self, callback: Callable[[], object]) -> None:
        """Run callback() when this process leaves, while others can still be answered."""
        self._on_close.append(callback)

    def members(self, group: int) -> tuple[int, ...]:
        """The node ids of a group, or of one node; of all instances. Raises ConfigError."""
        size = self.settings.group_size
        return ids.members(group, self.settings.servers * size, self.settings.workers * size)

    def peers(self, group: int, instance: int) -> tuple[int, ...]:
        """members() of a group that an instance talks to: those of its own number."""
        size = self.settings.group_size
        every = self.members(group)
        return (
            every
            if size == 1
            else tuple(x for x in every if x == ids.SCHEDULER or ids.rank_of(x) % size == instance)
        )

    def process_of(self, node: int) -> int:
        """The node id that this one would have if there was one instance in each process."""
        return ids.node_id(ids.role_of(node), ids.rank_of(node) // self.settings.group_size)

    def get_dead_nodes(self, timeout_s: float = CONNECT_TIMEOUT_S) -> list[int]:
        """Ids of those that should be there and are not: not started yet, or found dead. A process
        that died on the scheduler's host is so at once, a silent host after PS_HEARTBEAT_TIMEOUT
        seconds. Raises DeadlineExceeded."""
        found = self._service.master_client.get_rpc_service_info_of(
            "RpcService", SERVICE, timeout_s
        )
        living = {server.server_id for server in found.servers} if found is not None else set()
        return [node for node in self.members(ids.ALL) if node not in living]

    def connect(self, nodes: tuple[int, ...], timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until those nodes are there and connected: from then on messages to one of them stay
        in order.

        Raises DeadlineExceeded with the names of those that are not."""
        deadline = runtime.monotonic() + timeout_s
        missing = list(nodes)
        while missing:
            seen = self._changes
            try:
                self.client.refresh()
                while missing and missing[0] in self.client.server_ids:
                    left_s = min(
                        CONNECT_TIMEOUT_S, max(CONNECT_PAUSE_S, deadline - runtime.monotonic())
                    )
                    self.client.call_to(missing[0], "hello", timeout_s=left_s)
                    del missing[0]
            except errors.MasterUnreachable:
                raise
            except (*GONE, errors.DeadlineExceeded):
                # It is just coming up, or has died, or leaves, and the master does not know yet; or
                # it, or the scheduler, stands still for longer than one attempt.
                runtime.sleep(CONNECT_PAUSE_S)
                seen -= 1
            if missing and not self._wait_for_change(seen, deadline):
                names = ", ".join(map(ids.name_of, missing))
                raise errors.DeadlineExceeded(
                    f"not there within {timeout_s} s: {names}; start them, or look why they died"
                )

    # -- barriers ----------------------------------------------------------------------------------

    def barrier(self, customer_id: int, group: int, timeout_s: float = BARRIER_TIMEOUT_S) -> None:
        """Wait until every node of a group is here: all places of this customer that belong to it
        come at once.

        Raises ConfigError where this node is not one of them, DeadlineExceeded with the names of
        those that are missing, MasterUnreachable where the scheduler was to hold it and is lost."""
        first = self.node_of(customer_id)
        expected = self.members(group)
        nodes = [
            node
            for (_, customer, _), node in self._places.copy().items()
            if customer == customer_id and node in expected
        ]
        if not nodes:
            raise errors.ConfigError(
                f"{ids.name_of(first)} is not in group {group}, whose barrier it came to"
            )
        if len(nodes) == len(expected):
            return
        passed = self._passed.get((customer_id, group), 0)
        with self._inside():
            missing = self._meet(
                group,
                expected,
                nodes,
                runtime.monotonic() + timeout_s,
                ANY if self.is_recovery else passed,
            )
        if missing:
            raise errors.DeadlineExceeded(
                f"the barrier of group {group} did not open within {timeout_s} s: "
                f"{len(expected) - len(missing)} of "
                f"{len(expected)} arrived; missing: {', '.join(map(ids.name_of, missing))}"
            )
        self._passed[customer_id, group] = passed + 1

    def _meet(
        self,
        group: int,
        expected: Sequence[int],
        nodes: Sequence[int],
        deadline: float,
        passed: int,
    ) -> Sequence[int]:
        """Come to the node that holds that barrier; who is missing when the deadline has passed, or
        nobody.
        """
        holder = expected[0]
        while True:
            patience_s = _left_s(deadline)
            endpoint = self._endpoints.get(holder)
            try:
                if endpoint is not None:
                    return self._meet_here(endpoint, group, nodes, patience_s, passed)
                if holder not in self.client.server_ids:
                    self.connect((holder,), patience_s)
                missing: Sequence[int] = self.client.call_to(
                    holder,
                    "barrier",
                    group,
                    nodes,
                    patience_s,
                    passed,
                    timeout_s=patience_s + self._answer_s,
                )
                return missing
            except GONE as error:
                if holder == ids.SCHEDULER:
                    raise errors.MasterUnreachable(
                        f"the scheduler at {self.settings.root} was lost while the barrier of "
                        f"group {group} waited there, and "
                        f"the job with it: look why it ended ({error})"
                    ) from error
                logger.info(
                    "%s, which holds the barrier of group %d, is lost: %s",
                    ids.name_of(holder),
                    group,
                    str(error),
                )
                with contextlib.suppress(errors.DeadlineExceeded):
                    self.connect((holder,), _left_s(deadline))
                    continue
                return (holder,)
            except TimeoutError:  # DeadlineExceeded, too
                return (holder,)

    def _meet_here(
        self,
        endpoint: NodeEndpoint,
        group: int,
        nodes: Sequence[int],
        patience_s: float,
        passed: int,
    ) -> Sequence[int]:
        """The same where this process holds it."""
        opened = Future(self.driver)
        self.driver.reactor.call_soon(
            lambda: follow(opened, endpoint.barrier(group, nodes, patience_s, passed))
        )
        try:
            missing: Sequence[int] = opened.result(patience_s + self._answer_s)
        except ClosedError:
            raise errors.Closed(
                f"the barrier of group {group} had not opened when this process left the job"
            ) from None
        return missing

    def waiting(self, group: int) -> set[int]:
        """Who waits in a barrier that this process holds."""
        return set().union(
            *(endpoint.meetings.waiting(group) for endpoint in list(self._endpoints.values()))
        )

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

    # -- the end -----------------------------------------------------------------------------------

    def close(self, after_barrier: bool = False) -> None:
        """Leave. `after_barrier` of all: the scheduler stays until the others, who have heard that
        it is open, have left.
        """
        for callback in self._on_close:
            callback()
        with self._meeting:  # another customer of this process may be about to hear of it
            self._meeting.wait_for(lambda: not self._in_barriers, LEAVE_TIMEOUT_S)
        if after_barrier:
            # the scheduler is gone: nobody waits for us to leave
            with contextlib.suppress(errors.RpcError):
                if self._master is not None:
                    self._wait_until_others_left()
                else:
                    for server in list(self._servers.values()):
                        server.close()
        self._service.close()
        self._note_change(None)  # who waits for nodes finds out
        if self._master is not None:
            self._master.close()

    def _wait_until_others_left(self) -> None:
        deadline = runtime.monotonic() + LEAVE_TIMEOUT_S
        everybody = len(self.members(ids.ALL))
        while True:
            seen = self._changes
            if len(self.get_dead_nodes()) == everybody - 1:
                return
            if not self._wait_for_change(seen, deadline):
                logger.warning(
                    "the scheduler ends with nodes that are still there %s s after the last "
                    "barrier",
                    LEAVE_TIMEOUT_S,
                )
                return


def _left_s(deadline: float) -> float:
    return max(0.0, deadline - runtime.monotonic())


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host

"""A client whose servers, connections, master and time are the test's: nothing happens by itself,
and all of it in one thread.

    themselves         the client, its dispatcher, directory and pending requests, peers over
                       memory connections, servers
    the node           `Nodes`: who is to be connected waits for the test to say how that ends
    the control loop   `ManualLoop`: a reactor that the test turns, as those of both sides
    the master         `World.looks`: who asks it waits for the test to answer
    a clock            stands still until the test moves it
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from random import Random
from typing import Any, cast

from prpc_engine import Deferred, RpcClient, errors, idempotent, once
from prpc_engine.archive import Archive
from prpc_engine.client.hedge import HedgePolicy
from prpc_engine.client.hedging import HedgingClient
from prpc_engine.client.retry import RetryPolicy
from prpc_engine.client.route import Route, Sought
from prpc_engine.master.registry import ServerEntry
from prpc_engine.node.node import Node
from prpc_engine.rpc.call import NEVER, Call
from prpc_engine.rpc.marks import marks_of
from prpc_engine.rpc.paths import Refusal
from prpc_engine.rpc.peer import Peer
from prpc_engine.rpc.server import Bounds, ServedObject
from prpc_engine.rpc.stream import Stream
from shard import VALUE, Future, Limits, PeerLostError, Reactor, Slab, Task
from shard.transport.memory import MemoryConnection, Weather, pair
from tests.helpers import ManualClock
from tests.prpc_engine.inside import dispatcher_of, routes_of

SERVICE = "test"
CALLER = 1 << 40  # the client's incarnation, and its name at each server
FIRST_TARGET = 16
# small, so that a few requests come to them
LIMITS = Limits(outbox_messages_max=3, calls_in_flight_max=5)
BOUNDS = Bounds(tasks_max=2, queue_calls_max=1)
AT_ONCE = ("plain", "again")  # run as they arrive
TURNS_MAX = 10_000  # more than anything here takes
HEALED_S = 120.0  # in which everything ends once all is well: UNSENT_S_MAX and some
STEP_S = 0.25
LATE_S = 0.001  # a peer looks for calls that are late a little later, for each that it has


class Asked:
    """A request of the test, and what became of it.

    call            its future; None: of a notification
    due_first, due  its deadline counts from when it was sent, which lies in between where its
                    thread stood still
    is_fresh        it went to a server that was known when it was asked, and keeps its order
    ran             the processes that have run it, in order
    """

    def __init__(self, number: int, method: str, server_id: int | None, due_first: float) -> None:
        self.number, self.method, self.server_id = number, method, server_id
        self.due_first, self.due, self.ended_at = due_first, NEVER, 0.0
        self.call: Call | None = None
        self.is_fresh = False
        self.ran: list[Process] = []
        self.ends = 0
        self.error: BaseException | None = None
        self.value: object = None

    @property
    def is_open(self) -> bool:
        """Whether it has no outcome yet."""
        return self.call is not None and not self.call.finished

    def __repr__(self) -> str:
        return f"{self.method}({self.number}) of {self.server_id}"


class Handlers:
    """What a server serves: it notes what runs, and answers when the test says so."""

    def __init__(self, process: Process, ran: Callable[[Process, int], None]) -> None:
        self._process, self._ran = process, ran
        self.answers: list[tuple[int, Deferred]] = []

    def _take(self, number: int) -> Deferred:
        self._ran(self._process, number)
        answer = Deferred()
        self.answers.append((number, answer))
        return answer

    def plain(self, number: int) -> Deferred:
        return self._take(number)

    @idempotent
    def again(self, number: int) -> Deferred:
        return self._take(number)

    @once
    def single(self, number: int) -> Deferred:
        return self._take(number)

    def hear(self, number: int) -> None:
        self._ran(self._process, number)

    def flow(self, number: int) -> Iterator[int]:
        self._ran(self._process, number)
        yield number


class Process:
    """A server in a process of its own, as the client sees it."""

    def __init__(self, world: World, server_id: int, number: int) -> None:
        self.server_id, self.incarnation = server_id, number
        self.target = FIRST_TARGET + number
        self.address = f"memory://{number}"
        self.is_alive = True
        self.handlers = Handlers(self, world.has_run)
        self.served = ServedObject(SERVICE, server_id, self.target, self.handlers, BOUNDS)
        self.servers = {self.target: self.served}
        self.links: list[Link] = []

    def entry(self, is_marked: bool) -> ServerEntry:
        """What the master says of it."""
        marks = marks_of(self.served.describe()) if is_marked else None
        return ServerEntry(
            SERVICE, self.server_id, self.target, self.server_id, (self.address,), marks
        )

    def open_answers(self) -> list[tuple[int, Deferred]]:
        """What waits to be answered."""
        return [each for each in self.handlers.answers if not each[1].done()]

    def withdraw(self) -> None:
        """It does not serve that any more, and its process goes on."""
        self.servers.pop(self.target, None)

    def kill(self) -> None:
        """Nothing of it runs from now on."""
        self.is_alive = False
        for link in self.links:
            link.cut(is_here=False)
        for _, answer in self.open_answers():
            answer.cancel()


class ManualLoop:
    """In the place of the control loop: its coroutines run when the test turns it."""

    def __init__(self, clock: ManualClock) -> None:
        self.reactor = Reactor(clock, hosts_asyncio=False)
        self.is_short = False  # of threads, or descriptors

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> Task:
        """As ControlLoop.spawn()."""
        if self.is_short:
            coroutine.close()
            raise RuntimeError("can't start new thread")
        task = Task(coroutine=coroutine, schedule=self.reactor.call_soon, reactor=self.reactor)
        self.reactor.call_soon(task.step)
        return task


class Link:
    """A connection of the client to a process: the end at either side."""

    def __init__(self, nodes: Nodes, process: Process, number: int) -> None:
        self.process = process
        self._weather = Weather()
        here, there = pair(LIMITS, nodes.slab, self._weather)
        here.peer_incarnation, here.known_as = process.incarnation, CALLER
        there.peer_incarnation = there.peer_name = CALLER
        nodes.watch_sends(here)
        self.ours = Peer(
            here, nodes.reactor, None, {}, nodes.lost, Archive(in_process=True), None, number
        )
        self.theirs = Peer(
            there,
            nodes.serving,
            None,
            process.servers,
            _ignore,
            Archive(in_process=True),
            None,
            number,
        )
        here.attach(nodes.reactor)
        there.attach(nodes.serving)
        self._ends = here, there

    def cut(self, is_here: bool = True) -> None:
        """One side finds that it is lost; the other one hears of that."""
        self._ends[not is_here].close(PeerLostError("it was cut"))

    def clog(self) -> None:
        """Nobody reads."""
        self._weather.clogged = True

    def unclog(self) -> None:
        """Both do again."""
        for end in self._ends:
            end.unclog()


def _ignore(peer: Peer) -> None:
    """A server need not know who is gone."""


class Nodes:
    """In the place of the client's node: it connects to what the test says is there."""

    waiter = None
    limits = LIMITS

    def __init__(self, world: World) -> None:
        self._world = world
        self.reactor, self.serving = world.calling, world.serving
        self.archive = Archive(in_process=True)
        self.slab = Slab()
        self.connected: dict[str, Peer] = {}
        self.wishes: list[tuple[str, Future]] = []  # address, and who waits for its peer
        self._made: list[Link] = []

    def check_process(self) -> None:
        """It is no fork."""

    def control_loop(self) -> ManualLoop:
        """Which the test turns."""
        return self._world.control

    def wait_until(self, future: Future, deadline: float | None) -> bool:
        raise AssertionError(f"the test's thread would wait for {future}")

    def is_local(self, addresses: tuple[str, ...]) -> bool:
        return False

    def peers(self) -> list[Peer]:
        return list(self.connected.values())

    def near_peer(self, addresses: tuple[str, ...]) -> Peer | None:
        peer = self.connected.get(addresses[0])
        return peer if peer is not None and not peer.lost else None

    async def reach(self, addresses: tuple[str, ...], timeout_s: float, asked: str) -> Peer:
        """Connected, or as the test says, within that time."""
        peer = self.near_peer(addresses)
        if peer is not None:
            return peer
        wish = Future()
        self.wishes.append((addresses[0], wish))
        late = self._world.control.reactor.call_later(
            timeout_s, partial(wish.set_error, errors.NotSent(f"{asked}: nobody answered"))
        )
        try:
            peer = await wish
        finally:
            late.cancel()
        return peer

    def connect(self, process: Process) -> Peer:
        """One more connection to that process, by whomever; this end of it."""
        link = Link(self, process, len(self._made))
        self._made.append(link)
        process.links.append(link)
        self.connected[process.address] = link.ours
        return link.ours

    @property
    def links(self) -> list[Link]:
        """Those that are not lost."""
        return [link for link in self._made if not link.ours.lost]

    def watch_sends(self, connection: MemoryConnection) -> None:
        """The world hears of each message that a thread is about to send over it."""
        send = connection.send

        def begin_to_send(*message: Any) -> None:
            self._world.stand_still()
            send(*message)

        connection.send = begin_to_send  # type: ignore[method-assign]

    def lost(self, peer: Peer) -> None:
        """Its connection is over."""
        for address, one in list(self.connected.items()):
            if one is peer:
                del self.connected[address]


class World:
    """The client, and all that it meets.

    listed      server id -> process: what the master says
    looks       who waits for its answer
    processes   all there ever were
    asked       all requests, by number
    wrong       what handlers saw that must not be
    standing    run while a thread stands still between entering a request and sending it: set by
                the test, for the next one
    """

    def __init__(
        self,
        seed: int = 0,
        balance: str = "least_outstanding",
        retry: RetryPolicy | None = None,
        is_marked: bool = True,
        hedge: HedgePolicy | None = None,
        servers: int = 2,
    ) -> None:
        self.clock = ManualClock()
        self.calling, self.serving = Reactor(self.clock), Reactor(self.clock)
        self.control = ManualLoop(self.clock)
        self.nodes = Nodes(self)
        self.is_marked = is_marked
        self.listed: dict[int, Process] = {}
        self.looks: list[Future] = []
        self.processes: list[Process] = []
        self.asked: list[Asked] = []
        self.standing: Callable[[], object] | None = None
        self.wrong: list[str] = []
        self._turning = False
        self._newest: dict[Route, int] = {}
        self._streams: list[Stream] = []  # one that is dropped is cancelled
        for server_id in range(servers):
            self.start(server_id)
        settings = (
            SERVICE,
            cast(Node, self.nodes),
            self.entries(),
            self._look_up,
            balance,
            retry,
            (),
            Random(seed),
        )
        self.client = (
            RpcClient(*settings) if hedge is None else HedgingClient(*settings, hedge=hedge)
        )
        self.dispatcher = dispatcher_of(self.client)

    # -- the master --------------------------------------------------------------------------------

    def entries(self) -> list[ServerEntry]:
        """Of those that are listed."""
        return [process.entry(self.is_marked) for process in self.listed.values()]

    async def _look_up(self) -> list[ServerEntry]:
        look = Future()
        self.looks.append(look)
        entries: list[ServerEntry] = await look
        return entries

    def answer_look(self, error: BaseException | None = None) -> None:
        """The master answers the look under way, as it knows things now."""
        for look in self.looks:
            if error is None:
                look.set_result(self.entries())
            else:
                look.set_error(error)
        self.looks.clear()

    # -- servers -----------------------------------------------------------------------------------

    def start(self, server_id: int) -> Process:
        """A new process, which the master lists under that id from now on."""
        process = Process(self, server_id, len(self.processes))
        self.processes.append(process)
        self.listed[server_id] = process
        return process

    def has_run(self, process: Process, number: int) -> None:
        """A handler was called: `wrong` says if it may not have been, as what a handler raises is
        told to its caller.
        """
        asked = self.asked[number]
        asked.ran.append(process)
        if not process.is_alive:
            self.wrong.append(f"{asked} ran in a process that was killed")
        if asked.server_id not in (None, process.server_id):
            self.wrong.append(f"{asked} ran at server {process.server_id}")
        if isinstance(asked.error, errors.NotSent | errors.Rejected):
            self.wrong.append(f"{asked} ran, and was said never to have: {asked.error!r}")
        if asked.method != "again" and len(asked.ran) > 1:
            self.wrong.append(f"{asked} ran again, and is not idempotent")
        call = asked.call
        if call is None or len(asked.ran) > 1 or not asked.is_fresh or call.state is not None:
            return  # else it has not failed before
        if asked.method not in AT_ONCE:
            return  # it may have waited there
        route = call.asked[1]
        if route.target == process.target:
            if self._newest.get(route, -1) > number:
                self.wrong.append(f"{asked} was overtaken on its way")
            self._newest[route] = number

    # -- requests ----------------------------------------------------------------------------------

    def ask(
        self, method: str, server_id: int | None = None, timeout_s: float | None = None
    ) -> Asked:
        """Send a request, by the verb for that method. Raises as that does."""
        limit_s = NEVER if timeout_s is None else timeout_s
        asked = Asked(len(self.asked), method, server_id, self.clock.now + limit_s)
        self.asked.append(asked)  # it may run before the verb returns
        try:
            call = asked.call = self._send(method, server_id, asked.number, timeout_s)
        except errors.RpcError as error:
            asked.error = error
            raise
        asked.due = self.clock.now + limit_s
        if call is not None:
            # what another thread asks meanwhile comes before or after it
            is_alone = asked is self.asked[-1]
            asked.is_fresh = is_alone and not isinstance(call.asked[1], Sought)
            call.when_done(partial(self._ended, asked))
        return asked

    def _send(
        self, method: str, server_id: int | None, number: int, timeout_s: float | None
    ) -> Call | None:
        client = self.client
        if method == "hear":
            if server_id is None:
                client.notify(method, number)
            else:
                client.notify_to(server_id, method, number)
            return None
        if method == "flow":
            stream = (
                client.stream(method, number, timeout_s=timeout_s)
                if server_id is None
                else client.stream_to(server_id, method, number, timeout_s=timeout_s)
            )
            self._streams.append(stream)
            return stream.call
        if server_id is None:
            return client.submit(method, number, timeout_s=timeout_s)
        return client.submit_to(server_id, method, number, timeout_s=timeout_s)

    def _ended(self, asked: Asked, call: Future) -> None:
        asked.ends += 1
        asked.ended_at = self.clock.now
        asked.error = call.error()
        if call.finished == VALUE:
            asked.value = call.result()

    @property
    def open(self) -> list[Asked]:
        """Those without an outcome."""
        return [each for each in self.asked if each.is_open]

    def stand_still(self) -> None:
        """A thread is about to send: what the test wants to happen meanwhile, once. A thread that
        turns the reactor is not met there by another one that does.
        """
        meanwhile = self.standing
        if meanwhile is not None and not self._turning:
            self.standing = None
            meanwhile()

    # -- what happens ------------------------------------------------------------------------------

    def turn(self, *reactors: Reactor) -> None:
        """Until these have nothing to do; all by default."""
        for _ in range(TURNS_MAX):
            turned = reactors or (self.calling, self.control.reactor, self.serving)
            if not sum(map(self.turn_once, turned)):
                return
        raise AssertionError("there is always something to do")

    def turn_once(self, reactor: Reactor) -> int:
        """One turn of it; how much was done."""
        outer, self._turning = self._turning, reactor is self.calling
        try:
            return reactor.poll(self.clock.now)
        finally:
            self._turning = outer

    def advance(self, seconds: float) -> None:
        """Time passes, and what is due then happens."""
        self.clock.advance(seconds)
        self.turn()
        for asked in self.open:
            assert asked.due > self.clock.now - LATE_S, f"{asked} is late"

    def connect(self, error: Exception | None = None) -> Peer | None:
        """The oldest attempt to connect ends: with that error, or as the server is there or not.
        None: there is no attempt, or it failed.
        """
        while self.nodes.wishes:
            address, wish = self.nodes.wishes.pop(0)
            if wish.finished:  # its time was over
                continue
            process = next(each for each in self.processes if each.address == address)
            if error is None and process.is_alive:
                peer = self.nodes.near_peer((address,)) or self.nodes.connect(process)
                wish.set_result(peer)
                return peer
            refused = errors.NoPath("it was refused", [Refusal("memory", "nobody", True)])
            wish.set_error(error or refused)
            return None
        return None

    def heal(self) -> None:
        """All is well from now on: whatever is asked ends."""
        self.standing = None
        self.control.is_short = False
        for server_id, process in list(self.listed.items()):
            if not process.is_alive:
                del self.listed[server_id]
        for link in self.nodes.links:
            link.unclog()
        self.client.servers_changed()
        until = self.clock.now + HEALED_S
        while self.clock.now < until:
            self.go_on()
            for process in self.processes:
                for number, answer in process.open_answers():
                    answer.reply(number)
            self.advance(STEP_S)
            if not (self.dispatcher.held or self.open or self.looks or self.nodes.wishes):
                return
        raise AssertionError(f"{self.dispatcher.held} are held, and {self.open} never end")

    def go_on(self) -> None:
        """Whoever waits for the master or a connection has it, and what follows happens."""
        self.turn()
        while self.looks or self.nodes.wishes:
            self.answer_look()
            self.connect()
            self.turn()

    def check_that_nothing_is_left(self) -> None:
        """Of requests that have all ended."""
        assert not self.wrong, self.wrong
        assert not self.open
        assert (self.dispatcher.held, self.dispatcher.waiting) == (0, 0)
        assert self.dispatcher.connectors == 0
        for route in routes_of(self.client).values():
            assert not len(route.queue) and not route.queue.is_busy
        assert not any(peer.calls.in_flight for peer in self.nodes.peers())

    def close(self) -> None:
        """Hang up, and let go of everything."""
        self.client.close()
        for process in self.processes:
            process.kill()
        for wish in [each for _, each in self.nodes.wishes] + self.looks:
            wish.set_error(errors.NotSent("the test is over"))
        self.standing = None
        self.turn()
        self.clock.advance(1000.0)
        self.turn()
        reactors = (self.calling, self.control.reactor, self.serving)
        left = [len(reactor.timers) for reactor in reactors]
        for reactor in reactors:
            reactor.close()
        self.nodes.slab.close()
        assert left == [0, 0, 0], "timers of what has ended"

"""Workers of a group without a world size that call each other's functions and pass references on,
leave, are killed and come again, at a master of its own (docs/guides/remote.md).

    operation         promise                                     how it is checked
    any verb          ends by its deadline: an answer, what the   virtual time; the types of errors
                       function raised, or an error of the
                       engine's that is a RuntimeError
    a function        runs once at most; answered: it has run;    runs counted outside of all
                       UnknownWorker, NotSent: it has not          processes, by number
    an answer         is that of the function that was called     by number
    a value           is there for a worker that refers to it,    ValueGone comes only where one of
                       while neither takes the other for dead      those that it was passed by, or
                                                                   the owner, was taken for dead
    freed             once no worker refers to it                 in the end: statistics(), and what
                                                                   is left of the objects; not of
                                                                   values in calls that failed, nor
                                                                   where owner or holder was taken
                                                                   for dead and lives
    get_worker_infos  who is there                                BACK_S after the faults
    shutdown()        ends within its bound                       virtual time
    liveness          all workers end                             within END_S

A worker counts as taken for dead by another one from when that was told so by the master.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from prpc_engine import errors, remote
from prpc_engine.remote import current
from prpc_engine.remote.functions import ValueGone
from prpc_engine.remote.members import FIND_S
from prpc_engine.remote.references import GRACE_S, UNCLAIMED_S
from prpc_engine.remote.worker import LEAVE_S
from prpc_engine.settings.node_config import NodeConfig
from prpc_engine.simulation import Process, Rates, Simulation
from shard import runtime
from shard import sleep as pause
from tests.simulation.jobs import (
    LEASE_S,
    MASTER_PORT,
    SECRET,
    Deadlines,
    begin_master,
    in_threads,
    journal_folder,
    run_to_the_end,
)

WORKERS, THREADS, UNTIL_S = 3, 2, 8.0
NAMES = tuple(f"worker{number}" for number in range(WORKERS))
TIMEOUTS_S = (0.2, 1.0, 3.0)
JOIN_S = 20.0
CLOSE_S = 10.0  # of a service
BACK_S = 2 * LEASE_S + 3.0  # for those that were taken for dead to be back
FREED_S = GRACE_S + 1.5 * UNCLAIMED_S
END_S = UNTIL_S + 4 * JOIN_S + BACK_S + 3 * FREED_S
FAULTS = Rates(cut=0.3, reset=0.5, kill=0.2, crash=0.03, stop=0.2, slow=0.2, clock=0.1)


class Ref(NamedTuple):
    """A reference that a worker holds: to which value, and by whom it was passed on till here."""

    rref: remote.RRef[Any]
    number: int
    path: tuple[int, ...]


class Here:
    """What one process knows of itself, for the functions that others have it run."""

    def __init__(self, world: Group, process: Process) -> None:
        self.world = world
        self.process = process
        self.incarnation = 0
        self.held: list[Ref] = []

    def hold(self, ref: Ref) -> None:
        """Keep what was passed to this worker."""
        self.held.append(ref._replace(path=(*ref.path, self.incarnation)))

    def choose(self, among: Sequence[Any]) -> Any:
        """One of them."""
        return among[int(self.process.chance.random() * len(among))]


def here() -> Here:
    """Of the process that asks."""
    found: Here = runtime.own("here", dict)  # put by its main thread
    return found


class Value:
    """What references refer to; a copy of it is its number."""

    def __init__(self, number: int) -> None:
        ours = here()
        ours.world.ran[number] += 1
        self.number = number
        ours.world.values.append((ours.process, weakref.ref(self), number))

    def touch(self, number: int) -> int:
        here().world.ran[number] += 1
        return self.number

    def __reduce__(self) -> tuple[Any, ...]:
        return int, (self.number,)


def forget_frames(error: BaseException | None) -> None:
    """Frames refer to references, and cycles of theirs go with the collector of garbage alone,
    which a simulation has not.
    """
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


# -- functions that workers call -------------------------------------------------------------------


def work(number: int, lasts_s: float) -> int:
    """Blocks for so long."""
    here().world.ran[number] += 1
    if lasts_s:
        runtime.sleep(lasts_s)
    return number


async def work_later(number: int, lasts_s: float) -> int:
    """The same, as a coroutine."""
    here().world.ran[number] += 1
    await pause(lasts_s)
    return number


def fail(number: int) -> int:
    """Raises what has the number."""
    here().world.ran[number] += 1
    raise LookupError(number)


def work_there(number: int, to: str, inner: int, lasts_s: float) -> int:
    """Has another worker do it."""
    here().world.ran[number] += 1
    assert remote.rpc_sync(to, work, (inner, lasts_s)) == inner
    return number


def keep(number: int, ref: Any) -> int:
    """Refers to that value from now on."""
    here().world.ran[number] += 1
    here().hold(Ref(*ref))
    return number


def give() -> Ref | None:
    """Passes on what this worker refers to, if it does."""
    held = here().held
    return tuple(here().choose(held)) if held else None


def whose(number: int) -> str:
    """The name of the worker that runs it."""
    here().world.ran[number] += 1
    return remote.get_worker_info().name


# -- the group -------------------------------------------------------------------------------------


class Group:
    """Workers, and what is known of them outside of all processes."""

    def __init__(self, simulation: Simulation, gives_ranks: bool = True) -> None:
        self.simulation = simulation
        self.gives_ranks = gives_ranks  # the master; else each worker has its own
        self.deadlines = Deadlines(simulation)
        self.ran: Counter[int] = Counter()
        self.numbers = 0
        self.ended: list[
            tuple[str, int, type[BaseException] | None]
        ] = []  # operations with a number
        self.wrong: list[str] = []
        self.values: list[tuple[Process, weakref.ref[Value], int]] = []
        self.taken_for_dead: set[tuple[int, int]] = set()  # by whom, who
        self.of_process: dict[Process, int] = {}  # incarnations of those that have joined
        self.let_go: set[str] = set()
        self.at_end: Counter[str] = Counter()

    def number(self) -> int:
        self.numbers += 1
        return self.numbers

    def is_there(self, incarnation: int) -> bool:
        """That worker has joined, and not begun to leave or ended."""
        return any(
            one == incarnation and not process.is_dead for process, one in self.of_process.items()
        )

    def was_missed(self, owner: int) -> bool:
        """Whether it took a worker that is there for dead, or was taken for dead by one."""
        return any(owner in pair and all(map(self.is_there, pair)) for pair in self.taken_for_dead)

    # -- a worker ----------------------------------------------------------------------------------

    def join(self, process: Process) -> bool:
        """Be a worker; False where the name is still taken, or the master away."""
        address = f"{self.simulation.host('master').address}:{MASTER_PORT}"
        config = NodeConfig.load(secret=SECRET, bind=process.bind, lease_s=LEASE_S, shards=0)
        options = remote.Options(
            config=config, init_timeout_s=JOIN_S, rpc_timeout=3.0, lease_s=LEASE_S
        )
        with self.deadlines.watch(f"init_rpc() of {process.name}", JOIN_S + FIND_S + CLOSE_S):
            try:
                rank = None if self.gives_ranks else NAMES.index(process.name)
                meet = f"prpc://{address}"
                remote.init_rpc(process.name, rank, init_method=meet, options=options)
            except errors.ConfigError as error:
                if "already" not in str(error) and "is taken" not in str(error):
                    raise
                return False
            except errors.RpcError as error:
                self.simulation.note(f"init_rpc() of {process.name}: {error!r}")
                return False
        values: Any = current.home()
        told = values.worker_gone
        me = remote.RRef(None).address.incarnation

        def worker_gone(incarnation: int, named: str) -> None:
            self.taken_for_dead.add((me, incarnation))
            told(incarnation, named)

        values.worker_gone = worker_gone
        ours = here()
        ours.incarnation = self.of_process[process] = me
        return True

    def leave(self, process: Process, graceful: bool) -> None:
        ours = here()
        self.of_process.pop(process, None)
        held, ours.held = ours.held, []
        timeout_s = ours.choose(TIMEOUTS_S)
        with self.deadlines.watch(
            f"shutdown() of {process.name}", timeout_s + 2 * LEAVE_S + CLOSE_S
        ):
            try:
                remote.shutdown(graceful, timeout_s)
            except (errors.DeadlineExceeded, errors.NotSent, errors.MaybeExecuted) as error:
                if not graceful:
                    raise
                self.simulation.note(f"shutdown() of {process.name}: {error!r}")
                remote.shutdown(graceful=False)
        del held

    def live(self, process: Process) -> None:
        """Come and go, until the faults are over; then stay until all is freed."""
        ours = Here(self, process)
        runtime.put("here", ours)
        chance = process.chance.random
        simulation = self.simulation
        while True:
            while process not in self.of_process and not self.join(process):
                runtime.sleep(0.3)
            until_s = simulation.now + 1.0 + 4.0 * chance()
            in_threads([partial(self.act, process, until_s) for _ in range(THREADS)])
            if simulation.now >= UNTIL_S:
                break
            if chance() < 0.5:
                self.leave(process, graceful=chance() < 0.5)
                runtime.sleep(0.3 * chance())
        self.settle(process)

    def main(self, process: Process) -> None:
        """Of each process."""
        try:
            self.live(process)
        finally:  # of one that was killed: when the simulation ends
            remote.shutdown(graceful=False)

    def settle(self, process: Process) -> None:
        """After the faults."""
        simulation = self.simulation
        self.let_go.add(process.name)
        self.wait(BACK_S + JOIN_S + 6.0, lambda: self.let_go == set(NAMES), "all to be there")
        runtime.sleep(BACK_S)
        told = sorted(info.name for info in remote.get_worker_infos())
        if told != sorted(NAMES):
            self.wrong.append(f"{process.name} is told of {told}")
        for name in NAMES:
            self.try_it("whose", partial(self.whose, name, 3.0), 3.0, must=True)
        here().held.clear()
        begun_s = simulation.now
        self.wait(FREED_S, lambda: not self.left(), "")
        left = self.left()
        if left:
            self.wrong.append(
                f"{process.name}: not freed in {simulation.now - begun_s:.0f} s: {left}"
            )
        self.at_end[process.name] += 1
        self.wait(FREED_S, lambda: set(self.at_end) == set(NAMES), "all to have nothing")
        self.leave(process, graceful=True)

    def left(self) -> str:
        """What this worker still has, and should not."""
        me = here().process
        if self.was_missed(here().incarnation):
            return ""
        left = [number for process, ref, number in self.values if process is me and ref()]
        values = remote.statistics()["values"]
        return f"{values} values, {left}" if left or values else ""

    def wait(self, limit_s: float, until: Callable[[], bool], what: str) -> None:
        give_up_s = self.simulation.now + limit_s
        while not until():
            if self.simulation.now >= give_up_s:
                if what:
                    self.wrong.append(f"waited {limit_s} s for {what}")
                return
            runtime.sleep(0.5)

    # -- what a thread does ------------------------------------------------------------------------

    def act(self, process: Process, until_s: float) -> None:
        ours = here()
        chance = process.chance.random
        verbs = {
            "work": (4, self.work),
            "nested": (2, self.nested),
            "fail": (1, self.fails),
            "whose": (3, self.whose),
            "make": (3, self.make),
            "own": (1, self.own),
            "keep": (3, self.passes),
            "give": (3, self.takes),
            "use": (4, self.uses),
            "touch": (2, self.touches),
            "drop": (3, self.drops),
        }
        names = [name for name, (times, _) in verbs.items() for _ in range(times)]
        while self.simulation.now < until_s:
            name = ours.choose(names)
            timeout_s = ours.choose(TIMEOUTS_S)
            to = ours.choose(NAMES)
            self.try_it(name, partial(verbs[name][1], to, timeout_s), timeout_s)
            runtime.sleep(0.2 * chance() ** 2)

    def try_it(
        self, name: str, verb: Callable[[], object], timeout_s: float, must: bool = False
    ) -> None:
        """One operation, and whether its error is one that may come."""
        process = here().process
        what = f"{name} of {process.name}"
        with self.deadlines.watch(what, 2 * timeout_s):  # the master may be asked for a name
            try:
                verb()
            except errors.RpcError as error:
                if must or isinstance(error, errors.RemoteError):
                    self.wrong.append(f"{what}: {error!r} at {self.simulation.now:.3f}")
                if not isinstance(error, RuntimeError):
                    self.wrong.append(f"{what}: {error!r} is no RuntimeError")
                forget_frames(error)

    def counted(self, name: str, number: int, verb: Callable[[], Any], answer: Any) -> None:
        """An operation that runs a function with that number."""
        failed: type[BaseException] | None = None
        try:
            found = verb()
            if found != answer:
                self.wrong.append(f"{name} {number} was answered {found!r}, not {answer!r}")
        except errors.RpcError as error:
            failed = type(error)
            raise
        finally:
            self.ended.append((name, number, failed))

    def run(self, to: str, function: Callable[..., Any], *rest: Any, timeout: float = 3.0) -> None:
        number = self.number()
        args = (number, *rest)
        if here().process.chance.random() < 0.5:
            call = partial(remote.rpc_sync, to, function, args, timeout=timeout)
        else:
            call = lambda: remote.rpc_async(to, function, args, timeout=timeout).wait()  # noqa: E731
        self.counted(function.__name__, number, call, number)

    def work(self, to: str, timeout_s: float) -> None:
        lasts_s = here().choose((0.0, 0.0, 0.03, 0.4))
        self.run(to, here().choose((work, work_later)), lasts_s, timeout=timeout_s)

    def nested(self, to: str, timeout_s: float) -> None:
        lasts_s = here().choose((0.0, 0.03, 0.4))
        inner = self.number()
        self.run(to, work_there, here().choose(NAMES), inner, lasts_s, timeout=timeout_s)

    def fails(self, to: str, timeout_s: float) -> None:
        number = self.number()
        try:
            remote.rpc_sync(to, fail, (number,), timeout=timeout_s)
        except LookupError as error:
            if isinstance(error, errors.RpcError):
                raise
            if error.args != (number,):
                self.wrong.append(f"fail {number} raised {error!r}")
            forget_frames(error)
        else:
            self.wrong.append(f"fail {number} did not raise")

    def whose(self, to: str, timeout_s: float) -> None:
        number = self.number()
        call = partial(remote.rpc_sync, to, whose, (number,), timeout=timeout_s)
        self.counted("whose", number, call, to)

    def make(self, to: str, timeout_s: float) -> None:
        number = self.number()
        me = here().incarnation
        rref = remote.remote(to, Value, (number,), timeout=timeout_s)
        if here().process.chance.random() < 0.3:
            return  # the reference is gone before the value is there
        ref = Ref(rref, number, (me,))
        if here().process.chance.random() < 0.5:
            self.fetched(ref, timeout_s)
        here().held.append(ref)

    def own(self, to: str, timeout_s: float) -> None:
        number = self.number()
        here().held.append(Ref(remote.RRef(Value(number)), number, (here().incarnation,)))

    def _held(self) -> Ref | None:
        held = here().held
        return here().choose(held) if held else None

    def passes(self, to: str, timeout_s: float) -> None:
        ref = self._held()
        if ref is not None:
            self.run(to, keep, tuple(ref), timeout=timeout_s)

    def takes(self, to: str, timeout_s: float) -> None:
        found = remote.rpc_sync(to, give, timeout=timeout_s)
        if found is not None:
            here().hold(Ref(*found))

    def uses(self, to: str, timeout_s: float) -> None:
        ref = self._held()
        if ref is not None:
            self.fetched(ref, timeout_s)

    def touches(self, to: str, timeout_s: float) -> None:
        ref = self._held()
        if ref is None:
            return
        number = self.number()
        try:
            verb = ref.rref.rpc_sync(timeout_s).touch
            self.counted("touch", number, partial(verb, number), ref.number)
        except ValueGone as error:
            self.is_gone(ref, str(error))
            forget_frames(error)

    def drops(self, to: str, timeout_s: float) -> None:
        held = here().held
        if held:
            held.pop(int(here().process.chance.random() * len(held)))

    def fetched(self, ref: Ref, timeout_s: float) -> None:
        try:
            found = ref.rref.to_here(timeout_s)
        except ValueGone as error:
            self.is_gone(ref, str(error))
            forget_frames(error)
            return
        number = found.number if isinstance(found, Value) else found
        if number != ref.number:
            self.wrong.append(f"value {ref.number} was answered as {found!r}")

    def is_gone(self, ref: Ref, text: str) -> None:
        """Whether that may be."""
        owner = ref.rref.address.incarnation
        excused = not (self.is_there(owner) and self.ran[ref.number]) or any(
            (owner, each) in self.taken_for_dead or (each, owner) in self.taken_for_dead
            for each in ref.path
        )
        if not excused:
            at = f"{here().process.name} at {self.simulation.now:.3f}"
            self.wrong.append(f"{at}: value {ref.number} of {ref.path} at {owner}: {text}")

    # -- the whole ---------------------------------------------------------------------------------

    def go(self, rates: Rates, may_end: Sequence[str]) -> None:
        simulation = self.simulation
        for name in NAMES:
            simulation.process(name, self.main, host=name)
        simulation.let_loose(rates, UNTIL_S, may_end=may_end)
        simulation.run(lambda: simulation.now > UNTIL_S + 0.1, UNTIL_S + 1.0)
        workers = [simulation.processes[name] for name in NAMES]
        try:
            run_to_the_end(simulation, workers, END_S)
        finally:
            assert not self.wrong, self.wrong
        assert not self.deadlines.late, self.deadlines.late
        for name, number, error in self.ended:
            times = self.ran[number]
            told = f"{name} {number} has run {times} times, and ended with {error!r}"
            assert times <= 1, told
            if error is None:
                assert times == 1, told
            if error is not None and issubclass(error, errors.NotSent) and name != "work_there":
                assert times == 0, told
        twice = [number for number, times in self.ran.items() if times > 1]
        assert not twice, f"these have run more than once: {twice}"


def remotes(simulation: Simulation) -> None:
    """The master keeps a journal."""
    with journal_folder() as folder:
        begin_master(simulation, folder)
        Group(simulation).go(FAULTS, ("master", *NAMES))


def remotes_without_journal(simulation: Simulation) -> None:
    """A master that is started again knows nobody: it could give a rank twice, so it gives none."""
    begin_master(simulation)
    Group(simulation, gives_ranks=False).go(FAULTS, ("master", *NAMES))


def remotes_that_live(simulation: Simulation) -> None:
    """Nobody is killed, and nobody is silent for as long as its lease, unless faults come together:
    then others could be given its rank.
    """
    with journal_folder() as folder:
        begin_master(simulation, folder)
        rates = Rates(cut=0.3, reset=0.8, kill=0.2, crash=0.0, stop=0.3, slow=0.3, clock=0.1)
        Group(simulation, gives_ranks=False).go(rates, ("master",))


SCENARIOS = (remotes, remotes_without_journal, remotes_that_live)

"""Holds a thread of this process between two steps of the product, or does something there.

A place is a failpoint: a comment alone on its line, "failpoint", a colon, and a name. As long as
`at()` or `held_at()` lasts, the function around it runs code that was compiled from the same source
with a call in the comment's place, line by line the same; then it has its own code again. What is
running already goes on with what it began with. Nothing has to be set before the product is
imported, and the product pays nothing.

    with held_at("session.asking") as held:     the first thread that comes there waits
        asking = pool.submit(client.ranks)
        held.wait()                             until it is there
        client.close()
        held.release()                          also at the end of the block

    with at("session.asking", lambda peer: peer.connection.close()) as passed:
        client.ranks()                          by each thread that comes there, in that thread
    assert passed.count == 2

An action may take local variables of the place, by their names; those that the table below states
stay. What it raises is raised there. In an `async def` of the product it may be one itself: it is
awaited, and `held_at()` holds that coroutine, not its thread.

    name                      what the world looks like there
    barrier.said              a worker's process is known, or it could not say (worker)
    checkpoint.checking       the bytes of a file of a checkpoint are about to be read (link)
    checkpoint.found          the newest whole checkpoint is known, and its specs are not told yet
    cli.running               a command is about to run
    client.sending            a client has a server's connection, and has not begun to send over it
    cluster.receiving         a receive is about to begin
    dialling.answered         a node of DI-engine takes this one for up, which does not know yet
    directory.found           the master has answered who serves, and the client does not know yet
    dispatcher.sending        the dispatcher is about to send a call, or to have it connected
    doctor.answered           a peer has answered the doctor (about)
    endpoint.serving          a task answers others, and has not started
    fuse.receiving            a message of its own has its keys, and has no receipt
    inbox.waiting             there is no item of a stream, and no future of the next one
    kv_server.reading         a request to a KVServer has come, and is not decoded
    link.attempted            an attempt to connect failed, who cannot wait was told (goes_on)
    link.connecting           a link is about to begin to connect, guard held
    link.sending              a request is about to be sent to another task (errand, peer)
    master.heartbeat          a heartbeat was heard, and the session's lease is new (session)
    master.listening          a master can be connected to, and its constructor has not returned
    node.forgetting           a lost peer is about to be taken off the connected ones, guard held
    node.reaching             a coroutine wants a connection, and has not asked for one
    peer.answering            an answer or a failure is about to be sent
    peer.item_read            an item of a stream is read, and not in its queue (item)
    peer.looking_for_late     a timer of deadlines came
    peer.noting               a stream's credit, end or cancellation is about to be sent (kind)
    peer.sending              a call is in flight by the table, and its request is not sent (call)
    peer.sending_item         an item of a stream is about to be sent
    peer.sent                 a request is sent, and the call's deadline is not set (call)
    sender.draining           a thread waits for its counters to be sent, and has the sender's lock
    sender.looking            the sender looks at what waits for its servers, with its lock
    service.closing           a service is closed, and nothing of it has ended
    service.found             the master has said who serves, and there is no client of it yet
    service.looked            the master has answered a look, and its asker does not know yet
    service.looking           a service is about to ask the master who serves
    service.making_master_client  there is no client of the master's verbs, and one is about to be
    service.servers_changed   a watch calls: servers have come or gone
    service.shutting          the one close() that ends a service begins to
    service.watching          a service is about to watch the list of servers
    serving.deregistering     a server is about to be taken back from the master
    serving.draining          the master knows that a server goes; what has begun may go on
    serving.prepared          the master has offered a server's id, and it is not served
    serving.refused           the master refused the server, which is served no longer
    session.answered          a verb's answer is there, and its asker does not know (request, peer)
    session.asking            a verb is about to be sent to the master (request, peer)
    session.asking_to_open    a connection to the master is there, and has no session yet
    session.joined            the master has given a rank, and the node does not know yet
    session.looking           a watch is about to be asked for
    session.made              a session is made (self)
    session.opened            a session is taken up, and its keeper does not wait for its loss yet
    session.opening           a keeper is about to connect to the master (attempt_s)
    session.overdue           a verb's time is over, and it is not under way (request)
    session.registering       the master is asked to register a server, and has not answered here
    session.registering_anew  the same over a new session, of each step (asked, peer)
    session.submitting        a thread is about to ask a verb (verb)
    session.taken_up          a connection is in use (peer)
    session.taking_up         a connection has its session, and is not in use yet (peer)
    session.was_opened        the master has opened a session, and the client does not know (peer)
    snapshot.closing          a server of counters is closed, and has not begun to
    snapshot.retiring         it is closed: no other snapshot than the last one begins
    snapshot.saving           a snapshot is about to be written
    subscriber.reading        an item is decoded, and its weights are not made
    watches.changed           changes of the tree have come, and are not applied
    watches.queued            a callback, or the end of what waits for those, was put in the queue
    window.waiting            there is no credit for an item, and no future of it

Failpoints of `shard` can be taken as well: shard/failpoints.py has the table of those.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from shard import run_blocking
from shard.failpoints import MARKER
from tests.imports import ROOT
from tests.program import PATIENCE_S

PACKAGES = ("shard", "prpc_engine")
CALL = "__at_failpoint__"  # what a function calls in a comment's place
AWAIT = "__await_at_failpoint__"  # and a coroutine

Action = Callable[..., object]


@dataclass(eq=False)
class Passed:
    """What came to a failpoint: `count` threads or coroutines, by now."""

    name: str
    count: int = 0
    _came: threading.Condition = field(default_factory=threading.Condition)

    def note(self) -> None:
        """One more."""
        with self._came:
            self.count += 1
            self._came.notify_all()

    def wait(self, count: int = 1) -> None:
        """Until so many came; fails when they do not."""
        with self._came:
            is_there = self._came.wait_for(lambda: self.count >= count, PATIENCE_S)
        assert is_there, f"{self.count} of {count} came to {self.name}"


class Held:
    """The first that comes to a failpoint, which waits there."""

    def __init__(self, name: str) -> None:
        self._passed, self._go_on = Passed(name), threading.Event()

    def wait(self) -> None:
        """Until it is there; fails when it does not come."""
        self._passed.wait()

    def release(self) -> None:
        """It goes on, and all that come later pass."""
        self._go_on.set()

    def stop(self) -> None:
        """What it does there."""
        self._passed.note()
        self._stay()

    async def stop_coroutine(self) -> None:
        """The same, of a coroutine."""
        self._passed.note()
        await run_blocking(self._stay)

    def _stay(self) -> None:
        assert self._go_on.wait(PATIENCE_S), f"held at {self._passed.name} for too long"


@contextmanager
def at(
    name: str,
    action: Action = lambda: None,
    *,
    of: object = None,
    when: Action = lambda: True,
    times: int | None = None,
) -> Iterator[Passed]:
    """Whatever comes to that failpoint calls action(). Raises ValueError: there is no such one.

    of      only methods of that object
    when    only where that is true, of local variables as well
    times   only the first so many
    """
    passed, guard = Passed(name), threading.Lock()

    def act(variables: dict[str, Any]) -> object:
        if of is not None and variables.get("self") is not of:
            return None
        if not when(**_wanted(when, name, variables)):
            return None
        with guard:
            if passed.count == times:
                return None
            passed.note()
        return action(**_wanted(action, name, variables))

    with ExitStack() as placed:
        for place in _places(name):
            placed.enter_context(_in(place, act))
        yield passed


@contextmanager
def held_at(name: str, *, of: object = None) -> Iterator[Held]:
    """Hold the first that comes to that failpoint, in a method of that object. Raises
    ValueError.
    """
    held = Held(name)
    is_coroutine = any(place.is_coroutine for place in _places(name))
    try:
        with at(name, held.stop_coroutine if is_coroutine else held.stop, of=of, times=1):
            yield held
    finally:
        held.release()


def _wanted(action: Action, name: str, variables: dict[str, Any]) -> dict[str, Any]:
    wanted = inspect.signature(action).parameters
    missing = wanted.keys() - variables.keys()
    assert not missing, f"there is no {missing} at {name}, but {sorted(variables)}"
    return {each: variables[each] for each in wanted}


# -- where they are --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """A comment.

    function      the outermost around it: its name, and its line as code has it
    is_coroutine  the innermost is one
    """

    name: str
    path: Path
    line: int
    function: str
    function_line: int
    is_coroutine: bool


@cache
def names() -> dict[str, list[tuple[Path, int]]]:
    """All failpoints, by name: the file and the line of each comment."""
    found: dict[str, list[tuple[Path, int]]] = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            source = path.read_text()
            for match in re.finditer(MARKER, source):
                # the expression takes what is before it on its line along
                line = source.count("\n", 0, match.start(2)) + 1
                found.setdefault(match[2], []).append((path, line))
    return found


@cache
def _places(name: str) -> list[Place]:
    if name not in names():
        raise ValueError(f"there is no failpoint {name!r}; there are {', '.join(sorted(names()))}")
    return [_place(name, path, line) for path, line in names()[name]]


def _place(name: str, path: Path, line: int) -> Place:
    # a comment at a function's end is part of it only as a statement
    source = re.sub(MARKER, r"\1pass", path.read_text())
    around = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.lineno <= line <= (node.end_lineno or 0)
    ]
    around.sort(key=lambda node: node.lineno)
    outer, inner = around[0], around[-1]
    first = min([outer.lineno, *(each.lineno for each in outer.decorator_list)])
    is_coroutine = isinstance(inner, ast.AsyncFunctionDef)
    return Place(name, path, line, outer.name, first, is_coroutine)


# -- how a function comes to call there ------------------------------------------------------------

_guard = threading.RLock()
_own: dict[FunctionType, CodeType] = {}  # of those that run other code now
_actions: dict[Place, list[Callable[[dict[str, Any]], object]]] = {}


@contextmanager
def _in(place: Place, act: Callable[[dict[str, Any]], object]) -> Iterator[None]:
    function = _function(place)
    with _guard:
        _actions.setdefault(place, []).append(act)
        _compile(function, place)
    try:
        yield
    finally:
        with _guard:
            _actions[place].remove(act)
            if not _actions[place]:
                del _actions[place]
            _compile(function, place)


def _compile(function: FunctionType, place: Place) -> None:
    """Have the function call at each failpoint of it that has actions now."""
    own = _own.setdefault(function, function.__code__)
    here = [one for one in _actions if (one.path, one.function_line) == _key(place)]
    if not here:
        function.__code__ = _own.pop(function)
        return
    lines = place.path.read_text().splitlines(keepends=True)
    for one in here:
        call = f"await {AWAIT}" if one.is_coroutine else CALL
        comment = lines[one.line - 1]
        indent = comment[: len(comment) - len(comment.lstrip())]
        lines[one.line - 1] = f'{indent}{call}("{one.path}", {one.line}, locals())\n'
    module = compile("".join(lines), str(place.path), "exec", dont_inherit=True)
    function.__globals__.update({CALL: _act, AWAIT: _act_and_await})
    function.__code__ = next(code for code in _codes(module) if _is_same(code, own))


def _key(place: Place) -> tuple[Path, int]:
    return place.path, place.function_line


def _acts(path: str, line: int) -> list[Callable[[dict[str, Any]], object]]:
    with _guard:  # it may have ended just now
        for place, acts in _actions.items():
            if (str(place.path), place.line) == (path, line):
                return list(acts)
    return []


def _act(path: str, line: int, variables: dict[str, Any]) -> None:
    for act in _acts(path, line):
        act(variables)


async def _act_and_await(path: str, line: int, variables: dict[str, Any]) -> None:
    for act in _acts(path, line):
        done = act(variables)
        if inspect.isawaitable(done):
            await done


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes(inner)


def _is_same(code: CodeType, other: CodeType) -> bool:
    return (code.co_name, code.co_firstlineno) == (other.co_name, other.co_firstlineno)


def _function(place: Place) -> FunctionType:
    """The function around it, as it is called everywhere."""
    name = ".".join(place.path.relative_to(ROOT).with_suffix("").parts)
    module = importlib.import_module(name.removesuffix(".__init__"))
    for function in _functions(vars(module), module):
        code = _own.get(function, function.__code__)
        if (code.co_name, code.co_firstlineno) == (place.function, place.function_line):
            return function
    raise ValueError(f"no function {place.function} of {module.__name__} was found")


def _functions(names: Any, module: ModuleType) -> Iterator[FunctionType]:
    """Those that are written in that module; methods, and below decorators, too."""
    for value in list(names.values()):
        if isinstance(value, type) and value.__module__ == module.__name__:
            yield from _functions(vars(value), module)
            continue
        if isinstance(value, staticmethod | classmethod):
            value = value.__func__
        elif isinstance(value, property):
            value = value.fget
        elif isinstance(value, cached_property):
            value = value.func
        function = inspect.unwrap(value) if isinstance(value, FunctionType) else None
        if isinstance(function, FunctionType) and function.__globals__ is vars(module):
            yield function

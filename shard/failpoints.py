"""Places in the engine where a process can be made to die, stop, wait or raise: comments, until
PRPC_FAILPOINTS is set.

A failpoint is a comment alone on its line: "failpoint", a colon, and a name from the table below.
With the variable set when `shard` is imported, its modules are compiled from source with each such
line replaced, in place, by a call of passed(); nothing is read from or written to .pyc files then.
Processes started by spawn or forkserver inherit the variable and do the same.

    PRPC_FAILPOINTS=armed  (or "on") put the calls in and arm nothing: arm() does, later
    PRPC_FAILPOINTS=ring.after_payload=kill9,slab.after_copy=delay:50@17
                           name=action[:argument][@n], and arm these as well

    action       the n-th time (default 1) that the process passes there, counted from arming, and
                 never again
    kill9        SIGKILL to itself
    stop         SIGSTOP to itself
    exit[:code]  os._exit(code), default 0: no handler, no destructor, no atexit
    raise        FailpointError
    delay:ms     sleep for so many milliseconds

    name                        what the world looks like there
    ring.claimed                the producer found room for a record and has written nothing of it
    ring.after_payload          the payload stands in the ring, its length and tag do not
    ring.after_length           the whole record stands in the ring, the tail does not count it
    ring.after_tail             the tail counts the record, and a consumer that sleeps was not rung
    ring.after_padding          the rest of the data is marked as padding, the tail does not count
                                it
    ring.before_handler         the consumer found a record and has not shown it to its owner
    ring.after_handler          the owner is done with the record, the head does not count it as
                                read
    ring.after_head             the head counts everything read; the producer may write over it
    handle.named                a ring's segment has its name in /dev/shm and no layout
    handle.formatted            a named ring is ready, and nobody was told its name
    segment.opened              the file is there, empty: no page is reserved
    segment.reserved            every page is reserved, and nobody has it mapped
    slab.after_segment          a segment is reserved and mapped, the slab's books do not have it
    slab.after_allocate         a block has its first user, and nobody holds it yet
    slab.after_lend             a block has one user more, and no lease says who
    slab.after_copy             the sender's array is copied into the block, no lease is noted
    lease.lent                  the lease is noted, and no message names it
    lease.borrowed              the borrower's array is made, and not handed to its owner
    lease.before_return         the borrower took leases off its list, the message that returns them
                                is not written
    lease.after_return          that message is written, and a lender that sleeps was not rung
    lease.taken_back            the lender struck the lease off its books and has not freed the
                                block
    connection.segment_told     the peer was sent a segment's descriptor, the message that needs it
                                is not written
    connection.before_doorbell  the sleeping flag is taken, the doorbell not rung
    connection.after_doorbell   the doorbell is rung
    connection.before_goodbye   our half is ending, the peer was not told
    mesh.before_call            the caller holds a future, the call is not written
    mesh.after_call             the call is written, or waits in the outbox
    mesh.function_received      a function arrived, and has no entry under its number
    mesh.before_run             a call arrived, its function has not run
    mesh.after_run              the function returned, its result is not sent
    mesh.after_answer           the answer is written, or waits in the outbox
    mesh.result_received        the answer arrived, the future is not done
    group.before_spawn          the lanes of a newborn shard are made, its process is not
    group.after_spawn           the application started one shard of several, and holds the ends of
                                all lanes
    group.before_handover       the lane from a living shard to a newborn is made, and neither has
                                an end of it
    group.after_handover        the living shard was sent its end, the newborn has not started
    group.handed_over           the living shard received its end, and has not connected it
    group.before_attach         the newborn runs, the application has not connected its lane to it
    group.started               a shard has all its lanes and has not turned its reactor once
    group.before_up             a shard ran what each runs at its start, and is not given calls yet
    group.before_down           a shard's process is known to have ended, calls are still submitted
                                to it
    group.draining              a shard refuses new calls, and waits for its tasks
    group.before_stop           close(): no shard has tasks of another, none was told to stop
    group.after_stop            close(): all were told to stop, and perhaps none has ended
    group.before_flush          a shard's last turn is over, answers may wait for room in a ring
    group.before_exit           everything it answered is written, its lanes are connected
    group.before_close          close(): no shard lives, the application's lanes are there

names() finds them by reading the sources, so a marker set anywhere in the package is known at once.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import re
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import CodeType, ModuleType

from shard.errors import FailpointError

VARIABLE = "PRPC_FAILPOINTS"
ARM_NOTHING = ("armed", "on")
PACKAGE = "shard"
CALL = "__failpoint__"  # what an instrumented module knows passed() as
# compiled when needed: 1 ms that few imports owe
MARKER = r"(?m)^([ \t]*)# failpoint: ([a-z0-9_]+\.[a-z0-9_]+)[ \t]*$"
ACTIONS = {
    "kill9": "kill9",
    "stop": "stop",
    "exit": "exit[:code]",
    "raise": "raise",
    "delay": "delay:ms",
}
ITEM = r"(?P<name>[^=]*)=(?P<action>[^@]*)(?:@(?P<nth>\d+))?"

Armed = tuple[str, int, int]  # the action, its argument, and the hit at which it happens

installed = False  # whether this process runs instrumented modules
_hits: dict[str, int] = {}  # how often each was passed; threads may lose a count between them
_armed: dict[str, Armed] = {}


# -- what a process runs ---------------------------------------------------------------------------


def passed(name: str) -> None:
    """What stands in place of a marker."""
    hits = _hits[name] = _hits[name] + 1
    armed = _armed.get(name)
    # of two threads, the one that pops it acts
    if armed is None or hits < armed[2] or _armed.pop(name, None) is None:
        return
    action, argument, _ = armed
    if action == "kill9":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif action == "exit":
        os._exit(argument)
    elif action == "delay":
        time.sleep(argument / 1000)
    else:
        raise FailpointError(f"failpoint {name} raised at hit {hits}, as it was armed to")


def arm(name: str, action: str, nth: int = 1) -> None:
    """Do `action`, once, when this process passes `name` for the `nth` time from now; in place of
    what was armed there.

    Raises ValueError where nothing is instrumented, and for names and actions that do not exist.
    """
    if not installed:
        raise ValueError(
            f"{name} cannot be armed: this process runs without failpoints; "
            f"set {VARIABLE}=armed before it imports {PACKAGE}"
        )
    _check_name(name, _hits)
    what, argument = _parse_action(action)
    if nth < 1:
        raise ValueError(f"{name} armed for hit {nth}, where the first is 1")
    _armed[name] = (what, argument, _hits[name] + nth)


def disarm_all() -> None:
    """Nothing is armed any more, and every count of hits is 0 again."""
    _armed.clear()
    for name in _hits:
        _hits[name] = 0


def hits(name: str) -> int:
    """How often this process passed `name` since it was instrumented, or since disarm_all(). Raises
    ValueError.
    """
    _check_name(name, _hits or names())
    return _hits.get(name, 0)


def names() -> list[str]:
    """Every failpoint of the package, sorted."""
    sources = (path.read_text() for path in sorted(Path(__file__).parent.rglob("*.py")))
    return sorted({name for source in sources for _, name in re.findall(MARKER, source)})


# -- what users write ------------------------------------------------------------------------------


def parse(setting: str, known: Iterable[str]) -> dict[str, Armed]:
    """The variable's value as what to arm. Raises ValueError."""
    armed: dict[str, Armed] = {}
    if setting.strip() in ARM_NOTHING:
        return armed
    for item in setting.split(","):
        match = re.fullmatch(ITEM, item.strip())
        if match is None:
            raise ValueError(
                f"{item.strip()!r} is no failpoint: name=action[:argument][@n] expected, "
                "or the word armed alone"
            )
        name = match["name"].strip()
        _check_name(name, known)
        if name in armed:
            raise ValueError(f"{name} is armed twice: each failpoint takes one action at a time")
        if match["nth"] is not None and int(match["nth"]) < 1:
            raise ValueError(f"{name} armed for hit {match['nth']}, where the first is 1")
        armed[name] = (*_parse_action(match["action"].strip()), int(match["nth"] or 1))
    return armed


def _parse_action(text: str) -> tuple[str, int]:
    action, colon, argument = text.partition(":")
    takes_argument = ":" in ACTIONS.get(action, "")
    if (
        action not in ACTIONS
        or (colon and not (takes_argument and argument.isdecimal()))
        or (action == "delay" and not colon)
    ):
        raise ValueError(
            f"{text!r} is no action: {', '.join(ACTIONS.values())} "
            f"exist{_did_you_mean(action, ACTIONS)}"
        )
    return action, int(argument or 0)


def _check_name(name: str, known: Iterable[str]) -> None:
    if name not in known:
        raise ValueError(
            f"there is no failpoint {name!r}{_did_you_mean(name, known)}; "
            f"there are {', '.join(sorted(known))}"
        )


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    import difflib  # for those who mistyped

    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


# -- how markers become calls ----------------------------------------------------------------------


def instrument(source: str) -> str:
    """The source with each marker a call, on the line where it stood."""
    return re.sub(MARKER, rf'\1{CALL}("\2")', source)


class _Loader(importlib.machinery.SourceFileLoader):
    """Compiles instrumented source, past the cache of byte code."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        source = instrument(importlib.util.decode_source(self.get_data(path)))
        return compile(source, path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__[CALL] = passed
        super().exec_module(module)


class _Finder:
    """Finds modules of the package as always, and gives them the loader above."""

    @staticmethod
    def find_spec(
        name: str, path: Iterable[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith(PACKAGE + "."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)  # type: ignore[arg-type]
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
            spec.cached = None
        return spec


def install() -> None:
    """Instrument the modules of the package that are imported from now on, if the variable asks for
    it. Raises ValueError.
    """
    global installed
    setting = os.environ.get(VARIABLE, "").strip()
    if not setting or installed:
        return
    known = names()
    try:
        armed = parse(setting, known)
    except ValueError as error:
        raise ValueError(f"{VARIABLE}={setting}: {error}") from None
    _hits.update(dict.fromkeys(known, 0))
    _armed.update(armed)
    sys.meta_path.insert(0, _Finder())
    installed = True


install()  # by its import, so that `shard` can import it first and the rest after it

"""Sessions with leases, and the tree of nodes that they make. No I/O and no clock here: `now` is
handed in.

    session   opened --touch, resume--> opened           its lease begins anew
              opened --lease over, end--> ended          its ephemeral nodes go with it

A session sees the tree below its root alone: jobs with different roots share a master. Names become
path components with "%" and "/" escaped. Every verb leaves its changes in take_changes(), to be
written before it is answered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from prpc_engine.errors import ConfigError
from prpc_engine.idempotency_window import FORGOTTEN
from prpc_engine.master.tree import (
    ANSWERS_MAX,
    Change,
    Kind,
    NodeTree,
    SessionRecord,
    TreeNode,
)
from prpc_engine.settings.address import NAME_LENGTH_MAX
from prpc_engine.settings.config import LEASE_S_MAX, LEASE_S_MIN

PATH_LENGTH_MAX = 4096  # what file systems allow
# a description, not data: it is kept in memory and sent to every watcher
VALUE_LENGTH_MAX = 1 << 20
NODES_MAX = 1 << 20  # of the whole tree: half a GiB of the master's memory
COUNTERS_MAX = 1 << 20  # ids and sequences of the whole tree: a quarter of a GiB
OWNED_MAX = 65536  # by one session: its servers, locks and ephemeral nodes
SESSIONS_MAX = 65536
SEQUENCE_DIGITS = 10
LOOKS_PER_LEASE = 4  # the master looks for ended leases this often in the shortest of them ...
LOOK_EVERY_S_MAX = 1.0  # ... and at least this often
# a look that comes this many intervals late: the master was stopped or starved, not its clients
AWAY_LOOKS = 3
# Made at once for every root; in those of CLEARED, a child without children is deleted with its
# last one.
DIRECTORIES = (
    "_node_",
    "_shard_",
    "_task_state_",
    "_id_gen_",
    "_lock_",
    "_barrier_",
    "_rpc_",
    "_context_",
    "_model_",
)
CLEARED = ("_lock_", "_barrier_")


@dataclass(frozen=True)
class TreeBounds:
    """How much a tree may hold: `nodes` and `counters` in all, `owned` nodes of one session, and
    open `sessions`.
    """

    nodes: int = NODES_MAX
    counters: int = COUNTERS_MAX
    owned: int = OWNED_MAX
    sessions: int = SESSIONS_MAX


TREE_BOUNDS = TreeBounds()


def check_root(root: object) -> None:
    """A root is a short, non-empty str. Raises ConfigError."""
    if not isinstance(root, str) or not 1 <= len(root) <= NAME_LENGTH_MAX:
        raise ConfigError(f"root={root!r}: a str of 1 to {NAME_LENGTH_MAX} characters is allowed")


class RegistryError(ValueError):
    """The registry refuses a request; the text says why. MasterClient raises Rejected, or a
    subclass of it, with that text.
    """


class NoSuchNode(RegistryError):
    """The tree has no node at that path. MasterClient raises prpc_engine.NoSuchNode for it."""


class NodeExists(RegistryError):
    """The tree has a node at that path already; MasterClient raises prpc_engine.NodeExists."""


class VersionMismatch(RegistryError):
    """The node has another version than the one that was expected."""


class TimedOut(RegistryError):
    """What was waited for did not come to pass in time; the text says what is missing."""


class AnswerForgotten(RegistryError):
    """A request was asked again, and its answer, if it was served, is not kept any more.
    MasterClient raises MaybeExecuted for it.
    """


class SessionExpired(RegistryError):
    """The session is not known any more: its lease is over, or it was ended."""


def component(name: str) -> str:
    """A name as one component of a path. Raises RegistryError."""
    if not isinstance(name, str) or not 1 <= len(name) <= NAME_LENGTH_MAX:
        length = len(name) if isinstance(name, str) else name
        raise RegistryError(f"a name has 1 to {NAME_LENGTH_MAX} characters, not {length}")
    return name.replace("%", "%25").replace("/", "%2F")


def name_of(part: str) -> str:
    """The name that component() was given."""
    return part.replace("%2F", "/").replace("%25", "%")


def natural(name: str) -> tuple[int, int, str]:
    """Sort key: numbers by value and before words."""
    return (0, int(name), "") if name.isdecimal() else (1, 0, name)


def encoded(value: object) -> str:
    """JSON, as a str."""
    return msgspec.json.encode(value).decode()


class Namespace:
    """Checks what sessions ask of the master's tree of nodes, and makes the changes that follow.

    first_number  where ids and sessions begin: above all that an earlier master gave, where nothing
                  is kept of it
    bounds        of the tree

    `session` is the number that open() gave, `now` in seconds of one clock. Not thread-safe: called
    in the master's reactor. What is refused raises RegistryError or one of its kin. States of a
    session: the table at the file's head.
    """

    def __init__(self, first_number: int = 0, bounds: TreeBounds = TREE_BOUNDS) -> None:
        self.tree = NodeTree()
        self.bounds = bounds
        self._first_number = first_number
        self._changes: list[Change] = []
        self._lease_ends: dict[int, float] = {}
        self._looked: float | None = None

    @property
    def version(self) -> int:
        """Grows with every change."""
        return self.tree.version

    def _make(self, change: Change) -> None:
        self.tree.apply(change)
        self._changes.append(change)

    def take_changes(self) -> list[Change]:
        """What was changed since the last time: one transaction, to be written and told."""
        changes, self._changes = self._changes, []
        return changes

    def count(self, key: str, first: int = 0) -> int:
        """The next number of that key. Keys that begin with "#" are no paths, and those without a
        "/" are the master's own.

        Raises RegistryError for one more of the others than its bound."""
        number = self.tree.counters.get(key, first)
        self._check_counters(key)
        self._make(Change(Kind.COUNT, key, number=number + 1))
        return number

    def _check_counters(self, key: str) -> None:
        counters = self.tree.counters
        if key not in counters and len(counters) >= self.bounds.counters and "/" in key:
            raise RegistryError(
                f"{self.bounds.counters} ids and sequences are counted already: "
                "reset some of those ids, or clear some paths"
            )

    # -- sessions ----------------------------------------------------------------------------------

    def start(self, now: float) -> None:
        """The master began: every session it remembers has its whole lease to come back in."""
        self._looked = now
        for number, session in self.tree.sessions.items():
            self._lease_ends[number] = now + session.record.lease_s

    def open(self, record: SessionRecord, now: float) -> int:
        """A new session's number, never given twice. Raises RegistryError."""
        if not LEASE_S_MIN <= record.lease_s <= LEASE_S_MAX:
            raise RegistryError(
                f"a lease lasts {LEASE_S_MIN} to {LEASE_S_MAX} s, not {record.lease_s}"
            )
        if len(self.tree.sessions) >= self.bounds.sessions:
            raise RegistryError(f"{self.bounds.sessions} sessions are open: end some")
        if len(record.label) > NAME_LENGTH_MAX or len(record.home) > NAME_LENGTH_MAX:
            raise RegistryError(f"label and home have at most {NAME_LENGTH_MAX} characters")
        root = component(record.root)
        if (
            f"/{root}" not in self.tree.nodes
            and len(self.tree.nodes) + 1 + len(DIRECTORIES) > self.bounds.nodes
        ):
            raise RegistryError(
                f"the tree has {len(self.tree.nodes)} nodes of at most {self.bounds.nodes}: "
                f"no room for another root, {root!r}"
            )
        number = self.count("#sessions", max(1, self._first_number))
        self._make(Change(Kind.OPEN, text=encoded(record), owner=number))
        for path in [f"/{root}", *(f"/{root}/{name}" for name in DIRECTORIES)]:
            if path not in self.tree.nodes:
                self._make(Change(Kind.PUT, path))
        self._lease_ends[number] = now + record.lease_s
        return number

    def resume(self, session: int, token: str, now: float) -> None:
        """Its client is back, over another connection. Raises SessionExpired."""
        known = self.tree.sessions.get(session)
        if known is None or known.record.token != token:
            raise SessionExpired(
                f"session {session} is not known here: its lease is over, or another master gave it"
            )
        self.touch(session, now)

    def touch(self, session: int, now: float) -> None:
        """It was heard of: its lease begins anew. Raises SessionExpired."""
        self._lease_ends[session] = now + self._session(session).lease_s

    def _session(self, session: int) -> SessionRecord:
        known = self.tree.sessions.get(session)
        if known is None:
            raise SessionExpired(
                f"session {session} is over: nothing was heard of it for its lease"
            )
        return known.record

    def end(self, session: int) -> bool:
        """Forget the session and what it owns; whether there was one."""
        known = self.tree.sessions.get(session)
        if known is None:
            return False
        for path in list(known.owned):
            self.delete(path)
        self._make(Change(Kind.END, owner=session))
        self._lease_ends.pop(session, None)
        return True

    def look_every_s(self) -> float:
        """How long expire() may wait for its next call."""
        shortest = min(
            (session.record.lease_s for session in self.tree.sessions.values()), default=LEASE_S_MAX
        )
        return min(LOOK_EVERY_S_MAX, shortest / LOOKS_PER_LEASE)

    def expire(self, now: float) -> list[int]:
        """End the sessions whose lease is over; which. Leases stand still while the master itself
        is away.
        """
        look_s = self.look_every_s()
        if self._looked is not None and now - self._looked > AWAY_LOOKS * look_s:
            away_s = now - self._looked - look_s
            self._lease_ends = {session: end + away_s for session, end in self._lease_ends.items()}
        self._looked = now
        over = [session for session, end in self._lease_ends.items() if end <= now]
        for session in over:
            self.end(session)
        return over

    # -- answers given before ----------------------------------------------------------------------

    def answered(self, session: int, request: int) -> list[Any] | None:
        """[the answer] when that request was served before."""
        answer = self.tree.sessions[session].answers.kept.get(request)
        return None if answer is None else [msgspec.json.decode(answer)]

    def check_remembered(self, session: int, request: int) -> None:
        """Raises AnswerForgotten for a request that may have been served, as far as is known."""
        answers = self.tree.sessions[session].answers
        if answers.find(request) is FORGOTTEN:
            raise AnswerForgotten(
                f"it may have been done under request {request}, as only the last {ANSWERS_MAX} "
                "answers of a session are kept; look before you ask again"
            )

    def note_answer(self, session: int, request: int, answer: object) -> None:
        """Should it be asked again, answer the same. Only what has changed something needs it."""
        self.note_encoded(session, request, encoded(answer))

    def note_encoded(self, session: int, request: int, answer: str) -> None:
        """As note_answer(), of an answer that many sessions share: as JSON."""
        if request:
            self._make(Change(Kind.ANSWER, text=answer, number=request, owner=session))

    def has_changes(self) -> bool:
        """Whether the verb under way has changed anything."""
        return bool(self._changes)

    # -- the tree ----------------------------------------------------------------------------------

    def full_path(self, session: int, path: str) -> str:
        """The session's path in the whole tree; "" is its root. Raises RegistryError."""
        well_formed = isinstance(path, str) and len(path) <= PATH_LENGTH_MAX
        if not well_formed or (path and (path[0] != "/" or "" in path[1:].split("/"))):
            shown = path[:NAME_LENGTH_MAX] if isinstance(path, str) else path
            raise RegistryError(
                f"{shown!r} is no path: it begins with /, has no empty part and does not end with "
                "/, "
                f"and has at most {PATH_LENGTH_MAX} characters"
            )
        return f"/{component(self._session(session).root)}{path}"

    def node(self, full: str) -> TreeNode:
        """Raises NoSuchNode."""
        node = self.tree.nodes.get(full)
        if node is None:
            raise NoSuchNode(f"there is no node {full!r}")
        return node

    def put(self, full: str, value: str, owner: int) -> None:
        """A new node; its parent is there and stays.
        Raises RegistryError, NoSuchNode, NodeExists.
        """
        if not isinstance(value, str) or len(value) > VALUE_LENGTH_MAX:
            raise RegistryError(f"a value is a str of at most {VALUE_LENGTH_MAX} characters")
        above = full.rpartition("/")[0]
        parent = self.tree.nodes.get(above)
        if parent is None:
            raise NoSuchNode(
                f"there is no node {above!r} to have {full!r} as a child: add it first"
            )
        if parent.owner:
            raise RegistryError(
                f"{above!r} is ephemeral and can have no child: it goes with its session"
            )
        if full in self.tree.nodes:
            raise NodeExists(f"there is a node {full!r} already")
        if len(self.tree.nodes) >= self.bounds.nodes:
            raise RegistryError(f"the tree has {self.bounds.nodes} nodes: delete some")
        if owner and len(self.tree.sessions[owner].owned) >= self.bounds.owned:
            raise RegistryError(
                f"session {owner} has {self.bounds.owned} ephemeral nodes: delete some"
            )
        self._make(Change(Kind.PUT, full, value, 0, owner))

    def delete(self, full: str) -> None:
        """A node that has no children."""
        self._make(Change(Kind.DELETE, full))
        above = full.rpartition("/")[0]
        parts = above.split("/")  # "", root, directory, name
        if len(parts) == 4 and parts[2] in CLEARED and not self.tree.nodes[above].children:
            self._make(Change(Kind.DELETE, above))

    def tree_node_add(self, session: int, path: str, value: str, ephemeral: bool) -> None:
        """A node. Raises NoSuchNode (its parent), NodeExists, RegistryError."""
        self.put(self.full_path(session, path), value, session if ephemeral else 0)

    def tree_node_gen(self, session: int, path: str, value: str, ephemeral: bool) -> str:
        """A child named "_" and the next number of its parent, in 10 digits; the name. Raises as
        tree_node_add().
        """
        full = self.full_path(session, path)
        self.node(full)
        self._check_counters(full)
        number = self.tree.counters.get(full, 0)
        if number >= 10**SEQUENCE_DIGITS:
            raise RegistryError(f"{full!r} has had all its {10**SEQUENCE_DIGITS} sequence nodes")
        name = f"_{number:0{SEQUENCE_DIGITS}}"
        self.put(f"{full}/{name}", value, session if ephemeral else 0)
        self.count(full)
        return name

    def tree_node_set(self, session: int, path: str, value: str, expected_version: int) -> int:
        """The node's new version. With expected_version >= 0 only if that is its version: compare
        and set.
        """
        full = self.full_path(session, path)
        node = self.node(full)
        self._check_version(full, node, expected_version)
        if not isinstance(value, str) or len(value) > VALUE_LENGTH_MAX:
            raise RegistryError(f"a value is a str of at most {VALUE_LENGTH_MAX} characters")
        self._make(Change(Kind.PUT, full, value, node.version + 1, node.owner))
        return node.version

    def _check_version(self, full: str, node: TreeNode, expected: int) -> None:
        if 0 <= expected != node.version:
            raise VersionMismatch(
                f"{full!r} has version {node.version}, {expected} was expected: read it again"
            )

    def tree_node_get(self, session: int, path: str) -> list[Any]:
        """[value, version, whether it is ephemeral]. Raises NoSuchNode."""
        node = self.node(self.full_path(session, path))
        return [node.value, node.version, bool(node.owner)]

    def tree_node_sub(self, session: int, path: str) -> list[str]:
        """The names of the children, sorted, numbers by value. Raises NoSuchNode."""
        return sorted(self.node(self.full_path(session, path)).children, key=natural)

    def tree_node_del(self, session: int, path: str, expected_version: int) -> None:
        """Raises NoSuchNode, VersionMismatch, and RegistryError when it has children."""
        full = self.full_path(session, path)
        node = self.node(full)
        if not path:
            raise RegistryError("the root stays")
        if node.children:
            raise RegistryError(
                f"{full!r} has {len(node.children)} children: delete them first, "
                "or tree_clear_path()"
            )
        self._check_version(full, node, expected_version)
        self.delete(full)

    def tree_clear_path(self, session: int, path: str) -> int:
        """Delete a node and all below it (at the root: all below it); how many."""
        full = self.full_path(session, path)
        self.node(full)
        found = [at for at, _ in self.tree.below(full) if at != full or path]
        for at in reversed(found):
            if at in self.tree.nodes:  # else it went with its last child
                self.delete(at)
        if not path:  # what every root has
            for name in DIRECTORIES:
                self._make(Change(Kind.PUT, f"{full}/{name}"))
        return len(found)

    def tree_look(self, session: int, path: str) -> list[list[Any]]:
        """The node and all below it, parents first: [path in the session's tree, value, version]
        each; [] when there is none.
        """
        full = self.full_path(session, path)
        cut = len(self.full_path(session, ""))
        return [[at[cut:], node.value, node.version] for at, node in self.tree.below(full)]

    # -- ids ---------------------------------------------------------------------------------------

    def generate_id(self, session: int, key: str) -> int:
        """The next number of that key; never twice, until it is reset. The first is 0, or larger
        where nothing is kept.
        """
        return self.count(f"#id{self.full_path(session, '')}/{component(key)}", self._first_number)

    def count_up(self, session: int, key: str) -> int:
        """0, 1, 2, ... for each key, as long as this tree is kept: another master may begin with 0
        again.
        """
        return self.count(f"#up{self.full_path(session, '')}/{component(key)}")

    def reset_generate_id(self, session: int, key: str) -> None:
        """Begin with its first number again."""
        counter = f"#id{self.full_path(session, '')}/{component(key)}"
        if counter in self.tree.counters:
            self._make(Change(Kind.COUNT, counter, number=0))

"""The master's state: a tree of named nodes that changes only by changes, which are also what is
written and told. No I/O here.

    part      what it is                                                            changed by
    nodes     path -> value, version, owner (a session, or 0: it stays), names of   PUT,
              children                                                              DELETE
    counters  key -> the next number: sequence nodes, ids, ranks of locks, targets  COUNT
    sessions  id -> token, lease, what it owns, its latest answers                  OPEN, END,
                                                                                    ANSWER

One list of changes serves three readers: the journal writes it, watchers are told of its PUT and
DELETE, and replaying it from the beginning, or a snapshot (the changes that make today's tree from
nothing), gives the same tree. `version` counts them.

Why answers belong to the state: who asked and lost the connection asks again under the same number,
of a master that may have been restarted meanwhile, and must be answered the same, not served twice.
Those of one session are SeenNumbers (idempotency_window.py): its latest answers are kept, and what
may have been among those before is FORGOTTEN.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator

import msgspec

from prpc_engine.idempotency_window import SeenNumbers

# Answers that one session may ask for again: more than a process has threads, and 100 KiB at most
# for usual answers.
ANSWERS_MAX = 1024


class Kind(enum.IntEnum):
    """What a change does. Numbers are part of the journal's format."""

    PUT = 1
    DELETE = 2
    COUNT = 3
    OPEN = 4
    END = 5
    ANSWER = 6


class Change(msgspec.Struct, frozen=True, array_like=True):
    """One step of the tree.

    kind    path   text                      number           owner
    PUT     path   value                     node's version   session, or 0
    DELETE  path
    COUNT   key                              next number; 0: forget the key
    OPEN           a SessionRecord as JSON                    session
    END                                                       session
    ANSWER         the answer as JSON;       request          session
                   "": it and what was
                   before it is forgotten
    """

    kind: Kind
    path: str = ""
    text: str = ""
    number: int = 0
    owner: int = 0


class SessionRecord(msgspec.Struct, frozen=True):
    """What the master keeps of a session for as long as it lasts, also through a restart of the
    master. lease_s is in seconds.
    """

    token: str  # whoever shows it is the session
    lease_s: float
    root: str  # its paths are below this one
    label: str  # for people: who it is
    home: str  # host and process, as runtime.this_process() has it


class TreeNode:
    """One node. `children` are names, in the order they were made."""

    __slots__ = ("children", "owner", "value", "version")

    def __init__(self, value: str, version: int, owner: int) -> None:
        self.value = value
        self.version = version
        self.owner = owner
        self.children: dict[str, None] = {}


class TreeSession:
    """One session: its record, paths of the nodes it owns, and its latest answers by request."""

    __slots__ = ("answers", "owned", "record")

    def __init__(self, record: SessionRecord) -> None:
        self.record = record
        self.owned: dict[str, None] = {}
        self.answers: SeenNumbers[str] = SeenNumbers()


class NodeTree:
    """Holds the master's nodes, counters and sessions, and makes one change after the other.

    The registry decides which changes there are; this only makes them. apply() raises KeyError for
    one
    that does not fit. Not thread-safe: changed in the master's reactor, and by the journal before
    that.
    Parts: the table at the file's head.
    """

    def __init__(self) -> None:
        self.version = 0
        self.nodes: dict[str, TreeNode] = {"": TreeNode("", 0, 0)}
        self.counters: dict[str, int] = {}
        self.sessions: dict[int, TreeSession] = {}

    def apply(self, change: Change) -> None:
        """Make one change. Raises KeyError for one that does not fit: a journal of another tree."""
        kind = change.kind
        if kind is Kind.PUT:
            self._put(change)
        elif kind is Kind.DELETE:
            self._delete(change.path)
        elif kind is Kind.COUNT:
            self._count(change)
        elif kind is Kind.OPEN:
            self.sessions[change.owner] = TreeSession(
                msgspec.json.decode(change.text, type=SessionRecord)
            )
        elif kind is Kind.END:
            del self.sessions[change.owner]
        else:
            self._answer(change)
        self.version += 1

    def _answer(self, change: Change) -> None:
        answers = self.sessions[change.owner].answers
        if not change.text:
            answers.forget(change.number)
            return
        answers.keep(change.number, change.text)
        if len(answers.kept) > ANSWERS_MAX:
            answers.forget(next(iter(answers.kept)))

    def _count(self, change: Change) -> None:
        if change.number:
            self.counters[change.path] = change.number
        else:
            self.counters.pop(change.path, None)  # as if it had never been counted

    def _put(self, change: Change) -> None:
        node = self.nodes.get(change.path)
        if node is not None:
            node.value, node.version = change.text, change.number
            return
        above, _, name = change.path.rpartition("/")
        self.nodes[above].children[name] = None
        self.nodes[change.path] = TreeNode(change.text, change.number, change.owner)
        if change.owner:
            self.sessions[change.owner].owned[change.path] = None

    def _delete(self, path: str) -> None:
        node = self.nodes.pop(path)
        above, _, name = path.rpartition("/")
        del self.nodes[above].children[name]
        self.counters.pop(path, None)  # of its sequence nodes
        if node.owner and node.owner in self.sessions:
            self.sessions[node.owner].owned.pop(path, None)

    def below(self, path: str) -> Iterator[tuple[str, TreeNode]]:
        """The node at `path` and all below it, parents first; nothing when there is none."""
        waiting = [path]
        while waiting:
            at = waiting.pop()
            node = self.nodes.get(at)
            if node is not None:
                yield at, node
                waiting.extend(f"{at}/{name}" for name in reversed(node.children))

    def snapshot(self) -> Iterator[Change]:
        """The changes that make this tree from an empty one;
        its version is the caller's to note.
        """
        for number, session in self.sessions.items():
            yield Change(Kind.OPEN, text=msgspec.json.encode(session.record).decode(), owner=number)
            if session.answers.floor:
                yield Change(Kind.ANSWER, number=session.answers.floor, owner=number)
            for request, answer in session.answers.kept.items():
                yield Change(Kind.ANSWER, text=answer, number=request, owner=number)
        for path, node in self.below(""):
            if path:
                yield Change(Kind.PUT, path, node.value, node.version, node.owner)
        for key, count in self.counters.items():
            yield Change(Kind.COUNT, key, number=count)

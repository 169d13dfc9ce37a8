"""Transitions that no scenario takes, or only under few of many seeds, and why: of each table by
its title, (state, event) -> one line, which names a test that takes it where there is one.

A reason speaks of what scenarios cannot do, or of a step that is too short to be met by chance. One
that merely has not been met yet belongs into a scenario.
"""

from __future__ import annotations

from collections.abc import Iterable

Pair = tuple[str, str]

LIFE = "tests/shard/test_connection_life.py takes it"
CALL = "tests/prpc_engine/test_call_state.py takes it"
ROLE = "tests/prpc_engine/kv/test_replica_role.py takes it"
SESSION = "tests/prpc_engine/test_session_states.py takes it"
FORK = "tests/prpc_engine/remote/test_references.py takes it"
PENDING = "tests/prpc_engine/test_pending.py takes it"


def _all(states: Iterable[str], events: Iterable[str], why: str) -> dict[Pair, str]:
    events = list(events)
    return {(state, event): why for state in states for event in events}


CONNECTION: dict[Pair, str] = {
    **_all(
        ("made", "up", "draining", "closed", "lost", "in fork"),
        ("forked",),
        f"simulated processes do not fork; {LIFE}",
    ),
    **_all(
        ("in fork",),
        ("attached", "peer hung up", "closed here", "peer lost", "broken"),
        f"simulated processes do not fork; {LIFE}",
    ),
    **_all(
        ("made", "up", "draining", "closed", "lost"),
        ("broken",),
        f"no peer of a scenario breaks the protocol, and memory is there; {LIFE}",
    ),
    ("made", "peer lost"): (
        f"a simulated connection hears of its end once it is attached, as its handshake is the "
        f"network's; {LIFE}"
    ),
    ("draining", "peer hung up"): (
        f"a simulated connection hangs up once, whatever its lanes; {LIFE}, over real sockets"
    ),
    ("draining", "closed here"): (
        f"needs close() while a handler of what a lost peer had sent waits: {LIFE}"
    ),
    **_all(
        ("closed", "lost"),
        ("attached",),
        f"the simulated network attaches no connection that has ended; {LIFE}, as real ones may",
    ),
    **_all(
        ("closed", "lost"),
        ("peer hung up", "closed here"),
        "needs two ends of a connection in one turn of its reactor, which a few seeds of a "
        f"hundred have; {LIFE}",
    ),
}

NUMBER: dict[Pair, str] = _all(
    ("new", "seen", "forgotten"),
    ("sender gone",),
    "needs over 4,096 senders; tests/prpc_engine/test_idempotency_window.py takes it with three",
)

REPLICA: dict[Pair, str] = {
    **_all(
        ("replica", "gone"),
        ("hand over asked",),
        f"needs the role to change between two steps of one look of the reconciler; {ROLE}",
    ),
    **_all(
        ("primary", "gone"),
        ("kept",),
        "needs the role to change while the reconciler, who alone tells of that, waits for an "
        f"answer about it; {ROLE}",
    ),
    ("primary", "named replica"): (
        f"a placement names another primary only after this one has handed over; {ROLE}"
    ),
    ("handing over", "named replica"): (
        f"the heir takes over only where all replicas were known to have everything; {ROLE}"
    ),
    **_all(
        ("handing over", "handed"),
        ("named primary",),
        f"the reconciler tells of a restore between two hand-overs, not within one; {ROLE}",
    ),
    ("handing over", "hand over asked"): (
        f"the reconciler asks one after the other, and keep() ends each that was not answered; "
        f"{ROLE}"
    ),
    ("handed", "hand over asked"): (
        "needs the change of the placement to fail at the master, and the session to outlive that: "
        f"{ROLE}"
    ),
    **_all(
        ("handing over", "handed"),
        ("left",),
        "needs a server to close between two messages, which a few seeds of a hundred have; "
        f"{ROLE}",
    ),
    ("handed", "kept"): (
        f"needs the heir to end between two messages, and before the master has heard; {ROLE}"
    ),
}

SESSIONS: dict[Pair, str] = {
    **_all(
        ("new", "missed"),
        ("asked",),
        "constructors of clients and services return once the session has been open; who asks "
        f"before is a shard; {SESSION}",
    ),
    ("over", "close"): f"clients and services close their session once; {SESSION}",
    **_all(
        ("over",),
        ("opened", "failed", "refused", "given up"),
        "needs close() between the end of an attempt and the step that hears of it, which a few "
        f"seeds of a thousand have; {SESSION}",
    ),
}

CALLS: dict[Pair, str] = {
    ("sending", "failure"): (
        "needs an answer with an error while the caller's thread stands still, which a few seeds "
        f"of a hundred have; {CALL}"
    ),
    ("waiting", "sent"): f"as above, and its connection lost within those 6 ms; {CALL}",
    ("sending", "ended with it"): f"as above, and a close() here within those 6 ms; {CALL}",
    ("sending", "cancelled"): f"as above, of a call that waited for its connection; {CALL}",
    **_all(
        ("waiting",),
        ("reply", "failure"),
        "needs an answer to an attempt that was late, while the call waits for its next one, which "
        f"a few seeds of a hundred have; {CALL}",
    ),
    **_all(
        ("waiting", "in flight", "answered", "failed"),
        ("not sent",),
        "needs the connection to be lost, and the call's owner to be told, while the caller's "
        f"thread stands still before it sends; {CALL}",
    ),
}

ONCE: dict[Pair, str] = {
    ("unkept", "asked"): (
        "needs the one answer that was too large to be lost, and its caller to ask again in time, "
        "which a few seeds of a hundred have; tests/prpc_engine/test_once_window.py takes it"
    ),
    ("forgotten", "caller gone"): (
        "needs over 16,384 callers; tests/prpc_engine/test_once_window.py takes it with two"
    ),
}

PLACES: dict[Pair, str] = {
    **_all(
        ("paused", "queued", "under way"),
        ("offered",),
        "offer() leaves a request alone that is elsewhere, and asks no table; "
        "tests/prpc_engine/test_pending.py holds it against the table",
    ),
    **_all(
        ("paused", "queued"),
        ("held", "sending", "delayed"),
        "what waits here is sent, and fails, nowhere else: needs two owners of one request; "
        f"{PENDING}",
    ),
    **_all(
        ("under way",),
        ("sending", "delayed"),
        f"needs two threads that send one request; {PENDING}",
    ),
    ("paused", "due"): f"no pause is made that would end after the deadline; {PENDING}",
}

QUEUES: dict[Pair, str] = {
    ("up", "found"): (
        "needs two threads that make the first call to one server at a time, which a few seeds of "
        "a hundred have"
    ),
}

REFERENCES: dict[Pair, str] = {
    **_all(("passed", "held"), ("pass",), f"needs an answer to its parent that is lost; {FORK}"),
    **_all(
        ("claimed", "held", "dropped"),
        ("claim",),
        f"needs an answer to its holder that is lost; {FORK}",
    ),
    ("dropped", "drop"): f"needs an answer to its holder that is lost; {FORK}",
    ("passed", "drop"): f"needs a message that cannot be sent once its references are told; {FORK}",
    ("claimed", "drop"): f"needs a claim and a drop before the word of the parent; {FORK}",
    ("dropped", "pass"): f"needs a claim and a drop before the word of the parent; {FORK}",
    **_all(
        ("claimed", "dropped"),
        ("holder gone", "parent gone"),
        f"needs a claim that comes before the word of its parent, and a death; {FORK}",
    ),
}
_REAL = "no scenario has such queues; tests/prpc_engine/vllm/test_message_queue.py takes it"
QUEUE_READERS: dict[Pair, str] = {
    ("awaited", "joined"): _REAL,
    ("up", "left"): _REAL,
    ("up", "lost"): _REAL,
}

ARGUED: dict[str, dict[Pair, str]] = {
    "A connection": CONNECTION,
    "A number of a sender": NUMBER,
    "A replica of a partition": REPLICA,
    "A session at the master": SESSIONS,
    "A call at its caller": CALLS,
    "A call marked once, at its server": ONCE,
    "A pending request": PLACES,
    "What waits for a destination": QUEUES,
    "A reference passed on, at the owner of its value": REFERENCES,
    "A reader of a queue with vLLM's face": QUEUE_READERS,
}

"""Promises of SECURITY.md and of the rules for retries, leases, ledgers and checkpoints, each with
a line that breaks it.

A mutation replaces `old`, which stands once in `file`, by `new`; the tests named beside it must
then fail. Where they pass, a promise has no test.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutation(NamedTuple):
    """One broken promise. `file` and `tests` are relative to the root; `tests` as pytest takes
    them.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str


ALLOW = "tests/prpc_engine/test_allow.py tests/prpc_engine/test_allow_in_a_job.py"
RETRY = "tests/prpc_engine/test_retry.py"
DEDUPE = "tests/prpc_engine/test_once_window.py"
LEDGER = "tests/prpc_engine/kv/test_ledger.py"
LEASES = "tests/shard/test_leases.py"
HANDSHAKE = "tests/shard/test_handshake.py"
CALLERS = "tests/shard/test_callers.py"
ON_DISK = "tests/prpc_engine/test_on_disk.py"
IDENTITY = "tests/prpc_engine/test_identity.py"
FRAME = "tests/shard/test_frame.py"
HOSTILE = "tests/prpc_engine/test_archive_hostile.py"
CHECKED = "tests/shard/test_checked.py"
RING = "tests/shard/test_ring.py"

MUTATIONS = (
    # -- who may call what -------------------------------------------------------------------------
    Mutation(
        "a rule lets every method through",
        "prpc_engine/settings/allow.py",
        "and any(fnmatchcase(method, pattern) for pattern in self.methods)",
        "and any(True for pattern in self.methods)",
        ALLOW,
    ),
    Mutation(
        "a rule lets everybody through",
        "prpc_engine/settings/allow.py",
        "and any(_is(identity, who) for who in self.who)",
        "and any(True for who in self.who)",
        ALLOW,
    ),
    Mutation(
        "any secret is the one that a rule names",
        "prpc_engine/settings/allow.py",
        "return identity.secret == name",
        "return bool(identity.secret)",
        ALLOW,
    ),
    Mutation(
        "a user of another number is the same user",
        "prpc_engine/settings/allow.py",
        'return kind == "any" or identity.same_user',
        'return kind == "any" or True',
        ALLOW,
    ),
    Mutation(
        "the allow list is not asked for plain methods",
        "prpc_engine/rpc/server.py",
        "        if self._allow is not None and self._forbids(peer, call_id, "
        "key):\n            return\n        try:",
        "        if False:\n            return\n        try:",
        IDENTITY,
    ),
    Mutation(
        "the allow list is not asked for async, stream and once methods",
        "prpc_engine/rpc/server.py",
        "if self._allow is not None and self._forbids(peer, call_id, "
        "key):\n            return\n        if self._is_doubled",
        "if False:\n            return\n        if self._is_doubled",
        IDENTITY,
    ),
    Mutation(
        "a repeat of another method or peer is answered",
        "prpc_engine/rpc/repeats.py",
        "if first_key != key or not _is_the_same(first, connection.peer_identity):",
        "if False:",
        IDENTITY,
    ),
    Mutation(
        "a name is believed without its proof",
        "shard/transport/callers.py",
        "return hmac.compare_digest(proof, known.proof(transcript))",
        "return True",
        CALLERS,
    ),
    Mutation(
        "an acceptor believes any proof of the secret",
        "shard/transport/handshake.py",
        "if not hmac.compare_digest(proof, expected):",
        "if False:",
        HANDSHAKE,
    ),
    # -- who is there ------------------------------------------------------------------------------
    Mutation(
        "a hello of another version is taken",
        "shard/transport/handshake.py",
        "if version != HANDSHAKE_VERSION:",
        "if False:",
        HANDSHAKE,
    ),
    Mutation(
        "a lane beyond the limit is taken",
        "shard/transport/handshake.py",
        "if not number < count <= lanes_max:",
        "if not number < count:",
        HANDSHAKE,
    ),
    # -- calls that may have run -------------------------------------------------------------------
    Mutation(
        "a call that may have run is retried though it is not idempotent",
        "prpc_engine/client/retry.py",
        "if isinstance(error, MaybeExecuted | DeadlineExceeded) and not is_idempotent:",
        "if isinstance(error, DeadlineExceeded) and not is_idempotent:",
        RETRY,
    ),
    Mutation(
        "a repeat of a once method goes to another process",
        "prpc_engine/client/retry.py",
        "            self.only = route\n",
        "            self.only = None\n",
        f"{RETRY} tests/prpc_engine/test_once.py",
    ),
    Mutation(
        "retries have no bound of attempts",
        "prpc_engine/client/retry.py",
        "if self._sent >= self._policy.attempts_max:",
        "if self._sent >= 1000 * self._policy.attempts_max:",
        RETRY,
    ),
    Mutation(
        "retries take nothing from the budget",
        "prpc_engine/client/retry.py",
        "            self._saved -= 1.0\n",
        "            self._saved -= 0.0\n",
        RETRY,
    ),
    Mutation(
        "an error claims that nothing ran where an earlier attempt may have",
        "prpc_engine/client/retry.py",
        "if self.may_have_run and isinstance(error, (NotSent, *DID_NOT_RUN)):",
        "if False:",
        RETRY,
    ),
    Mutation(
        "what is below a caller's floor runs again",
        "prpc_engine/rpc/once.py",
        "if callers.find(caller, call_id) is NEW and not (",
        "if not (",
        DEDUPE,
    ),
    Mutation(
        "a forgotten caller's repeat runs again",
        "prpc_engine/rpc/once.py",
        "is_repeat and callers.senders_forgotten and caller not in callers",
        "False",
        DEDUPE,
    ),
    Mutation(
        "a verb whose answer the master has forgotten is served again",
        "prpc_engine/master/namespace.py",
        "if answers.find(request) is FORGOTTEN:",
        "if False:",
        "tests/prpc_engine/test_registry.py",
    ),
    # -- pushes ------------------------------------------------------------------------------------
    Mutation(
        "a push that was applied is applied again",
        "prpc_engine/idempotency_window.py",
        "        if number in self.kept:\n            return SEEN\n",
        "        if number in self.kept:\n            return NEW\n",
        LEDGER,
    ),
    Mutation(
        "a push from below the window is applied again",
        "prpc_engine/idempotency_window.py",
        "return SEEN if number > self.highest - window else FORGOTTEN",
        "return SEEN if number > self.highest - window else NEW",
        LEDGER,
    ),
    Mutation(
        "two ledgers that come together forget what one has applied",
        "prpc_engine/idempotency_window.py",
        "for each in (*self.kept, *other.kept) if each > self.floor",
        "for each in other.kept if each > self.floor",
        LEDGER,
    ),
    # -- leases ------------------------------------------------------------------------------------
    Mutation(
        "a lease may be returned twice",
        "shard/memory/leases.py",
        "        entry = self._lent.pop(lease, None)\n        if entry is None:\n            raise",
        "        entry = self._lent.pop(lease, None)\n        if entry is None:\n            "
        "return\n            raise",
        LEASES,
    ),
    Mutation(
        "a block that was lent is never free again",
        "shard/memory/leases.py",
        "        # failpoint: lease.taken_back\n"
        "        release = self._release\n        release(entry[0])\n",
        "        # failpoint: lease.taken_back\n",
        LEASES,
    ),
    Mutation(
        "a peer may lend under a number that is held",
        "shard/memory/leases.py",
        'returned twice.\n        """\n        if lease in self.held_since:',
        'returned twice.\n        """\n        if False:',
        LEASES,
    ),
    Mutation(
        "what is lent can be mapped for writing",
        "shard/memory/segment.py",
        "(future_write_seal() if lent else 0)",
        "0",
        "tests/shard/test_segment.py",
    ),
    Mutation(
        "a segment that its maker can cut short is mapped",
        "shard/memory/segment.py",
        "or seals & seals_wanted != seals_wanted",
        "or False",
        "tests/shard/test_segment.py",
    ),
    Mutation(
        "a sparse segment is mapped",
        "shard/memory/segment.py",
        "if status.st_size < 1 or status.st_blocks * 512 < status.st_size:",
        "if status.st_size < 1:",
        "tests/shard/test_segment.py",
    ),
    # -- files -------------------------------------------------------------------------------------
    Mutation(
        "a checkpoint's files can be read by others",
        "prpc_engine/kv/checkpoint/files.py",
        "FILE_MODE = 0o600",
        "FILE_MODE = 0o666",
        ON_DISK,
    ),
    Mutation(
        "the journal can be read by others",
        "prpc_engine/master/journal.py",
        "FILE_MODE = 0o600",
        "FILE_MODE = 0o666",
        ON_DISK,
    ),
    Mutation(
        "others may look into the folders of journals and checkpoints",
        "prpc_engine/durable.py",
        "FOLDER_MODE = 0o700",
        "FOLDER_MODE = 0o777",
        ON_DISK,
    ),
    Mutation(
        "what the journal acknowledged is not on the disk",
        "prpc_engine/master/journal.py",
        "runtime.fdatasync(self._fd)",
        "os.fstat(self._fd)",
        ON_DISK,
    ),
    Mutation(
        "a checkpoint counts before its data are on the disk",
        "prpc_engine/kv/checkpoint/files.py",
        '        """What was written is on the disk when this returns."""\n'
        "        runtime.fsync(fd)\n",
        '        """What was written is on the disk when this returns."""\n',
        ON_DISK,
    ),
    Mutation(
        "a checkpoint counts before its name is on the disk",
        "prpc_engine/durable.py",
        "    try:\n        runtime.fsync(fd)\n    finally:",
        "    try:\n        pass\n    finally:",
        ON_DISK,
    ),
    Mutation(
        "the journal follows a link",
        "prpc_engine/master/journal.py",
        "os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC",
        "os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC",
        ON_DISK,
    ),
    # -- bytes on their way ------------------------------------------------------------------------
    Mutation(
        "a payload is believed without its checksum",
        "shard/transport/checked.py",
        "if TAIL.unpack_from(staging, end)[0] != check:",
        "if False:",
        CHECKED,
    ),
    Mutation(
        "a length is believed without its checksum",
        "shard/transport/checked.py",
        "!= head_check:",
        "is None:",
        CHECKED,
    ),
    Mutation(
        "a record is written over the end of its ring",
        "shard/memory/ring.py",
        "padding = room_to_end if need > room_to_end else 0",
        "padding = 0",
        RING,
    ),
)

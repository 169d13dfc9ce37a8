"""What a lease looks like on the books: who holds what since when, and in debug mode which line of
code lent it.

    Lease   on the lender's side: a block of ours that a peer may read
    Held    on the borrower's side: memory of a peer that an array of ours still shows

Both are snapshots for people who look for a leak; nothing decides by them. PRPC_DEBUG_LEASES=1
makes every lease note the first line outside this project that led to the send. That walks the
stack once a lease, some microseconds, so it is off by default.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from types import FrameType

DEBUG_VARIABLE = "PRPC_DEBUG_LEASES"
DEBUG_VALUES = {"0": False, "1": True}
OUR_PACKAGES = ("shard", "prpc_engine")  # frames of these are how a send came about, not where


@dataclass(frozen=True)
class Lease:
    """A snapshot of one lease, as the lender has it: the right of a peer to read one block of our
    slab, which cannot be used again before the lease comes back.
    """

    number: int
    """Counts from 1 on each connection; with `borrower` it names the lease, and the borrower's Held
    has the same number.
    """
    borrower: str
    """The peer, as its connection calls it."""
    segment: int
    """Number of the segment that the block lies in, as in the messages to the peer."""
    offset: int
    """Of the block in its segment, in bytes."""
    block_bytes: int
    """Size of the whole block: what cannot be used for anything else while the lease lasts."""
    size_bytes: int
    """How much of it the peer was lent."""
    since_s: float
    """When it was lent, on the slab's clock (monotonic seconds)."""
    connection_ended: bool
    """Whether the connection is over and the block waits for the peer to hang up, which it does
    with its last array.
    """
    call_site: str | None
    """"file:line in function" of the send, with PRPC_DEBUG_LEASES=1; else None."""


@dataclass(frozen=True)
class Held:
    """Memory of a peer that some array, view or memoryview of this process still shows."""

    lease: int
    """The lender's number for it."""
    lender: str
    """The peer, as its connection calls it."""
    size_bytes: int
    """Length of the array that arrived."""
    since_s: float
    """When it arrived, in monotonic seconds."""


def debug_leases() -> bool:
    """Whether PRPC_DEBUG_LEASES asks for call sites. Raises ValueError."""
    text = os.environ.get(DEBUG_VARIABLE, "0")
    if text not in DEBUG_VALUES:
        raise ValueError(
            f"{DEBUG_VARIABLE}={text!r}: 1 (every lease notes its call site) or 0 is allowed; "
            "unset it for the default"
        )
    return DEBUG_VALUES[text]


def call_site() -> str:
    """ "file:line in function" of the innermost caller that is not of this project."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in OUR_PACKAGES:
            return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return "a thread of our own: no frame outside this project"

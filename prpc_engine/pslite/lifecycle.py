"""start() and finalize(): the one Postoffice of this process, and which of its customers use it.

state     event                         next
outside   start(), start_async()        inside; start() also waits until everybody has started
inside    start() of another customer   inside, with one more place
inside    finalize(customer_id != 0)    inside
inside    finalize(0)                   outside: the exit callback runs; start() may come again
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable

from prpc_engine import errors
from prpc_engine.pslite import ids
from prpc_engine.pslite.environment import JobSettings
from prpc_engine.pslite.postoffice import BARRIER_TIMEOUT_S, START_TIMEOUT_S, Postoffice
from prpc_engine.settings.config import check_timeout
from shard import runtime

logger = logging.getLogger("prpc")
LEVELS = logging.WARNING, logging.INFO, logging.DEBUG  # of the log, by PS_VERBOSE
_changing = runtime.RLock()  # start and finalize may come from any thread, and call each other
_postoffice: Postoffice | None = None
_exit_callback: Callable[[], object] | None = None
_left_job = 0  # that this process was in before


def start(
    customer_id: int = 0,
    role: str | None = None,
    rank: int = -1,
    do_barrier: bool = True,
    timeout_s: float = START_TIMEOUT_S,
) -> int:
    """Join the job that the DMLC_* variables describe; the node id. With do_barrier returns when
    all have started.

    role, rank  go before DMLC_ROLE and DMLC_RANK; -1: the smallest rank that is free
    timeout_s   for the scheduler and a free place, and for the barrier once more

    Raises ConfigError, AddressInUse, MasterUnreachable, AuthenticationFailed, DeadlineExceeded (who
    is missing)."""
    global _postoffice
    check_timeout(timeout_s, math.inf)
    with _changing:
        is_first = _postoffice is None
        if _postoffice is None:
            settings = JobSettings.from_environment(os.environ, role, rank)
            _be_verbose(settings.verbose)
            _postoffice = Postoffice(settings, timeout_s, _left_job)
        postoffice = _postoffice
        if is_first:
            try:  # alone: another customer of this process would take the rank that this one wants
                node = postoffice.add_customer(customer_id, postoffice.settings.rank, timeout_s)
                os.environ["DMLC_RANK"] = str(postoffice.my_rank)
            except BaseException:
                _leave(postoffice)
                raise
        elif role not in (None, postoffice.role):
            raise errors.ConfigError(
                f"start({customer_id}, {role!r}): this process is a {postoffice.role}, "
                "and so are all of its customers"
            )
    try:
        if not is_first:
            node = postoffice.add_customer(customer_id, rank, timeout_s)
        logger.info(
            "%s (id %d) has joined the job at %s", ids.name_of(node), node, postoffice.settings.root
        )
        if do_barrier:
            postoffice.barrier(customer_id, ids.ALL, timeout_s)
    except BaseException:
        if is_first:
            _leave(postoffice)
        raise
    return node


def start_async(
    customer_id: int = 0,
    role: str | None = None,
    rank: int = -1,
    timeout_s: float = START_TIMEOUT_S,
) -> int:
    """start() without the barrier: the way in for a node that takes the place of one that died."""
    return start(customer_id, role, rank, False, timeout_s)


def finalize(
    customer_id: int = 0, do_barrier: bool = True, timeout_s: float = BARRIER_TIMEOUT_S
) -> None:
    """Leave the job; with do_barrier when all have come here. Only customer 0 ends this process's
    part in it, also where the barrier fails, whose error is raised then: DeadlineExceeded says who
    is missing."""
    postoffice = get_postoffice()
    is_open = False
    try:
        if do_barrier:
            postoffice.barrier(customer_id, ids.ALL, timeout_s)
            is_open = True
    finally:
        if customer_id == 0:
            _leave(postoffice, is_open)


def _leave(postoffice: Postoffice, after_barrier: bool = False) -> None:
    global _postoffice, _exit_callback, _left_job
    postoffice.close(after_barrier)
    with _changing:
        if _postoffice is postoffice:
            _postoffice = None
            _left_job = postoffice.job if after_barrier else 0
        callback, _exit_callback = _exit_callback, None
    logger.info("%s has left the job at %s", postoffice.role, postoffice.settings.root)
    if callback is not None:
        callback()


def _be_verbose(verbose: int) -> None:
    """The log as PS_VERBOSE wants it: on stderr, where the application has arranged for nothing
    else.
    """
    if verbose:
        logger.setLevel(LEVELS[min(verbose, len(LEVELS) - 1)])
        if not logger.hasHandlers():
            logger.addHandler(logging.StreamHandler())


def register_exit_callback(callback: Callable[[], object]) -> None:
    """Run callback() at the end of finalize(0); the last one registered counts."""
    global _exit_callback
    _exit_callback = callback


def get_postoffice() -> Postoffice:
    """That of this process. Raises Closed where it has not started, or has left."""
    postoffice = _postoffice
    if postoffice is None:
        raise errors.Closed(
            "this process is in no job: start() comes first, and finalize() ends it"
        )
    return postoffice


def num_workers() -> int:
    """Workers of the job."""
    return get_postoffice().settings.workers


def num_servers() -> int:
    """Servers of the job."""
    return get_postoffice().settings.servers


def my_rank() -> int:
    """This node's number within its role."""
    return get_postoffice().my_rank


def is_worker() -> bool:
    """Whether this process is one; a joint one is both."""
    return "worker" in get_postoffice().settings.roles


def is_server() -> bool:
    """Whether this process is one; a joint one is both."""
    return "server" in get_postoffice().settings.roles


def is_scheduler() -> bool:
    """Whether this process is it."""
    return get_postoffice().role == "scheduler"

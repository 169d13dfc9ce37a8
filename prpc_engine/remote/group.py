"""The verbs of this process's worker, under the names of torch.distributed.rpc."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prpc_engine import errors
from prpc_engine.remote import current
from prpc_engine.remote.calls import as_runtime_error
from prpc_engine.remote.current import WorkerInfo
from prpc_engine.remote.future import Future
from prpc_engine.remote.options import Options
from prpc_engine.remote.rendezvous import parse
from prpc_engine.remote.rref import RRef
from prpc_engine.remote.worker import Worker
from prpc_engine.rpc.context import is_asked
from shard import ForkedError, runtime

To = str | WorkerInfo | int

_worker: Worker | None = None  # None in a simulation, where each process has one of its own


def _here() -> Worker | None:
    found: Worker | None = _worker or current.simulated("remote worker")
    return found


def _current() -> Worker:
    worker = _here()
    if worker is None:
        raise current.no_worker()
    return worker


def _set_current(worker: Worker | None) -> None:
    global _worker
    if runtime.shares_process:
        runtime.put("remote worker", worker)
    else:
        _worker = worker
    current.set_home(None if worker is None else worker.values)


def init_rpc(
    name: str,
    rank: int | None = None,
    world_size: int | None = None,
    init_method: str | None = None,
    options: Options | None = None,
    *,
    backend: Any = None,
    rpc_backend_options: Options | None = None,
) -> None:
    """Make this process a worker of a group, until shutdown().

    name         of this worker, unique in the group
    rank         of this worker, unique as well; rank 0 serves the group's master
    world_size   how many workers there are: it waits for all of them. None: workers come and go,
                 and it waits for nobody
    init_method  where they meet: "env://" (the default: MASTER_ADDR, MASTER_PORT, RANK and
                 WORLD_SIZE), "tcp://host:port", "file:///path", or "prpc://host:port" of a running
                 `prpc master`, which gives ranks as well
    options      see Options; `rpc_backend_options` is torch's name for it, `backend` has no effect

    Raises ConfigError for what makes no sense, a name or rank that is taken; MasterUnreachable,
    AuthenticationFailed, AddressInUse, and DeadlineExceeded with who came where others did not.
    """
    options = options or rpc_backend_options or Options()
    if not isinstance(options, Options):
        raise errors.ConfigError(
            f"options={options!r:.100}: prpc_engine.remote.Options(...) is expected"
        )
    before = _here()
    if before is not None and before.is_of_parent:
        raise ForkedError(
            f"init_rpc({name!r:.100}): this process was forked from worker {before.name!r}, whose "
            "engine does not work here: start processes by spawn or forkserver"
        )
    if before is not None:
        raise errors.ConfigError(
            f"init_rpc({name!r:.100}): this process is worker {before.name!r} already; "
            "call shutdown() first"
        )
    where = parse(init_method or options.init_method or "env://", rank, world_size, os.environ)
    worker = Worker(name, where, options)
    # before it serves: functions that others call may use these verbs
    _set_current(worker)
    try:
        worker.join()
    except BaseException:
        _set_current(None)
        worker.close()
        raise
    runtime.at_exit(_leave_at_exit, worker)


def shutdown(graceful: bool = True, timeout: float | None = None) -> None:
    """Leave the group.

    graceful  with a world size wait for all workers that live to call it, and until no call is
              under way among them and no function runs; without one, and where False, leave at
              once: calls that are under way end with Closed
    timeout   seconds for that, else Options.shutdown_timeout_s. Until a minute before its end the
              functions that others call run in this thread: one that blocks for good in it keeps
              shutdown() for good

    Raises DeadlineExceeded with who has not called it, or where calls go on: then this worker is
    still in the group; and ConfigError in a function that another worker called, which waited for
    its own end, where graceful. In a process that is no worker, does nothing.
    """
    worker = _here()
    if worker is None:
        return
    if graceful and is_asked():
        raise as_runtime_error(
            errors.ConfigError(
                f"shutdown() of {worker.name!r} in a function that a worker called: it waits until "
                "no function runs, and this one does. Let the function say so to the worker's own "
                "program, which calls shutdown(), or call shutdown(graceful=False)"
            )
        )
    if graceful:
        worker.wait_for_all(timeout)
    _end(worker, graceful)


def _end(worker: Worker, graceful: bool) -> None:
    runtime.not_at_exit(_leave_at_exit)
    try:
        worker.close(graceful)
    finally:
        _set_current(None)


def _leave_at_exit(worker: Worker) -> None:
    """The program ends without shutdown(): the others hear of it at once."""
    if _here() is worker and not worker.closed:
        worker.close()
        _set_current(None)


def get_worker_info(worker_name: str | None = None) -> WorkerInfo:
    """Of the worker of that name; None: this one. Raises UnknownWorker, NoWorker, ConfigError."""
    return _current().members.info(worker_name)


def get_worker_infos() -> list[WorkerInfo]:
    """Of all workers that are there, in order of rank. Raises NoWorker."""
    return _current().members.infos()


def _name(to: To) -> str:
    """The name of the worker, for a call that checks it; "" where `to` is a rank."""
    return to.name if isinstance(to, WorkerInfo) else ""


def rpc_sync(
    to: To,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float | None = None,
) -> Any:
    """func(*args, **kwargs) at a worker: what it returns. Blocks.

    to       its name, WorkerInfo or rank
    timeout  seconds, else Options.rpc_timeout; 0: as long as the connection lasts

    Raises the very exception that the function raised, with its traceback there as the cause; and
    UnknownWorker, DeadlineExceeded, MaybeExecuted (sent, then the worker was lost), NotSent,
    BadArguments, each a RuntimeError but the last.
    """
    worker = _worker or _current()
    rank = worker.members.rank_of(to, timeout)
    meant = to if type(to) is str else _name(to)
    return worker.calls.call(rank, "run", (meant,), func, args or (), kwargs, timeout)


def rpc_async(
    to: To,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float | None = None,
) -> Future:
    """As rpc_sync(), without waiting: the Future of it."""
    worker = _worker or _current()
    rank = worker.members.rank_of(to, timeout)
    meant = to if type(to) is str else _name(to)
    return worker.calls.submit(rank, "run", (meant,), func, args or (), kwargs, timeout)


def remote(
    to: To,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float | None = None,
) -> RRef[Any]:
    """Have a worker call func(*args, **kwargs), and keep what it returns: an RRef to it, without
    waiting. What the function raises is raised where the RRef is used.
    """
    worker = _worker or _current()
    return worker.values.create(
        worker.members.rank_of(to, timeout), func, args or (), kwargs, timeout
    )


def get_rpc_timeout() -> float:
    """Seconds that a verb has which is given no timeout: Options.rpc_timeout, or what was set
    since. 0: as long as the connection lasts. Raises NoWorker.
    """
    return _current().calls.rpc_timeout


def set_rpc_timeout(seconds: float) -> None:
    """Give verbs of this worker that say nothing themselves so many seconds, from the next one on;
    0: as long as the connection lasts. Raises ConfigError, NoWorker.
    """
    _current().calls.set_rpc_timeout(seconds)


def is_available() -> bool:
    """True: torch's may have been built without rpc."""
    return True


def statistics() -> dict[str, int]:
    """Of this worker: `values` that others or it refer to, `references` to them that are known, and
    `overtaken` functions, beside which others ran as they took long. Raises NoWorker.
    """
    return _current().statistics()

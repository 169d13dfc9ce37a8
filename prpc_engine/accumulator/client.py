"""AccumulatorClient: sends the counters of this process to the servers (sender.py), and reads them
back.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from prpc_engine import errors
from prpc_engine.accumulator import snapshot_file
from prpc_engine.accumulator.aggregator import Aggregator, restored
from prpc_engine.accumulator.counter import CounterSet, check_name, default_counters
from prpc_engine.accumulator.flushing import RETRY, PushTarget
from prpc_engine.accumulator.sender import AccumulatorStatistics, CounterSender, Failure
from prpc_engine.client.client import RpcClient
from prpc_engine.client.retry import AT_ONCE
from prpc_engine.rpc.call import Call
from prpc_engine.service.service import RpcService
from prpc_engine.settings.config import check_timeout
from shard import runtime

logger = logging.getLogger("prpc")

SERVICE_NAME = "accumulator"
TIMEOUT_S = 30.0  # of a verb: long for a call, short for a person
SERVERS_MAX = 1024
CLOSE_TIMEOUT_S = 5.0  # at close(), for servers that do not answer
MIN_ASK_S = 1.0  # when waiting for values took all the time: those who live answer at once

# did not run, or may run twice: ask again
NOT_RUN = (errors.NotSent, errors.UnknownService, errors.MaybeExecuted)


def _client_of(service: RpcService, name: str, servers: int, timeout_s: float) -> RpcClient:
    """A client that knows the servers 0 to servers - 1, and no others: by its id a name's server is
    the same in every process, also while some of them are dead. Raises NoServer, ConfigError."""
    check_timeout(timeout_s)
    deadline_s = runtime.monotonic() + timeout_s
    while True:
        client = service.create_client(
            name, servers, max(0.0, deadline_s - runtime.monotonic()), retry=AT_ONCE
        )
        known = client.server_ids
        missing = sorted(set(range(servers)) - set(known))
        more = [server_id for server_id in known if server_id >= servers]
        if not missing and not more:
            return client
        client.close()
        if more:
            raise errors.ConfigError(
                f"servers={servers!r}, and {name!r} has the servers {list(known)}: "
                "clients of another number look for counters "
                "elsewhere; give all clients the number that there are, with ids from 0 on"
            )
        if runtime.monotonic() >= deadline_s:
            raise errors.NoServer(
                f"{name!r} has the servers {list(known)}, and {missing} did not appear within "
                f"{timeout_s} s: start them, with server_id={missing[0]} where others run"
            )
        runtime.sleep(RETRY.first_s)


def ask_all(
    client: RpcClient, server_ids: Iterable[int], method: str, args: Sequence[Any], timeout_s: float
) -> tuple[dict[int, Any], dict[int, Exception]]:
    """Call all of these servers at once: the answers, and the failures, by server id."""
    calls: dict[int, Call] = {}
    answers: dict[int, Any] = {}
    failed: dict[int, Exception] = {}
    for server_id in server_ids:
        try:
            calls[server_id] = client.submit_to(server_id, method, *args, timeout_s=timeout_s)
        except Failure as error:
            failed[server_id] = error
    for server_id, call in calls.items():
        try:
            answers[server_id] = call.result()
        except Failure as error:
            failed[server_id] = error
    return answers, failed


class Snapshot(dict[str, Aggregator]):
    """{name: aggregator}, sorted by name. `missing`: what could not be had, and why; empty when it
    is whole.
    """

    def __init__(self, counters: Iterable[tuple[str, Aggregator]], missing: dict[str, str]) -> None:
        super().__init__(counters)
        self.missing = missing


class AccumulatorClient:
    """An accumulator client sends the counters of this process to the servers, and reads them back.

    Thread-safe; a context manager; close() before the RpcService it was made with. Who writes to a
    counter never waits for what is sent.

    service    an open RpcService
    servers    how many accumulator servers there are, with the ids 0 to servers - 1: the same
               number in every process, since it decides which has which name
    name       what they are called
    counters   which counters to send: those of the process unless given. One client sends a set at
               a time
    timeout_s  for the servers to appear

    Raises NoServer when one of them is missing, ConfigError when there are more, or another client
    sends these counters.
    """

    def __init__(
        self,
        service: RpcService,
        servers: int = 1,
        name: str = SERVICE_NAME,
        counters: CounterSet = default_counters,
        timeout_s: float = 10.0,
    ) -> None:
        if (
            isinstance(servers, bool)
            or not isinstance(servers, int)
            or not 1 <= servers <= SERVERS_MAX
        ):
            raise errors.ConfigError(
                f"servers={servers!r}: a whole number from 1 to {SERVERS_MAX} is allowed"
            )
        self._service, self._name, self.counters = service, name, counters
        self._client = _client_of(service, name, servers, timeout_s)
        self._sender = CounterSender(self._client, service.driver, name, servers, counters)
        with ExitStack() as undoing:
            undoing.callback(self._client.close)
            counters.attach(self, self._sender.wake)
            undoing.callback(counters.detach)
            self._sender.start()
            undoing.pop_all()
        runtime.at_exit(self.close)  # what was written last is sent, although nobody closed us

    # -- verbs -------------------------------------------------------------------------------------

    def try_read(self, name: str, timeout_s: float = TIMEOUT_S) -> Aggregator | None:
        """What the server has of a counter, None when it has none of that name.

        That is what has been flushed by all processes; wait_empty() first to see one's own last
        writes in it.
        """
        check_name(name)
        answer = self._ask(self._sender.server_of(name), "read", name, timeout_s=timeout_s)
        return None if answer is None else restored(*answer)

    def read(self, name: str, timeout_s: float = TIMEOUT_S) -> Aggregator:
        """As try_read(). Raises Rejected when there is none of that name."""
        found = self.try_read(name, timeout_s)
        if found is None:
            raise errors.Rejected(
                f"server {self._sender.server_of(name).server_id} of {self._name!r} has no counter "
                f"{name!r}: "
                "it appears with its first flush"
            )
        return found

    def reset(self, *names: str, timeout_s: float = TIMEOUT_S) -> None:
        """Begin these counters anew, after what was written in this process before. Raises as
        wait_empty().
        """
        self._change("reset", names, timeout_s)

    def erase(self, *names: str, timeout_s: float = TIMEOUT_S) -> None:
        """Forget these counters, after what was written in this process before; the next flush
        makes them again.
        """
        self._change("erase", names, timeout_s)

    def _change(self, method: str, names: Sequence[str], timeout_s: float) -> None:
        for name in names:
            check_name(name)
        self._sender.drain(timeout_s)
        for server in self._sender.servers:
            here = [name for name in names if self._sender.server_of(name) is server]
            if here:
                self._ask(server, method, here, timeout_s=timeout_s)
        for name in names:
            counter = self.counters.get(name)
            if counter is not None:
                counter.refusal = None

    def erase_all(self, timeout_s: float = TIMEOUT_S) -> None:
        """Forget every counter on every server, after what was written in this process before."""
        self._sender.drain(timeout_s)
        for server in self._sender.servers:
            self._ask(server, "erase_all", timeout_s=timeout_s)
        for counter in self.counters.all():
            counter.refusal = None

    def snapshot(self, timeout_s: float = TIMEOUT_S) -> Snapshot:
        """Every counter of every server by name, and in `.missing` what could not be had.

        What this process wrote before is in it, and what others had acknowledged before. A push of
        any process to a server is in it whole or not at all; between two servers, or the counters
        on them, there is no common moment.

        A server that does not answer, or a counter that cannot be told, takes nothing from the
        others: `.missing` names it, and a warning of the log does. Half of `timeout_s` is for
        values of this process to be acknowledged. Raises Closed.
        """
        check_timeout(timeout_s)
        missing: dict[str, str] = {}
        deadline_s = runtime.monotonic() + timeout_s
        try:
            self._sender.drain(timeout_s / 2)
        except errors.DeadlineExceeded as error:
            missing["values of this process"] = str(error)
        answers, failed = self._ask_all("fetch", "read_all", deadline_s=deadline_s)
        missing |= {
            f"server {server_id} of {self._name!r}": str(error)
            for server_id, error in failed.items()
        }
        found: dict[str, Aggregator] = {}
        for packed in answers:
            states, untold = snapshot_file.unpacked(packed)
            missing |= {f"counter {name!r}": reason for name, reason in untold.items()}
            for name, kind, parameters, state in states:
                try:
                    found[name] = restored(kind, parameters, state)
                except Exception as error:  # an aggregator may be anybody's, and unknown here
                    missing[f"counter {name!r}"] = f"{type(error).__name__}: {error}"
        if missing:
            logger.warning(
                "the snapshot of %r lacks %s",
                self._name,
                "; ".join(f"{what}: {why}" for what, why in missing.items()),
            )
        return Snapshot(sorted(found.items()), missing=missing)

    def wait_empty(self, timeout_s: float = TIMEOUT_S) -> None:
        """Wait until everything written in this process before is acknowledged: merged at its
        server, or refused.

        Not in a handler, which would keep the very reactor waiting that brings the answer.

        Raises DeadlineExceeded with what is missing, BadArguments when values could not be merged
        since the last call (though a write() may have told of them), or a server refuses a counter
        of ours, Closed.
        """
        self._sender.drain(timeout_s)
        lost = [loss for one in self.counters.all() if (loss := one.take_loss()) is not None]
        refused = [
            f"{one.name!r}: {refusal}"
            for one in self.counters.all()
            if (refusal := one.refusal) is not None
        ]
        if lost:
            raise errors.BadArguments("; ".join([*lost, *refused]))
        if refused:
            raise errors.BadArguments(
                f"{len(refused)} counters are refused, and what is written to them is lost: "
                f"{'; '.join(refused)}"
            )

    def statistics(self) -> AccumulatorStatistics:
        """A snapshot."""
        return self._sender.statistics()

    # -- asking ------------------------------------------------------------------------------------

    def _ask(self, server: PushTarget, method: str, *args: Any, timeout_s: float) -> Any:
        """Call a server, again when it cannot have run: while it is being restarted, say. All verbs
        may run twice.
        """
        check_timeout(timeout_s)
        deadline_s = runtime.monotonic() + timeout_s
        while True:
            self._sender.check_open()
            left_s = max(0.0, deadline_s - runtime.monotonic())
            try:
                return self._client.call_to(server.server_id, method, *args, timeout_s=left_s)
            except NOT_RUN:
                if runtime.monotonic() + RETRY.first_s >= deadline_s:
                    raise
                runtime.sleep(RETRY.first_s)
                self._sender.look_up()

    def _ask_all(
        self, method: str, *args: Any, deadline_s: float
    ) -> tuple[list[Any], dict[int, Exception]]:
        """Call all servers at once, and those again for which it cannot have run, until the
        deadline: answers, and failures.
        """
        answers: list[Any] = []
        failed: dict[int, Exception] = {}
        left = [server.server_id for server in self._sender.servers]
        while left:
            self._sender.check_open()
            done, errors_now = ask_all(
                self._client, left, method, args, max(MIN_ASK_S, deadline_s - runtime.monotonic())
            )
            answers += done.values()
            failed = {
                server_id: error for server_id, error in failed.items() if server_id not in done
            } | errors_now
            left = [one for one, error in errors_now.items() if isinstance(error, NOT_RUN)]
            if left and runtime.monotonic() + RETRY.first_s >= deadline_s:
                break
            if left:
                runtime.sleep(RETRY.first_s)
                self._sender.look_up()
        return answers, failed

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> int:
        """Send what was written, and stop: how many values were given up because no server took
        them within `timeout_s`.

        They are logged, too. Counters stay, and what is written to them from now on waits for the
        next client. Again, or in a fork: does nothing.
        """
        check_timeout(timeout_s)
        lost = self._sender.close(timeout_s)
        runtime.not_at_exit(self.close)
        return lost

    def __enter__(self) -> AccumulatorClient:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

"""A worker: this process as a member of a group, under a name and a rank. At the group's master it
is a server of service "prpc.remote", whose id is its rank, and a node of the tree (members.py).
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re

from prpc_engine import errors
from prpc_engine.master.client import MasterClient
from prpc_engine.master.master import Master
from prpc_engine.master.protocol import host_and_port
from prpc_engine.remote.agent_store import AgentStore
from prpc_engine.remote.attendance import missing_text
from prpc_engine.remote.calls import RemoteCalls, as_runtime_error
from prpc_engine.remote.device_maps import DeviceMap
from prpc_engine.remote.devices import check_devices
from prpc_engine.remote.members import COMPLETE, FIND_S, Members
from prpc_engine.remote.options import Options
from prpc_engine.remote.rendezvous import LOOK_S, AddressFile, GroupAddress, read_address
from prpc_engine.remote.running import Runner
from prpc_engine.remote.served import Served
from prpc_engine.remote.termination import Termination
from prpc_engine.remote.values import Values
from prpc_engine.rpc.server import Bounds
from prpc_engine.service.service import RpcService
from prpc_engine.settings.address import Address
from prpc_engine.settings.config import TIMEOUT_S_MAX, check_seconds, wildcard_for
from prpc_engine.settings.sections import NodeArguments
from shard import ClosedError, runtime

logger = logging.getLogger("prpc")
SERVICE = "prpc.remote"
# torch's: they stand in logs, and in device maps
NAME = re.compile(r"[A-Za-z0-9_:.-]{1,127}")
LEAVE_S = 1.0  # for the master to hear that this worker leaves
# For the address in a file to answer, until the file is read again: a rank 0 that was killed has
# left it, and the next one writes another. Twice as long each time.
FILE_S, FILE_S_MAX = 3.0, 15.0
MISSED_S = 1.0  # for the master to say who has not come, when all the time to come is over
LEFT_S = 5.0  # for the others to hang up, before rank 0 takes the master away
# A master in rank 0's process that has not answered for so long is gone with that, where the
# connection to it is, too; while that is there rank 0 stands still, and has its lease for it.
MASTER_GONE_S = 15.0
MASTER_LOOK_S = 3.0  # between two looks whether it answers
# What others call runs in the thread that waits in shutdown(): a waiting thread answers in some
# 10 us, where one that has to be woken takes 100. A function that blocks keeps it, so in the last
# minute before the deadline functions run in the engine's thread.
SERVES_UNTIL_S = 60.0
QUIET_LOOK_S = 0.005  # between two looks whether calls of this worker are under way
FUNCTIONS_MAX = 4096  # that run, or answer later, at a time


class Worker:
    """This process in its group. A worker is made, then joins; close() ends it. Made by init_rpc().

    members  who is there
    calls    what this worker asks of others
    values   what it owns, and refers to
    """

    def __init__(self, name: str, where: GroupAddress, options: Options) -> None:
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise errors.ConfigError(
                f"worker name {name!r:.200}: 1 to 127 letters, digits, and _ : . - are allowed"
            )
        options.check()
        maps = DeviceMap.of(options.device_maps)
        check_devices(maps, options.devices)
        self.name = name
        self.closed = False
        self._where = where
        self._options = options
        self._pid = os.getpid()
        self._master: Master | None = None
        self._file: AddressFile | None = None  # of rank 0, by which the others find it
        self._store: AgentStore | None = None  # by which they do under torchrun
        self._deadline = deadline = runtime.monotonic() + options.init_timeout_s
        self._asked = 0.0  # when the master was last asked for something that shutdown() needs
        self._gone_s = max(MASTER_GONE_S, options.lease_s)  # while the connection is there
        try:
            if where.store is not None:
                self._store = AgentStore(where.store, deadline)
            self._service = self._service_of_group(deadline)
        except BaseException:
            self._close_master()
            raise
        driver = self._service.driver
        self.members = Members(
            name,
            runtime.randbits(62) | 1,
            driver,
            self._worker_gone,
            lambda incarnation: self.values.worker_back(incarnation),
        )
        self.calls = RemoteCalls(
            self.members,
            driver,
            options.rpc_timeout,
            not options.only_exposed,
            maps,
            options.share_devices,
            options.gpu_direct,
        )
        self.values = Values(self.calls)
        self._runner = Runner(driver, options.num_worker_threads)
        self._termination = Termination(self.members, self.calls, self._runner)

    def _worker_gone(self, incarnation: int, named: str) -> None:
        self.values.worker_gone(incarnation, named)
        self.calls.devices.worker_gone(incarnation)

    def _service_of_group(self, deadline: float) -> RpcService:
        """A node at the group's master. Where the group there is complete this waits for the next:
        a worker that has left is often back before rank 0 has ended the one before. Raises
        MasterUnreachable.
        """
        where, options = self._where, self._options
        text = f"the group at {where.named} is complete: all of its workers have joined it"
        is_told = False
        part_s = FILE_S if where.file is not None else TIMEOUT_S_MAX
        while True:
            address = ""
            try:
                address = self._find_master(deadline)
                arguments = self._arguments(address, min(part_s, _seconds_to(deadline)))
                service = RpcService(address, options.config, **arguments)
            except errors.MasterUnreachable as error:
                if is_told:  # and until the deadline there was no other
                    raise self._no_next_group(text) from error
                if where.file is not None and address and _seconds_to(deadline) > MISSED_S:
                    part_s = min(2 * part_s, FILE_S_MAX)  # rank 0 may write another one
                    continue
                if where.is_apart or where.serves or not address:
                    raise
                raise self._no_rank_0(address, error) from error
            if where.serves or where.is_apart or where.world_size is None:
                return service
            try:
                if not _is_complete(service.master_client, deadline):
                    return service
            except BaseException:
                service.close()
                raise
            service.close()
            if runtime.monotonic() >= deadline:
                raise self._no_next_group(text)
            if not is_told:
                is_told = True
                logger.info("%s; waiting for it to end, and for the next", text)
            runtime.sleep(LOOK_S)

    def _no_next_group(self, text: str) -> errors.MasterUnreachable:
        return errors.MasterUnreachable(
            f"{text}, and no other began there within {self._options.init_timeout_s:.3g} s; pass "
            "another init_method, or shut that group down"
        )

    def _no_rank_0(self, address: str, error: Exception) -> errors.MasterUnreachable:
        file = self._where.file
        advice = (
            f"if nobody is to begin there, remove {file}, which a rank 0 that was killed leaves"
            if file is not None
            else "rank 0 serves the group's master there, once it calls init_rpc()"
        )
        return errors.MasterUnreachable(
            f"rank 0 of the group at {self._where.named} has not answered at {address} within "
            f"{self._options.init_timeout_s:.3g} s: {advice} ({error})"
        )

    def _find_master(self, deadline: float) -> str:
        where = self._where
        if where.serves:
            at = "127.0.0.1:0" if where.address is None else str(where.address)
            config = self._options.config
            try:
                self._master = Master(at, secret=None if config is None else config.secret)
            except errors.AddressInUse as error:
                raise errors.AddressInUse(
                    f"rank 0 serves the group's master at {where.named}, and cannot: {error}; pass "
                    'another init_method, such as "tcp://127.0.0.1:29501", to all workers (under '
                    'torchrun "env://", which shares the port with its store)'
                ) from error
            if where.file is not None:
                self._file = AddressFile(where.file, self._master.address)
            return self._master.address
        if where.file is not None:
            return read_address(where.file, deadline)
        if self._store is not None:
            return self._store.ask(deadline)
        return str(where.address)

    def _arguments(self, address: str, timeout_s: float) -> NodeArguments:
        options = self._options
        arguments: NodeArguments = {
            "allow_pickle": not options.only_exposed,
            "polling": options.polling,
            "root": self._where.root,
            "timeout_s": min(max(0.001, timeout_s), TIMEOUT_S_MAX),
            "lease_s": options.lease_s if options.config is None else None,
        }
        host = host_and_port(address)[0]
        if options.config is None and not host.startswith(("127.", "localhost", "::1")):
            # the address that faces the master is told to others
            arguments["bind"] = str(Address(wildcard_for(host), 0))
        return arguments

    def join(self) -> None:
        """Serve, be known to the others, and with a world size wait for all of them. Raises
        ConfigError for a name or rank that is taken, DeadlineExceeded with who has come.
        """
        options, service, where = self._options, self._service, self._where
        served = Served(
            self.members, self.values, self._runner, self.calls.devices, options.only_exposed
        )
        asked = -1 if where.rank is None else where.rank
        try:
            server = service.create_server(
                SERVICE, served, server_id=asked, bounds=Bounds(tasks_max=FUNCTIONS_MAX)
            )
        except errors.NodeExists as error:
            raise errors.ConfigError(
                f"rank {asked} of the group at {where.named} is taken by another worker: give each "
                f"its own ({error})"
            ) from error
        self.calls.client = service.create_client(SERVICE)
        size = where.world_size
        self.members.join(service.master_client, server.server_id, where.named, size)
        if where.world_size is not None:
            if self._store is not None and where.serves:
                self._answer(self._store, where.world_size)
            self._wait_for_all_to_come(where.world_size)
            if where.serves:
                # before any can leave, and come for the next group
                service.master_client.tree_node_add(COMPLETE)
                self._remove_file()
            # what the master tells of those that have joined may come after the barrier's answer
            self.members.wait_for(where.world_size, runtime.monotonic() + FIND_S)

    def _wait_for_all_to_come(self, world_size: int) -> None:
        members, is_lost = self.members, False
        limit_s = max(MISSED_S, _seconds_to(self._deadline))
        member = f"{self.name!r} (rank {members.rank})"
        try:
            self._service.master_client.barrier(
                "prpc.remote.init", world_size, min(limit_s, TIMEOUT_S_MAX), member=member
            )
            return
        except errors.Rejected as error:
            raise errors.ConfigError(
                f"the workers of the group at {self._where.named} do not all have the world_size "
                f"{world_size} of {member}: {error}"
            ) from error
        except errors.DeadlineExceeded as error:
            cause: Exception = error
        except (errors.NotSent, errors.MaybeExecuted) as error:
            cause, is_lost = error, True
        came, ended = members.came(), ""
        if is_lost and self._where.is_apart:
            ended = ", and the group's master is not reached"
        elif is_lost:  # rank 0 has the master: nobody hears of its end from there
            ended = ", and rank 0 has given up, or died: what it says tells why"
            came = [one._replace(is_there=one.is_there and one.rank != 0) for one in came]
        elif self._file is not None:
            ended = self._file.doubt()
        text, advice = missing_text(came, world_size, self._where.named)
        raise errors.DeadlineExceeded(
            f"init_rpc() of {member}: {text}; waited for {limit_s:.3g} s{ended}. {advice}"
        ) from cause

    def _answer(self, store: AgentStore, world_size: int) -> None:
        """As rank 0 under torchrun: tell the others where the master is until all have come."""
        assert self._master is not None and self._where.address is not None, "rank 0 serves it"
        port = int(self._master.address.rpartition(":")[2])
        address, members = str(Address(self._where.address.host, port)), self.members
        while runtime.monotonic() < self._deadline:
            store.answer(address)
            look_at = min(self._deadline, runtime.monotonic() + LOOK_S)
            if members.wait(lambda: len(members.infos()) >= world_size, look_at):
                return

    def statistics(self) -> dict[str, int]:
        """See group.statistics()."""
        devices = self.calls.devices
        return {
            **self.values.statistics(),
            "overtaken": self._runner.overtaken,
            **devices.statistics(),
        }

    def wait_for_all(self, timeout: float | None) -> None:
        """Say that this worker wants to leave. In a group of a fixed size wait for all that live to
        say so, and until no call is under way among them (termination.py); not where rank 0 has
        died, and the group's master with it. Raises DeadlineExceeded with what is missing.
        """
        limit_s = self._options.shutdown_timeout_s if timeout is None else timeout
        check_seconds("timeout", limit_s)
        deadline = runtime.monotonic() + limit_s
        try:
            self._wait_for_all(deadline)
        except (errors.Closed, ClosedError):  # another thread has shut this worker down meanwhile
            return
        except errors.NoSuchNode:  # silent for longer than its lease: the others are without it
            return
        except (errors.DeadlineExceeded, errors.NotSent, errors.MaybeExecuted) as error:
            silent_s = runtime.monotonic() - self._asked
            if not self._where.is_apart and silent_s >= MASTER_GONE_S:
                self._tell_master_gone(silent_s)
                return
            if self._where.is_apart:
                raise as_runtime_error(error) from None
            if limit_s < MASTER_GONE_S:
                raise as_runtime_error(
                    errors.DeadlineExceeded(
                        f"shutdown() of {self.name!r} has waited for {limit_s:.3g} s: rank 0, "
                        "which has the group's master, does not answer: it has died, or stands "
                        "still; shutdown(graceful=False) does not wait for the others"
                    )
                ) from error
        if self._where.world_size is None or self._termination.is_over:
            return
        missing = self._termination.waits_for()
        with contextlib.suppress(errors.RpcError):
            self._termination.begin_again()
            self.members.say_staying(LEAVE_S)
        raise as_runtime_error(
            errors.DeadlineExceeded(
                f"shutdown() of {self.name!r} has waited for {limit_s:.3g} s: {missing}; "
                "shutdown(graceful=False) waits for nobody"
            )
        )

    def _wait_for_all(self, deadline: float) -> None:
        """Until it is over, or that time of the monotonic clock. Raises the master's errors."""
        members, termination = self.members, self._termination
        members.say_leaving(self._patience_s(deadline), termination.next_told())
        if self._where.world_size is None:
            return
        look_at = self._next_look()
        while not termination.is_over:
            now = runtime.monotonic()
            told = termination.next_told()
            serves = deadline - now > SERVES_UNTIL_S
            until = min(deadline - SERVES_UNTIL_S if serves else deadline, look_at)
            if told:
                members.say_leaving(self._patience_s(deadline), told)
                look_at = self._next_look()
            elif now >= deadline:
                return
            elif now >= look_at:
                members.ask_master(self._patience_s(deadline))
                look_at = self._next_look()
            elif termination.is_turn:  # and this worker is not quiet, of whose end no member tells
                until = min(until, now + QUIET_LOOK_S)
                members.wait(lambda: termination.is_quiet, until, serves)
            else:
                members.wait(lambda: termination.is_over or termination.is_turn, until, serves)

    def _next_look(self) -> float:
        """When to ask the master whether it is there. One apart may be started again."""
        return math.inf if self._where.is_apart else runtime.monotonic() + MASTER_LOOK_S

    def _patience_s(self, deadline: float) -> float:
        """Seconds for the master to answer what is asked now; LEAVE_S at least."""
        self._asked = runtime.monotonic()
        left_s = deadline - self._asked
        if not self._where.is_apart:
            is_there = self._service.master_client.connected
            left_s = min(left_s, self._gone_s if is_there else MASTER_GONE_S)
        return max(LEAVE_S, left_s)

    def _tell_master_gone(self, silent_s: float) -> None:
        logger.warning(
            "shutdown() of %r: rank 0, which has the group's master, has not answered for %.0f s "
            "and counts as dead: leaving without waiting for others",
            self.name,
            silent_s,
        )

    @property
    def is_of_parent(self) -> bool:
        """Whether this process is a fork of the worker."""
        return self._pid != os.getpid()

    def close(self, graceful: bool = False) -> None:
        """Leave the group. Again, or in a fork: does nothing."""
        if self.closed or self.is_of_parent:
            return
        members = self.members
        try:
            # else the others take it for a death; ClosedError: another thread is before this one
            with contextlib.suppress(errors.RpcError, ClosedError):
                members.say_leaving(LEAVE_S)
            if graceful and self._master is not None and self._where.world_size is not None:
                # the others leave before the master goes
                with contextlib.suppress(errors.RpcError, ClosedError):
                    members.leave()
                with contextlib.suppress(ClosedError):
                    members.wait(lambda: not members.infos(), runtime.monotonic() + LEFT_S)
        finally:
            self.closed = True
            with contextlib.ExitStack() as steps:
                steps.callback(self._close_master)
                steps.callback(self.values.clear)
                steps.callback(self.calls.devices.close)
                steps.callback(self._service.close)
                steps.callback(self._runner.close)

    def _close_master(self) -> None:
        if self._master is not None:
            self._master.close()
        self._remove_file()

    def _remove_file(self) -> None:
        if self._file is not None:
            self._file.remove()
            self._file = None


def _seconds_to(deadline: float) -> float:
    return deadline - runtime.monotonic()


def _is_complete(tree: MasterClient, deadline: float) -> bool:
    """Whether the group at that master is; one that is lost at that moment was, too."""
    try:
        tree.tree_node_get(COMPLETE, max(0.0, min(FIND_S, deadline - runtime.monotonic())))
    except errors.NoSuchNode:
        return False
    except (errors.NotSent, errors.MaybeExecuted, errors.DeadlineExceeded):
        return True
    return True

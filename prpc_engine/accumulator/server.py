"""The server side: AccumulatorShard holds merged counters, AccumulatorServer puts it where it runs
and saves it.

Calls of a shard come one at a time, so a push, a read and a snapshot each see all of another push
or nothing of it. A push is merged before it is answered.

    a server    event             next
    serving     snapshot_s later  saves, in a thread that may block; then serving
    serving     close()           closing: takes no more pushes, and saves a last time in the thread
                                  that closes, after what is being saved
    closing     that is saved     closed, and others may save to that path

What waits for the next snapshot is a coroutine of the control loop.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from prpc_engine.accumulator import snapshot_file, termination
from prpc_engine.accumulator.aggregator import Aggregator, check_count, describe, restored
from prpc_engine.accumulator.client import SERVICE_NAME, ask_all
from prpc_engine.accumulator.counter import NAMES_MAX, check_name
from prpc_engine.accumulator.window import APPLY, DUPLICATE, WriteWindow
from prpc_engine.client.client import RpcClient
from prpc_engine.client.retry import AT_ONCE
from prpc_engine.errors import BadArguments, Closed, ConfigError, NoServer, is_number
from prpc_engine.service.service import RpcService
from shard import Task, control_loop, run_blocking, runtime, sleep, this_shard

logger = logging.getLogger("prpc")

SNAPSHOT_S = 30.0  # what a crash may cost
SNAPSHOT_S_MIN, SNAPSHOT_S_MAX = 0.01, 86400.0
ASK_TRIES = 2  # the second one after asking the master anew who serves
ASK_TIMEOUT_S = 10.0  # for a shard: what a snapshot of a few GB takes
# for a close() that another thread began: a few tries, and a file of a few GB
CLOSE_TIMEOUT_S = 60.0
REASON_LENGTH_MAX = 1024  # characters of why something was refused
FETCHED = ("read_all", "snapshot", "retire")
JSON_ROOT = "PicoAccumulator"  # readers of pRPC's output expect it
CounterState = tuple[str, str, dict[str, Any], Any]  # name, kind, parameters, state


class AccumulatorShard:
    """The counters of one server. Its public methods are the protocol."""

    def __init__(self, state: dict[str, Any] | None = None, names_max: int = NAMES_MAX) -> None:
        self._names_max = names_max
        # another one each time a server begins: clients notice
        self._epoch = runtime.randbits(62) | 1
        self._counters: dict[str, Aggregator] = {}
        self._window = WriteWindow()
        self._retired = False
        if state is not None:
            self._window.deserialize(state["window"])
            for name, kind, parameters, value in state["counters"]:
                check_name(name)
                self._counters[name] = restored(kind, parameters, value)

    def push(
        self,
        identity: int,
        incarnation: int,
        sequence: int,
        maybe_applied: bool,
        epoch: int,
        entries: Sequence[CounterState],
    ) -> tuple[str, int, int, dict[int, str]]:
        """Merge a client's batch, once: (what was done, our epoch, pushes lost before it,
        {position: why it was refused}).

        `epoch` is ours as far as the client knows; see window.py for the rest.
        """
        if self._retired:
            raise Closed(
                "this server is being closed, and its counters are saved: "
                "push to the one that comes after it"
            )
        for number in (identity, incarnation, sequence):
            check_count("a push", number)  # what the window could not give back later
        client = (identity, incarnation)
        verdict = self._window.judge(client, sequence, maybe_applied, epoch == self._epoch)
        refused: dict[int, str] = {}
        if verdict.action == APPLY:
            for position, entry in enumerate(entries):
                reason = self._merge(entry)
                if reason is not None:
                    refused[position] = reason[:REASON_LENGTH_MAX]
            self._window.record(client, sequence, refused)
        elif verdict.action == DUPLICATE:
            refused = self._window.refused(client, sequence)
        return verdict.action, self._epoch, verdict.lost, refused

    def _merge(self, entry: CounterState) -> str | None:
        """Why it was not merged, None when it was."""
        try:
            name, kind, parameters, state = entry
            check_name(name)
            more = restored(kind, parameters, state)
            there = self._counters.get(name)
            if there is None:
                if len(self._counters) >= self._names_max:
                    return (
                        f"this server has {self._names_max} counters already, "
                        "as many as are allowed: erase some"
                    )
                self._counters[name] = more
            elif (there.kind, there.parameters()) != (kind, parameters):
                return (
                    f"it is {describe(there.kind, there.parameters())} at the server, "
                    f"and {describe(kind, parameters)} came"
                )
            else:
                there.merge_aggregator(more)
        except Exception as error:
            # an aggregator may be anybody's: what it raises ends this entry, not the others
            return f"{type(error).__name__}: {error}"
        return None

    def read(self, name: str) -> tuple[str, dict[str, Any], Any] | None:
        """(kind, parameters, state) of a counter, None when there is none."""
        found = self._counters.get(name)
        return None if found is None else (found.kind, found.parameters(), found.serialize())

    def read_all(self) -> tuple[list[CounterState], dict[str, str]]:
        """Every counter at this moment; and of those that cannot be told (somebody's own aggregator
        may fail), {name: why}.
        """
        found: list[CounterState] = []
        failed: dict[str, str] = {}
        for name, one in self._counters.items():
            try:
                found.append((name, one.kind, one.parameters(), one.serialize()))
            except Exception as error:
                failed[name] = _reason(error)
        try:
            snapshot_file.packed(found)
        except Exception:  # one of them is nothing that a message can hold: which?
            found, candidates = [], found
            for state in candidates:
                try:
                    snapshot_file.packed(state)
                    found.append(state)
                except Exception as error:
                    failed[state[0]] = _reason(error)
        return found, failed

    def output_info(self) -> dict[str, str]:
        """{name: text}."""
        return {name: _text(one) for name, one in self._counters.items()}

    def ready(self) -> bool:
        """Whatever was pushed before this was asked is merged."""
        return True

    def fetch(self, what: str) -> Any:
        """The answer of "read_all", "snapshot" or "retire", packed: it may have more arrays than a
        message.
        """
        if what not in FETCHED:
            raise BadArguments(f"fetch({what!r:.80}): allowed are {', '.join(FETCHED)}")
        return snapshot_file.packed(getattr(self, what)())

    def reset(self, names: Sequence[str]) -> int:
        """Begin those counters anew; how many there were."""
        found = [name for name in names if name in self._counters]
        for name in found:
            self._counters[name] = self._counters[name].fresh()
        return len(found)

    def erase(self, names: Sequence[str]) -> int:
        """Forget those counters; how many there were."""
        return sum(self._counters.pop(name, None) is not None for name in names)

    def erase_all(self) -> int:
        """Forget all counters; how many there were. Which pushes were counted stays known."""
        count = len(self._counters)
        self._counters.clear()
        return count

    def snapshot(self) -> dict[str, Any]:
        """What a later AccumulatorShard(state) goes on from: the counters, and which pushes are in
        them; and what is missing.
        """
        counters, failed = self.read_all()
        return {"counters": counters, "window": self._window.serialize(), "failed": failed}

    def retire(self) -> dict[str, Any]:
        """The last snapshot(): no push is taken after it, so it lacks nothing that a client was
        told is merged.
        """
        self._retired = True
        return self.snapshot()


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:REASON_LENGTH_MAX]


def _text(one: Aggregator) -> str:
    try:
        return str(one)
    except Exception as error:  # somebody's own aggregator: the others are told all the same
        return f"cannot be told: {_reason(error)}"


class AccumulatorServer:
    """An accumulator server under `name`; with service.shards, one in each shard. A context
    manager.

    service        an open RpcService; close() this before it
    server_id      which server of that name this is, or the first of them; -1: the smallest free,
                   or what its snapshot says. Clients look for 0 to servers - 1 and find a restarted
                   server by this number, so give it where several servers without snapshots may be
                   restarted at the same time
    snapshot_path  a file to go on from when it is there, saved every `snapshot_s` seconds and at
                   close(); None: memory only. It is this server's alone: another one that is given
                   it is refused, as long as this one lives
    aggregators    classes of your own, for shards to know them: they import the modules that define
                   them

    After a crash the counters are those of the last snapshot: what clients were told is merged
    since then is lost, and each is told how many of its pushes that were. What they had not been
    told is sent again, and counts once.

    With a snapshot_path, the end of the interpreter closes a server that nobody closed. So does
    SIGTERM, where the program leaves that signal as it was (SIG_DFL) and makes the server in its
    main thread: the server stops taking pushes and saves, then the process dies of the signal as it
    would have. A program with a handler of its own calls close() there or after it. Shards are
    processes: a supervisor should signal the main process alone (systemd: KillMode=mixed), which
    ends them.

    Raises ConfigError for a snapshot that cannot be read, that another server saved, that was made
    by another number of servers, or whose path is in use.
    """

    def __init__(
        self,
        service: RpcService,
        name: str = SERVICE_NAME,
        server_id: int = -1,
        snapshot_path: str | Path | None = None,
        snapshot_s: float = SNAPSHOT_S,
        aggregators: Sequence[type[Aggregator]] = (),
    ) -> None:
        if not is_number(snapshot_s) or not SNAPSHOT_S_MIN <= snapshot_s <= SNAPSHOT_S_MAX:
            raise ConfigError(
                f"snapshot_s={snapshot_s!r:.100}: {SNAPSHOT_S_MIN} to {SNAPSHOT_S_MAX} seconds "
                "are allowed"
            )
        self._service, self.name = service, name
        self._path = None if snapshot_path is None else Path(snapshot_path)
        self._lock = None if self._path is None else snapshot_file.Lock(self._path)
        try:
            self._states = self._saved_states(max(1, service.shards), server_id)
            if server_id < 0 and self._states[0] is not None:
                # its counters are those that clients look for there
                server_id = self._states[0].get("server_id", server_id)
            if service.shards:
                factory = functools.partial(_in_shard, self._path, tuple(aggregators))
                self.server = service.create_server(name, factory, server_id, sharded=True)
            else:
                self.server = service.create_server(
                    name, AccumulatorShard(self._states[0]), server_id, inline=True
                )
        except BaseException:
            if self._lock is not None:
                self._lock.close()
            raise
        self._client: RpcClient | None = None
        # an event: who waits for it is no thread of the service, which may be closed by then
        self._closed = runtime.Event()
        self._closings = itertools.count()  # calls of close(): the first one counts
        # one file at a time, of whatever threads save: the newest comes last
        self._saving = runtime.Lock()
        self._is_closing = False
        self._saver: Task | None = None
        self._pid = os.getpid()
        if self._path is not None:
            self._saver = control_loop().spawn(self._save_again_and_again(self._path, snapshot_s))
            runtime.at_exit(self.close)
            termination.close_at_sigterm(self)

    def _saved_states(self, servers: int, server_id: int) -> list[dict[str, Any] | None]:
        """Also read where shards read it themselves: so a bad one is an error here, before anything
        is served.
        """
        if self._path is None or not self._path.exists():
            return [None] * servers
        states = snapshot_file.load(self._path)
        if len(states) != servers:
            raise ConfigError(
                f"{self._path} was saved by {len(states)} servers, and here are {servers}: "
                "names are spread over them differently; start as many shards as before"
            )
        for at, state in enumerate(states):
            saved_name, saved_id = state.get("name", self.name), state.get("server_id", -1)
            if type(saved_id) is not int:
                raise ConfigError(
                    f"{self._path} cannot be restored by this program: server_id {saved_id!r:.80}"
                )
            if saved_name != self.name or (
                server_id >= 0 and saved_id >= 0 and saved_id != server_id + at
            ):
                raise ConfigError(
                    f"{self._path} was saved by server {saved_id} of {saved_name!r}, "
                    f"and this is server {server_id + at} of "
                    f"{self.name!r}: clients look for other counters here; "
                    "give it a path of its own"
                )
            try:
                AccumulatorShard(state)  # refuses what it does not understand
            except Exception as error:
                # whatever a file does that somebody else has made up, or an aggregator of the
                # user's own
                raise ConfigError(
                    f"{self._path} cannot be restored by this program: {_reason(error)}"
                ) from error
        return list(states)

    def _ask_all(self, method: str, *args: Any) -> tuple[dict[int, Any], dict[int, str]]:
        """The answers of all servers by their ids; and of those that gave none, why not."""
        answers: dict[int, Any] = {}
        failed: dict[int, str] = {}
        for _ in range(ASK_TRIES):
            if self._client is None:
                self._client = self._service.create_client(self.name, 0, retry=AT_ONCE)
            client = self._client
            asked = [server_id for server_id in self.server.server_ids if server_id not in answers]
            done, errors = ask_all(client, asked, method, args, ASK_TIMEOUT_S)
            answers |= done
            failed = {server_id: _reason(error) for server_id, error in errors.items()}
            if not failed:
                break
            client.close()
            self._client = None  # a shard that was started again has another address: look it up
        return answers, failed

    def wait_empty(self) -> None:
        """Return when every push that arrived before is merged: pushes wait nowhere but in the
        reactor's own turn.

        Raises NoServer with the shards that do not answer."""
        _, failed = self._ask_all("ready")
        if failed:
            raise NoServer(f"{self._who(failed)} did not answer")

    def generate_output_info(self) -> dict[str, str]:
        """{name: text} of all counters here, sorted by name. A shard that does not answer is named
        in a warning of the log.
        """
        answers, failed = self._ask_all("output_info")
        if failed:
            logger.warning("the counters of %s are left out", self._who(failed))
        return dict(
            sorted((name, text) for info in answers.values() for name, text in info.items())
        )

    def _who(self, failed: Mapping[int, str]) -> str:
        return f"accumulator servers of {self.name!r}: " + "; ".join(
            f"{one}: {why}" for one, why in sorted(failed.items())
        )

    def generate_json_str(self, pretty: bool = True) -> str:
        """generate_output_info() as JSON, under "PicoAccumulator"."""
        return json.dumps(
            {JSON_ROOT: self.generate_output_info()},
            indent=4 if pretty else None,
            ensure_ascii=False,
        )

    def save(self, path: str | Path | None = None) -> dict[str, str]:
        """Save a snapshot, in `path` or where all go: whole, or not at all. Raises OSError.

        With shards, each of them is saved at a moment of its own. What cannot be saved is the
        answer, {what: why}, and in a warning of the log: a shard that does not answer (the file
        goes on holding what was saved of it before), or a counter of an aggregator that cannot say
        its state. All others are saved.
        """
        where = self._path if path is None else Path(path)
        if where is None:
            raise ConfigError("save() without snapshot_path needs a path")
        return self._save(where, "snapshot")

    def _save(self, where: Path, method: str, is_last: bool = True) -> dict[str, str]:
        """is_last: also where the server is being closed."""
        with self._saving:
            if self._is_closing and not is_last:
                return {}
            answers, failed = self._ask_all("fetch", method)
            missing = {f"server {one} of {self.name!r}": why for one, why in failed.items()}
            for at, server_id in enumerate(self.server.server_ids):
                if server_id in answers:
                    state = snapshot_file.unpacked(answers[server_id])
                    missing |= {
                        f"counter {name!r}": why for name, why in state.pop("failed").items()
                    }
                    self._states[at] = {**state, "name": self.name, "server_id": server_id}
            # failpoint: snapshot.saving
            snapshot_file.save(
                where, [state or self._empty(at) for at, state in enumerate(self._states)]
            )
        if missing:
            text = "; ".join(f"{what}: {why}" for what, why in missing.items())
            logger.warning("the snapshot in %s does not have the newest state of %s", where, text)
        return missing

    def _empty(self, at: int) -> dict[str, Any]:
        """Of a shard that has never answered."""
        return {
            "counters": [],
            "window": [],
            "name": self.name,
            "server_id": self.server.server_ids[at],
        }

    async def _save_again_and_again(self, where: Path, every_s: float) -> None:
        while True:
            await sleep(every_s)
            try:
                await run_blocking(self._save, where, "snapshot", is_last=False)
            except RuntimeError as error:
                # no thread is to be had, or the interpreter ends, and close() comes
                logger.warning("no snapshot was saved in %s now: %s", where, str(error))
            except Exception:  # whatever it is, others may be saved
                logger.exception(
                    "no snapshot was saved in %s; the one before is still there", where
                )

    def close(self) -> None:
        """Save a last snapshot, and serve no more. A second close does nothing, and neither does
        one in a fork.
        """
        if self._pid != os.getpid() or next(self._closings):
            return
        runtime.not_at_exit(self.close)
        try:
            # failpoint: snapshot.closing
            self._save_and_close()
        finally:
            self._closed.set()

    def _save_and_close(self) -> None:
        try:
            if self._path is not None:
                self._is_closing = True  # before it waits for what is being saved
                # failpoint: snapshot.retiring
                if self._saver is not None:
                    self._saver.schedule(self._saver.cancel)
                self._save(self._path, "retire")
        finally:
            try:
                self.server.close()
                if self._client is not None:
                    self._client.close()
            finally:
                if self._lock is not None:
                    self._lock.close()

    def wait_closed(self) -> None:
        """Return when close(), called by another thread, is over."""
        self._closed.wait(CLOSE_TIMEOUT_S)

    def __enter__(self) -> AccumulatorServer:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _in_shard(path: Path | None, aggregators: tuple[type[Aggregator], ...]) -> AccumulatorShard:
    """What each shard serves. `aggregators` were imported when they arrived."""
    states = snapshot_file.load(path) if path is not None and path.exists() else None
    return AccumulatorShard(None if states is None else states[this_shard().index])

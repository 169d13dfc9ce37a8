"""The server side: AccumulatorShard holds merged counters, AccumulatorServer puts it where it runs and saves it.

Calls of a shard come one at a time, so a push, a read and a snapshot each see all of another push or nothing of it. A push is
merged before it is answered.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import secrets
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from prpc_engine.accumulator import snapshot_file
from prpc_engine.accumulator.aggregator import Aggregator, describe, restored
from prpc_engine.accumulator.client import SERVICE_NAME
from prpc_engine.accumulator.counter import NAMES_MAX, check_name
from prpc_engine.accumulator.window import APPLY, DUPLICATE, Window
from prpc_engine.client import RpcClient
from prpc_engine.errors import Closed, ConfigError, RpcError
from prpc_engine.service import RpcService
from shard import ShardError, this_shard

logger = logging.getLogger("prpc")

SNAPSHOT_S = 30.0  # what a crash may cost
SNAPSHOT_S_MIN, SNAPSHOT_S_MAX = 0.01, 86400.0
JSON_ROOT = "PicoAccumulator"  # readers of pRPC's output expect it
CounterState = tuple[str, str, dict[str, Any], Any]  # name, kind, parameters, state


class AccumulatorShard:
    """The counters of one server. Its public methods are the protocol."""

    def __init__(self, state: dict[str, Any] | None = None, names_max: int = NAMES_MAX) -> None:
        self._names_max = names_max
        self._epoch = secrets.randbits(62) | 1  # another one each time a server begins: clients notice
        self._counters: dict[str, Aggregator] = {}
        self._window = Window()
        self._retired = False
        if state is not None:
            self._window.deserialize(state["window"])
            self._counters = {name: restored(kind, parameters, value) for name, kind, parameters, value in state["counters"]}

    def push(
        self,
        identity: int,
        incarnation: int,
        sequence: int,
        maybe_applied: bool,
        epoch: int,
        entries: Sequence[CounterState],
    ) -> tuple[str, int, int, dict[int, str]]:
        """Merge a client's batch, once: (what was done, our epoch, pushes lost before it, {position: why it was refused}).

        `epoch` is ours as far as the client knows; see window.py for the rest.
        """
        if self._retired:
            raise Closed("this server is being closed, and its counters are saved: push to the one that comes after it")
        client = (identity, incarnation)
        verdict = self._window.judge(client, sequence, maybe_applied, epoch == self._epoch)
        refused: dict[int, str] = {}
        if verdict.action == APPLY:
            for position, entry in enumerate(entries):
                reason = self._merge(*entry)
                if reason is not None:
                    refused[position] = reason
            self._window.record(client, sequence, refused)
        elif verdict.action == DUPLICATE:
            refused = self._window.refused(client, sequence)
        return verdict.action, self._epoch, verdict.lost, refused

    def _merge(self, name: str, kind: str, parameters: dict[str, Any], state: Any) -> str | None:
        """Why it was not merged, None when it was."""
        try:
            check_name(name)
            more = restored(kind, parameters, state)
            there = self._counters.get(name)
            if there is None:
                if len(self._counters) >= self._names_max:
                    return f"this server has {self._names_max} counters already, as many as are allowed: erase some"
                self._counters[name] = more
            elif (there.kind, there.parameters()) != (kind, parameters):
                return f"it is {describe(there.kind, there.parameters())} at the server, and {describe(kind, parameters)} came"
            else:
                there.merge_aggregator(more)
        except Exception as error:  # an aggregator may be anybody's: what it raises ends this entry, not the others
            return f"{type(error).__name__}: {error}"
        return None

    def read(self, name: str) -> tuple[str, dict[str, Any], Any] | None:
        """(kind, parameters, state) of a counter, None when there is none."""
        found = self._counters.get(name)
        return None if found is None else (found.kind, found.parameters(), found.serialize())

    def read_all(self) -> list[CounterState]:
        """Every counter at this moment."""
        return [(name, one.kind, one.parameters(), one.serialize()) for name, one in self._counters.items()]

    def output_info(self) -> dict[str, str]:
        """{name: text}."""
        return {name: str(one) for name, one in self._counters.items()}

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
        """What a later AccumulatorShard(state) goes on from: the counters, and which pushes are in them."""
        return {"counters": self.read_all(), "window": self._window.serialize()}

    def retire(self) -> dict[str, Any]:
        """The last snapshot(): no push is taken after it, so it lacks nothing that a client was told is merged."""
        self._retired = True
        return self.snapshot()


class AccumulatorServer:
    """An accumulator server under `name`; with service.shards, one in each shard. A context manager.

    service        an open RpcService; close() this before it
    server_id      which server of that name this is, or the first of them; -1: the smallest free. Clients find a restarted server
                   by this number, so give it where several servers may be restarted at the same time
    snapshot_path  a file to go on from when it is there, saved every `snapshot_s` seconds and at close(); None: memory only
    aggregators    classes of your own, for shards to know them: they import the modules that define them

    After a crash the counters are those of the last snapshot: what clients were told is merged since then is lost, and each
    is told how many of its pushes that were. What they had not been told is sent again, and counts once.
    Raises ConfigError for a snapshot that cannot be read, or was made by another number of servers.
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
        if not isinstance(snapshot_s, (int, float)) or not SNAPSHOT_S_MIN <= snapshot_s <= SNAPSHOT_S_MAX:
            raise ConfigError(f"snapshot_s={snapshot_s!r}: {SNAPSHOT_S_MIN} to {SNAPSHOT_S_MAX} seconds are allowed")
        self._service, self.name = service, name
        self._path = None if snapshot_path is None else Path(snapshot_path)
        states = self._saved_states(max(1, service.shards))
        if service.shards:
            factory = functools.partial(_in_shard, self._path, tuple(aggregators))
            self.server = service.create_server(name, factory, server_id, sharded=True)
        else:
            self.server = service.create_server(name, AccumulatorShard(states[0]), server_id)
        self._client: RpcClient | None = None
        self._stop = threading.Event()
        self._closings = itertools.count()  # calls of close(): the first one counts
        self._saving = threading.Lock()
        self._thread = threading.Thread(target=self._save_again_and_again, args=(snapshot_s,), name="prpc-accumulator-snapshot")
        self._thread.daemon = True  # who forgets close() loses what came since the last snapshot, and still ends
        if self._path is not None:
            self._thread.start()

    def _saved_states(self, servers: int) -> list[dict[str, Any] | None]:
        """Also read where shards read it themselves: so a bad one is an error here, before anything is served."""
        if self._path is None or not self._path.exists():
            return [None] * servers
        states = snapshot_file.load(self._path)
        if len(states) != servers:
            raise ConfigError(
                f"{self._path} was saved by {len(states)} servers, and here are {servers}: names are spread over them "
                "differently; start as many shards as before"
            )
        for state in states:
            AccumulatorShard(state)  # refuses what it does not understand
        return list(states)

    def _ask_all(self, method: str) -> list[Any]:
        if self._client is None:
            self._client = self._service.create_client(self.name, 0)
        return [self._client.call_to(server_id, method) for server_id in self.server.server_ids]

    def wait_empty(self) -> None:
        """Return when every push that arrived before is merged: pushes wait nowhere but in the reactor's own turn."""
        self._ask_all("output_info")

    def generate_output_info(self) -> dict[str, str]:
        """{name: text} of all counters here, sorted by name."""
        return dict(sorted((name, text) for info in self._ask_all("output_info") for name, text in info.items()))

    def generate_json_str(self, pretty: bool = True) -> str:
        """generate_output_info() as JSON, under "PicoAccumulator"."""
        return json.dumps({JSON_ROOT: self.generate_output_info()}, indent=4 if pretty else None, ensure_ascii=False)

    def save(self, path: str | Path | None = None) -> None:
        """Save a snapshot, in `path` or where all go: whole, or not at all. Raises OSError.

        With shards, each of them is saved at a moment of its own.
        """
        where = self._path if path is None else Path(path)
        if where is None:
            raise ConfigError("save() without snapshot_path needs a path")
        self._save(where, "snapshot")

    def _save(self, where: Path, method: str) -> None:
        with self._saving:
            snapshot_file.save(where, self._ask_all(method))

    def _save_again_and_again(self, every_s: float) -> None:
        while not self._stop.wait(every_s):
            try:
                self.save()
            except (OSError, RpcError, ShardError):
                logger.exception("no snapshot was saved in %s; the one before is still there", self._path)

    def close(self) -> None:
        """Save a last snapshot, and serve no more. A second close does nothing."""
        if next(self._closings):
            return
        self._stop.set()
        try:
            if self._path is not None:
                self._thread.join()
                self._save(self._path, "retire")
        finally:
            self.server.close()
            if self._client is not None:
                self._client.close()

    def __enter__(self) -> AccumulatorServer:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


def _in_shard(path: Path | None, aggregators: tuple[type[Aggregator], ...]) -> AccumulatorShard:
    """What each shard serves. `aggregators` were imported when they arrived."""
    states = snapshot_file.load(path) if path is not None and path.exists() else None
    return AccumulatorShard(None if states is None else states[this_shard().index])

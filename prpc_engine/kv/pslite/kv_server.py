"""The server's side: every push and pull of the keys that this node owns is handed to one function.

    server = KVServer(0)
    server.set_request_handle(KVServerDefaultHandle())

Requests that come before the handle is set wait for it, in order. The handle runs for one request at a time; what it answers by
response(), then or later, from any thread, is what the worker gets. What it raises, the worker's wait() raises as RemoteError.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from prpc_engine.errors import BadArguments, ConfigError
from prpc_engine.kv.pslite.pairs import NO_VALS, Keys, KVPairs, Lens, Vals
from prpc_engine.kv.pslite.simple_app import Answer, SimpleApp, SimpleHandle

KIND = "kv"
PUSH, PULL = 1, 2  # flags of a request


@dataclass(frozen=True, eq=False)
class KVMeta:
    """Of one request: the worker's cmd, what it wants, its node id, its timestamp and its customer."""

    cmd: int
    push: bool
    pull: bool
    sender: int
    timestamp: int
    customer_id: int
    n_keys: int
    answer: Answer = field(repr=False)


KVHandle = Callable[[KVMeta, KVPairs, "KVServer"], object]


class KVServer(SimpleApp):
    """See the file's head. `request_handle` is that of simple messages. Raises ConfigError at other nodes too."""

    def __init__(self, app_id: int = 0, request_handle: SimpleHandle | None = None) -> None:
        super().__init__(app_id, 0, request_handle)
        if self.postoffice.role != "server":
            self.close()
            raise ConfigError(f"a KVServer at a {self.postoffice.role}: only nodes with DMLC_ROLE=server own keys")
        self._handle: KVHandle | None = None

    def set_request_handle(self, handle: KVHandle) -> None:  # type: ignore[override]  # ps-lite's KVServer hides SimpleApp's too
        """handle(meta, pairs, server) has to see to a server.response(meta, ...). Its arrays are read-only, and may be kept."""
        is_first, self._handle = self._handle is None, handle
        if is_first:
            self.postoffice.add_handler(KIND, self.app_id, 0, self._on_request)

    def response(self, meta: Any, pairs: Any = None) -> None:
        """Answer a request: with the pairs of a pull, with none for a push; simple ones as SimpleApp does. From any thread.

        Raises Rejected the second time, BadArguments for an answer that is none."""
        if not isinstance(meta, KVMeta):
            super().response(meta, "" if pairs is None else pairs)
        elif not meta.pull:
            meta.answer.give(None)
        elif pairs is None or len(pairs.keys) != meta.n_keys:
            got = "nothing" if pairs is None else f"{len(pairs.keys)}"
            raise BadArguments(f"a pull of {meta.n_keys} keys is answered with KVPairs of as many, not of {got}")
        else:
            meta.answer.give((meta.n_keys, pairs.vals, pairs.lens))

    def close(self) -> None:
        """Handle no more requests: they wait for the next server of this id."""
        super().close()
        self.postoffice.remove_handler(KIND, self.app_id, 0)

    def _on_request(
        self,
        sender: int,
        customer_id: int,
        timestamp: int,
        flags: int,
        cmd: int,
        priority: int,
        keys: Keys,
        vals: Vals | None,
        lens: Lens | None,
    ) -> Any:
        assert self._handle is not None
        answer = Answer()
        meta = KVMeta(cmd, bool(flags & PUSH), bool(flags & PULL), sender, timestamp, customer_id, len(keys), answer)
        self._handle(meta, KVPairs(keys, NO_VALS if vals is None else np.asarray(vals), lens, priority), self)
        return answer.outcome()

"""An answer that finds its way back full ends its call all the same, by a name, once there is
room.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from prpc_engine import Master, RpcService, errors
from shard import BackpressureError
from tests.program import wait_until
from tests.prpc_engine.inside import node_of


def test_a_call_without_a_deadline_ends_although_its_answer_found_no_room(
    master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RpcService(master.address) as serving, RpcService(master.address) as calling:
        serving.create_server("test", {"echo": lambda value: value})
        client = calling.create_client("test")
        assert client.call("echo", 1) == 1
        (peer,) = node_of(serving)._accepted
        send, refused = peer._send, []

        def without_room(body: Any, blocks: Sequence[Any] = ()) -> None:
            if len(refused) < 5:
                refused.append(bytes(body))
                raise BackpressureError("1 message waits, at most 1 may: it reads too slowly")
            send(body, blocks)

        monkeypatch.setattr(peer, "_send", without_room)
        call = client.submit("echo", 2, timeout_s=None)
        wait_until(call.done, "the end of the call")
        assert isinstance(call.error(), errors.RpcError)
        assert "waits, at most 1 may" in str(call.error())
        assert len(refused) == 5
        assert client.call("echo", 3) == 3

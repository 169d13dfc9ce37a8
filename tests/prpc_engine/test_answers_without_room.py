"""An answer that finds its way back full ends its call all the same, by a name, once there is
room.
"""

from __future__ import annotations

from prpc_engine import Master, RpcService, errors
from shard import BackpressureError
from tests.held import at
from tests.program import wait_until
from tests.prpc_engine.inside import accepted_by, node_of


def test_a_call_without_a_deadline_ends_although_its_answer_found_no_room(
    master: Master,
) -> None:
    with RpcService(master.address) as serving, RpcService(master.address) as calling:
        serving.create_server("test", {"echo": lambda value: value})
        client = calling.create_client("test")
        assert client.call("echo", 1) == 1
        (peer,) = accepted_by(node_of(serving))

        def find_no_room() -> None:
            raise BackpressureError("1 message waits, at most 1 may: it reads too slowly")

        with at("peer.answering", find_no_room, of=peer, times=5) as refused:
            call = client.submit("echo", 2, timeout_s=None)
            wait_until(call.done, "the end of the call")
        assert isinstance(call.error(), errors.RpcError)
        assert "waits, at most 1 may" in str(call.error())
        assert refused.count == 5
        assert client.call("echo", 3) == 3

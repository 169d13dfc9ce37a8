"""An allow list keeps out who holds the secret but is not named, over every transport; and lets in
who is.
"""

from __future__ import annotations

import pytest

from prpc_engine import Master, RpcService, errors
from prpc_engine.settings.allow import AllowList, Rule
from tests.prpc_engine.handlers import Plain


@pytest.mark.parametrize(("transport", "lets"), [("tcp", False), ("unix", True), ("shm", True)])
def test_the_same_user_is_known_within_a_host_only(transport: str, lets: bool) -> None:
    allow = AllowList([Rule("plain", ("user:same",))])
    with (
        Master() as master,
        RpcService(master=master.address, transports=[transport], allow=allow) as server,
        RpcService(master=master.address, transports=[transport]) as client,
    ):
        server.create_server("plain", Plain())
        calling = client.create_client("plain")
        if lets:
            assert calling.call("echo", 1) == 1
        else:
            with pytest.raises(errors.NotAllowed, match="does not let this caller"):
                calling.call("echo", 1)


def test_servers_in_shards_keep_to_the_list_too() -> None:
    allow = AllowList([Rule("plain", ("any",), ("echo",))])
    with (
        Master() as master,
        RpcService(master=master.address, shards=1, transports=["tcp"], allow=allow) as service,
    ):
        service.create_server("plain", Plain, sharded=True)
        client = service.create_client("plain")
        assert client.call("echo", 1) == 1
        with pytest.raises(errors.NotAllowed, match="call 'add'"):
            client.call("add", 1, 2)

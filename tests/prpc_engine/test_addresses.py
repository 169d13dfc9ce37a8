"""Where a node says that it is: an address that others can use, or an error that says why there is
none.
"""

from __future__ import annotations

import copy
import pickle

import pytest

from prpc_engine import Master, RpcService, errors
from prpc_engine.master.client import CommInfo
from prpc_engine.rpc.paths import Refusal


def test_who_is_closed_has_no_address_any_more() -> None:
    with Master() as master, RpcService(master.address) as service:
        assert service.address != master.address
    for closed in (master, service):
        with pytest.raises(
            errors.Closed, match="this node is closed and listens at no tcp address"
        ):
            closed.address  # noqa: B018


def test_who_never_listened_there_says_so() -> None:
    with (
        Master() as master,
        RpcService(master.address, transports=["shm"]) as service,
        pytest.raises(
            errors.ConfigError,
            match="this node listens at no tcp address: it was made without that transport",
        ),
    ):
        service.address  # noqa: B018


@pytest.mark.parametrize(
    ("addresses", "endpoint"),
    [
        (("memory://1", "shm://host/0/x", "tcp://10.0.0.1:5"), "tcp://10.0.0.1:5"),
        (("10.0.0.1:5",), "10.0.0.1:5"),
        (("memory://1", "shm://host/0/x"), "memory://1"),
        ((), ""),
    ],
)
def test_an_endpoint_is_what_another_host_could_use(
    addresses: tuple[str, ...], endpoint: str
) -> None:
    assert CommInfo(0, addresses).endpoint == endpoint


def test_the_endpoint_of_a_node_at_the_master_is_where_it_listens() -> None:
    with Master() as master, RpcService(master.address) as service:
        (info,) = service.master_client.get_comm_info()
        assert info.endpoint == f"tcp://{service.address}"


def test_why_no_path_leads_there_comes_with_a_copy_and_a_pickle() -> None:
    error = errors.NoPath(
        "nobody can be reached",
        [Refusal("shm", "no room", True), Refusal("tcp", "nobody listens", True)],
    )
    for other in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert isinstance(other, errors.NotSent)
        assert (str(other), other.refusals) == (str(error), error.refusals)

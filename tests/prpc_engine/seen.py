"""What the master of a job says of it, as any application asks: by a service's `master_client`."""

from __future__ import annotations

from prpc_engine import RpcService
from tests.prpc_engine.processes import PATIENCE_S

API = "RpcService"  # of the servers that RpcService.create_server makes


def ranks(service: RpcService) -> list[int]:
    """Of the nodes that there are."""
    return [node.global_rank for node in service.master_client.get_comm_info(PATIENCE_S)]


def servers(service: RpcService) -> dict[str, list[int]]:
    """The server ids of each name that has servers."""
    found = service.master_client.get_rpc_service_info(API, PATIENCE_S)
    return {
        one.rpc_service_name: [server.server_id for server in one.servers]
        for one in found
        if one.servers
    }

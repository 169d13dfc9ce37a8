"""Notifications that this side has taken, and that do not leave before it closes, are told of."""

from __future__ import annotations

import re

import numpy as np
import pytest

from prpc_engine import Master, RpcService
from tests.program import halt
from tests.prpc_engine.processes import ServerProcess, wait_connected

COUNT = 40


@pytest.mark.parametrize("transport", ["tcp", "unix"])
def test_what_had_not_left_when_its_service_closed_is_counted_in_the_log(
    master: Master, caplog: pytest.LogCaptureFixture, transport: str
) -> None:
    with ServerProcess(master.address, "sink", transport) as server:
        with RpcService(master.address, transports=[transport]) as service:
            client = service.create_client("sink")
            client.call("echo", 1)
            wait_connected(client)
            halt(server.pid)
            array = np.ones(1 << 20, np.uint8)
            for _ in range(COUNT):
                client.notify("echo", array)
        said = re.findall(r"(\d+) notifications to .* had not left when", caplog.text)
        server.kill()
    (count,) = said
    assert 0 < int(count) < COUNT

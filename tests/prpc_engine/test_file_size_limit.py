"""A process that may write no byte into any file (`ulimit -f 0`): shared memory falls under that
too, and all the rest works.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60.0
PROGRAM = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
import numpy as np
import prpc_engine, shard
from prpc_engine import Master, RpcService, cluster, errors
from prpc_engine.service.cores import locks_folder

class Handlers:
    def echo(self, value):
        return value

def refused(kind, act):
    try:
        act()
    except kind as error:
        print(error)
    else:
        raise AssertionError("it was done")

if __name__ == "__main__":
    print(locks_folder())
    with (
        Master() as master,
        RpcService(master=master.address) as serving,
        RpcService(master=master.address) as service,
    ):
        serving.create_server("test", Handlers())
        client = service.create_client("test")
        for count in (10, 1000, 1_000_000):
            assert client.call("echo", np.ones(count)).sum() == count
        refused(errors.ShmFull, lambda: prpc_engine.empty((1000,)))
        refused(shard.ShardError, lambda: shard.ShardGroup(1))
        os.environ["PRPC_HOME"] = sys.argv[1]
        refused(errors.ConfigError, prpc_engine.settings.user_secret.user_secret)
    print("all is well")
"""


def test_where_no_file_takes_a_byte_calls_work_and_what_does_not_is_named(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM, str(tmp_path / "home")],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path), "PRPC_SECRET": "of this test alone"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    folder, empty, group, secret, last = ran.stdout.splitlines()
    assert folder == str(tmp_path / "prpc-cpuset")
    assert "limit on file sizes, 0.0 MiB (RLIMIT_FSIZE)" in empty
    assert "shards cannot be started without a folder for temporary files" in group
    assert "this user's secret in" in secret
    assert "File too large" in secret
    assert last == "all is well"

"""The start of shards: refused while a shard imports the script that asks for them, and a failure
names the setting that asked.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from prpc_engine.errors import ConfigError
from prpc_engine.settings.node_config import NodeConfig
from shard import ShardError


def refuse_in_import(what: str) -> None:
    """Raises ConfigError where a shard that is starting imports the script, which asks for shards
    again: `what` is made without a guard.
    """
    # where it is not loaded, nothing of it has started this process
    multiprocess = sys.modules.get("multiprocess")
    # as it looks itself
    if multiprocess is not None and getattr(multiprocess.current_process(), "_inheriting", False):
        raise ConfigError(
            f"{what} while a shard of it imports the script: make it under "
            '`if __name__ == "__main__":`, which shards do not run'
        )


@contextlib.contextmanager
def asked_for_shards(config: NodeConfig) -> Iterator[None]:
    """Within it shards are started; what goes wrong says how many are asked for, and by what."""
    try:
        yield
    except ShardError as error:
        count, by = config.shards.count, config.origins["shards.count"]
        error.args = (f"{error} (count of shards: {count}, from {by})",)
        raise

"""Single settings, as a node of this environment would have them."""

from __future__ import annotations

from prpc_engine import NO_SECRET
from prpc_engine.settings import layers
from prpc_engine.settings.config import TlsSettings
from prpc_engine.settings.config_file import ConfigFile
from prpc_engine.settings.node_config import NodeConfig, limits_of
from shard import Limits


def load_limits(path: str) -> Limits:
    """[limits] of that file, and the rest by default."""
    return limits_of(layers.of_file(ConfigFile.read(path)))


def tls_of(given: TlsSettings | None = None, secret: bytes = NO_SECRET) -> TlsSettings | None:
    """What holds for TLS, with that secret of the job."""
    return NodeConfig.load(tls=given, secret=secret).tls

"""A pytest plugin for DI-engine's own tests: its EnvSupervisor stands on our Supervisor and has our
buffers.
"""

from __future__ import annotations

from ding.envs.env_manager import env_supervisor

from prpc_engine.ding import ShmBufferContainer, Supervisor

env_supervisor.EnvSupervisor.__bases__ = (Supervisor,)
env_supervisor.ShmBufferContainer = ShmBufferContainer

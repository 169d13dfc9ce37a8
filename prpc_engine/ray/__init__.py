"""Tensors of Ray's actors over this engine: a transport for Ray Direct Transport (RDT), which moves
what an actor returns to another one beside Ray's object store.

    prpc_engine.ray.register()                       # in the driver, before it makes the actors

    @ray.remote
    class Learner:
        @ray.method(tensor_transport="prpc")
        def weights(self) -> torch.Tensor: ...

    register   ->  transport  ->  held_arrays

Ray itself is imported by register() and in its processes. docs/guides/ray.md is the user's page.
"""

from __future__ import annotations

from prpc_engine.ray.register import register

__all__ = ["register"]

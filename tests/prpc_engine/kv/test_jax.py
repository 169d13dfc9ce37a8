"""Pytrees of JAX on tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402 - the line above skips all of this where jax is not

from prpc_engine.errors import BadArguments, ConfigError  # noqa: E402
from prpc_engine.kv import TableServer, TableWorker  # noqa: E402
from prpc_engine.kv import jax as kv_jax  # noqa: E402
from prpc_engine.kv.client.local import LocalService  # noqa: E402

SGD = {"name": "sgd", "learning_rate": 0.1}


def params(scale: float = 1.0) -> Any:
    return {
        "layers": [{"w": scale * jnp.arange(6.0).reshape(2, 3), "b": jnp.zeros(3)}],
        "out": jnp.ones(3, jnp.bfloat16),
    }


def loss(tree: Any, x: Any) -> Any:
    layer = tree["layers"][0]
    return ((x @ layer["w"] + layer["b"]) @ tree["out"].astype(jnp.float32)).sum()


def workers(count: int) -> tuple[LocalService, list[TableWorker]]:
    service = LocalService()
    for _ in range(2):
        TableServer(service)
    return service, [TableWorker(service, expected_servers=2) for _ in range(count)]


def test_a_step_changes_the_tree_as_gradient_descent_does() -> None:
    service, (kv, other) = workers(2)
    tree = kv_jax.Tree(kv, "model", params(), SGD, split_bytes_min=0)
    x = jnp.ones((4, 2))
    grads = jax.grad(loss)(params(), x)
    service.calls.clear()
    after = tree.step(grads)
    assert len(service.calls) == 2
    expected = jax.tree_util.tree_map(
        lambda p, g: (p - 0.1 * g.astype(jnp.float32)).astype(p.dtype), params(), grads
    )
    jax.tree_util.tree_map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-2), after, expected
    )
    assert after["out"].dtype == jnp.bfloat16
    seen = kv_jax.Tree(other, "model", params(), SGD, split_bytes_min=0).pull()
    jax.tree_util.tree_map(np.testing.assert_array_equal, seen, after)
    tree.step(grads)
    jax.tree_util.tree_map(np.testing.assert_array_equal, seen, after)  # arrays of JAX never change


def test_trees_that_do_not_fit_are_refused() -> None:
    _, (kv, other) = workers(2)
    tree = kv_jax.Tree(kv, "model", params(), SGD)
    with pytest.raises(BadArguments, match="the parameters are PyTreeDef"):
        tree.step({"layers": []})
    with pytest.raises(BadArguments, match=r"has shape \(2,\); its parameter has \(3,\)"):
        tree.step(params() | {"out": jnp.ones(2)})
    with pytest.raises(BadArguments, match=r"\['out'\] is complex64, its parameter is real"):
        tree.step(params() | {"out": 1j * jnp.ones(3)})
    with pytest.raises(BadArguments, match=r"leaf \['n'\] of 'counts' is int32"):
        kv_jax.Tree(kv, "counts", {"n": jnp.arange(3)}, SGD)
    with pytest.raises(ConfigError, match="other names, shapes"):
        kv_jax.Tree(other, "model", {"out": params(2.0)["out"]}, SGD)


def test_a_tree_that_is_assigned_is_every_workers() -> None:
    _, (kv, other) = workers(2)
    mine, theirs = (kv_jax.Tree(each, "model", params(), SGD) for each in (kv, other))
    mine.assign(params(3.0))
    jax.tree_util.tree_map(np.testing.assert_array_equal, theirs.pull(), params(3.0))
    with pytest.raises(BadArguments, match="values of 'model'"):
        mine.assign({"layers": []})

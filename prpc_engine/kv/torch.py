"""Models of PyTorch whose parameters and embeddings live in tables. Needs torch (extra `torch`);
imported only when asked for.

    from prpc_engine.kv import torch as kv_torch

    # nn.Modules, inside of the model and outside of it
    model = Model(kv_torch.EmbeddingBag(kv, "words", 64, {"name": "adagrad"}), ...)
    optimizer = kv_torch.Optimizer(model, kv, "model", {"name": "adam", "learning_rate": 1e-3})
    for keys, labels in batches:
        optimizer.zero_grad()
        loss(model(keys), labels).backward()
        optimizer.step()

    what                 lives in         a batch                           memory
    parameters, float32  a dense table    step(): one push_pull for all of  views of one array, as
      on the CPU         (parameters.py)  them                              are their gradients: no
                                                                            copies
    other parameters     the same         the same                          copied to and fro
    embeddings           a sparse table   forward(): the batch's rows are   one leaf tensor, to
                                          pulled; step(): their gradients   which backward() goes:
                                          are pushed                        no copies

The table holds the parameters themselves, under the names of the model's state_dict: a file of a
checkpoint loads into a model without any server, and a restored checkpoint is every worker's model
(parameters.py). Buffers (running means of BatchNorm) stay with each worker, so they are in no
checkpoint of the tables: load_state_dict(..., strict=False), or save them yourself.

The state of optimizers is on the servers (in a checkpoint's files as "optimizer/..."); learning
rates and their schedules are in the tables' specs. Without gradients (torch.no_grad(), eval())
embeddings are only read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from prpc_engine.errors import BadArguments
from prpc_engine.kv.client.future import KVFuture
from prpc_engine.kv.client.parameters import Parameters
from prpc_engine.kv.client.worker import TableWorker
from prpc_engine.kv.table.initializer import Initializer
from prpc_engine.kv.table.optimizer import Optimizer as TableOptimizer

Keys = npt.NDArray[np.int64]
MODES = ("sum", "mean")
# whose rows wait for gradients: more means that nobody calls step() or zero_grad()
FORWARDS_MAX = 1024


class Embedding(torch.nn.Module):  # type: ignore[misc, unused-ignore]
    """int64 keys of any shape -> their rows, float32[*shape, dim]. Keys are any int64: there is no
    vocabulary to size.

    more: of TableWorker.create_sparse (dtype, admission, eviction, compression, consistency,
    timeout_s).
    """

    def __init__(
        self,
        kv: TableWorker,
        table: str,
        dim: int,
        optimizer: TableOptimizer | Mapping[str, Any],
        initializer: Initializer | Mapping[str, Any] | None = None,
        **more: Any,
    ) -> None:
        super().__init__()
        kv.create_sparse(table, dim, optimizer, initializer, **more)
        self.kv = kv
        self.table = table
        self.dim = dim
        # since the last push: keys, and the rows whose gradients are to be
        self._used: list[tuple[Keys, torch.Tensor]] = []

    def forward(self, keys: torch.Tensor) -> torch.Tensor:
        """The rows; each key travels once."""
        rows, places = self._rows(keys)
        return torch.nn.functional.embedding(places, rows)

    def submit_push(self, *, timeout_s: float | None = None) -> KVFuture[None]:
        """Send the gradients of all forwards since the last push, as one push."""
        used = [(keys, rows.grad.numpy()) for keys, rows in self._used if rows.grad is not None]
        self._used.clear()
        keys = np.concatenate([keys for keys, _ in used]) if used else np.empty(0, np.int64)
        grads = (
            np.concatenate([grads for _, grads in used])
            if used
            else np.empty((0, self.dim), np.float32)
        )
        return self.kv.submit_push(self.table, keys, grads, timeout_s=timeout_s)

    def forget(self) -> None:
        """Drop the gradients of all forwards since the last push."""
        self._used.clear()

    def _rows(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows of the different keys, and which of them each key has."""
        if not isinstance(keys, torch.Tensor) or keys.dtype != torch.int64:
            there = keys.dtype if isinstance(keys, torch.Tensor) else f"a {type(keys).__name__}"
            raise BadArguments(
                f"embedding {self.table!r}: keys are {there}; a tensor of torch.int64 is allowed"
            )
        asked, places = np.unique(keys.detach().cpu().numpy(), return_inverse=True)
        pulled = self.kv.pull(self.table, asked)
        rows = torch.from_numpy(pulled if pulled.flags.writeable else pulled.copy())
        if self.training and torch.is_grad_enabled():
            if len(self._used) >= FORWARDS_MAX:
                raise BadArguments(
                    f"embedding {self.table!r}: {FORWARDS_MAX} forwards without step() "
                    "or zero_grad(); to read only, use torch.no_grad() or eval()"
                )
            rows.requires_grad_()
            self._used.append((asked, rows))
        return rows.to(keys.device), torch.from_numpy(places.reshape(keys.shape)).to(keys.device)


class EmbeddingBag(Embedding):
    """int64 keys [n, fields] -> the sum (or mean) of each line's rows: float32[n, dim]."""

    def __init__(self, *args: Any, mode: str = "sum", **more: Any) -> None:
        if mode not in MODES:
            raise BadArguments(f"embedding bag: mode is {mode!r}; allowed: {', '.join(MODES)}")
        super().__init__(*args, **more)
        self.mode = mode

    def forward(self, keys: torch.Tensor) -> torch.Tensor:
        """The rows of each line, together."""
        if isinstance(keys, torch.Tensor) and (keys.ndim != 2 or not keys.shape[1]):
            raise BadArguments(
                f"embedding bag {self.table!r}: keys of shape {list(keys.shape)}; [n, "
                "fields] is allowed"
            )
        rows, places = self._rows(keys)
        return torch.nn.functional.embedding_bag(places, rows, mode=self.mode)


class Optimizer:
    """The parameters of `model` and the embeddings in it, kept on the servers: the values are those
    of the worker that comes first, or of the checkpoint that was restored, and every model takes
    them here (parameters.py). Later changes of a parameter become the servers', for all workers: by
    load_state_dict() at once, others with the next step(). One worker's are enough. Parameters that
    are frozen when this is made (requires_grad=False) and buffers stay with each worker: load the
    same in all. Tables are of float32: parameters of float64 are rounded to it, also here.

    more: of TableWorker.create_dense (compression, consistency, split_bytes_min, timeout_s).
    Parameters are bound to arrays that all of them share; do not move the model to another device
    or dtype after this.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        kv: TableWorker,
        table: str,
        optimizer: TableOptimizer | Mapping[str, Any],
        **more: Any,
    ) -> None:
        self._root = model
        self._embeddings = [module for module in model.modules() if isinstance(module, Embedding)]
        self._model = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        for name, parameter in self._model.items():
            if not parameter.dtype.is_floating_point:
                raise BadArguments(
                    f"parameter {name!r} is of {parameter.dtype}; floating numbers are allowed: "
                    "keep a complex one as two"
                )
        start = {
            name: parameter.detach().to("cpu", torch.float32).numpy()
            for name, parameter in self._model.items()
        }
        self.parameters = Parameters(kv, table, start, optimizer, **more) if start else None
        self._values = (
            {name: torch.from_numpy(view) for name, view in self.parameters.values.items()}
            if self.parameters
            else {}
        )
        self._grads = (
            {name: torch.from_numpy(view) for name, view in self.parameters.grads.items()}
            if self.parameters
            else {}
        )
        self._copied = []  # parameters that cannot be views of ours
        for name, parameter in self._model.items():
            if parameter.dtype == torch.float32 and parameter.device.type == "cpu":
                parameter.data = self._values[name]
            else:
                self._copied.append(name)
        self._states: dict[str, tuple[int, int]] = {}  # as they were handed out
        self._hand_out()
        self.zero_grad()
        model.register_load_state_dict_post_hook(lambda module, keys: self.assign())

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for name, parameter in self._model.items():
            self._grads[name].zero_()
            parameter.grad = None if name in self._copied else self._grads[name]
        for embedding in self._embeddings:
            embedding.forget()

    def pull(self, *, timeout_s: float | None = None) -> None:
        """Take the present values of the parameters from the servers."""
        if self.parameters is not None:
            self.parameters.pull(timeout_s=timeout_s)
            self._hand_out()

    def assign(self, *, timeout_s: float | None = None) -> None:
        """Make the parameters that were changed here the servers', for all workers."""
        changed = [
            name
            for name, parameter in self._model.items()
            if _state_of(parameter) != self._states[name]
        ]
        # load_state_dict(assign=True) puts others in their place
        replaced = dict(self._root.named_parameters())
        for name, parameter in self._model.items():
            if replaced.get(name, parameter) is not parameter:
                self._model[name] = replaced[name]
                changed.append(name)
        if self.parameters is None or not changed:
            return
        for name in changed:
            parameter, ours = self._model[name], self._values[name]
            if parameter.data_ptr() != ours.data_ptr():
                ours.copy_(parameter.detach())
                if name not in self._copied:
                    parameter.data = ours
        self.parameters.assign(changed, timeout_s=timeout_s)
        self._hand_out()

    def step(self, *, timeout_s: float | None = None) -> None:
        """Push all gradients, and take the new values of the parameters. timeout_s: of each push,
        in seconds.
        """
        self.assign(timeout_s=timeout_s)
        for name, parameter in self._model.items():
            ours = self._grads[name]
            if parameter.grad is None:
                ours.zero_()
            elif parameter.grad.data_ptr() != ours.data_ptr():
                ours.copy_(parameter.grad)
        pushes = [embedding.submit_push(timeout_s=timeout_s) for embedding in self._embeddings]
        if self.parameters is not None:
            self.parameters.take(self.parameters.submit_step(timeout_s=timeout_s).result())
            self._hand_out()
        for push in pushes:
            push.result()

    def _hand_out(self) -> None:
        with torch.no_grad():
            for name in self._copied:
                self._model[name].copy_(self._values[name])
        self._states = {name: _state_of(parameter) for name, parameter in self._model.items()}


def _state_of(parameter: torch.nn.Parameter) -> tuple[int, int]:
    """Another one after a change in place, or when its `.data` was assigned, which counts as none
    of those.
    """
    return parameter._version, parameter.data_ptr()

"""How a gradient changes a value: vectorised, in place, in float32, where the values live.

An optimizer is a formula over arrays of one shape: values, gradients, and one state array for each entry of
`state_initial`. A dense table applies it to whole tensors; a sparse one gathers the rows that got a gradient (each
once), applies it, and scatters them back. So a formula is written once, and knows nothing of keys.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from prpc_engine.kv.spec import build, checked_number

Floats = npt.NDArray[np.float32]


class Optimizer(ABC):
    """The settings of one formula: frozen, comparable, and back and forth to a plain dict."""

    name: ClassVar[str]

    @property
    @abstractmethod
    def state_initial(self) -> tuple[float, ...]:
        """The value that each state array starts with; as many state arrays as entries."""

    @abstractmethod
    def apply(self, values: Floats, grads: Floats, state: Sequence[Floats]) -> None:
        """Change `values` and each array of `state` in place; all have the shape of `grads`, which is only read."""

    def to_spec(self) -> dict[str, Any]:
        """The dict from which from_spec() makes an equal optimizer."""
        return {"name": self.name, **asdict(self)}  # type: ignore[call-overload]


@dataclass(frozen=True)
class Sgd(Optimizer):
    """w <- w - learning_rate * g. Robbins and Monro, "A stochastic approximation method" (1951)."""

    name = "sgd"
    learning_rate: float

    def __post_init__(self) -> None:
        checked_number("optimizer 'sgd': learning_rate", self.learning_rate, above=0)

    @property
    def state_initial(self) -> tuple[float, ...]:
        return ()

    def apply(self, values: Floats, grads: Floats, state: Sequence[Floats]) -> None:
        values -= np.float32(self.learning_rate) * grads


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """a <- a + g*g;  w <- w - learning_rate * g / (sqrt(a) + epsilon), each element for itself.

    Duchi, Hazan, Singer, "Adaptive subgradient methods" (JMLR 2011), in the form of TensorFlow's ApplyAdagradV2
    (epsilon outside the root), with the defaults of tf.keras.optimizers.Adagrad: a starts at 0.1, epsilon is 1e-7.
    """

    name = "adagrad"
    learning_rate: float
    initial_accumulator: float = 0.1
    epsilon: float = 1e-7

    def __post_init__(self) -> None:
        checked_number("optimizer 'adagrad': learning_rate", self.learning_rate, above=0)
        checked_number("optimizer 'adagrad': initial_accumulator", self.initial_accumulator, at_least=0)
        checked_number("optimizer 'adagrad': epsilon", self.epsilon, above=0)  # 0/0 where a = 0 and g = 0

    @property
    def state_initial(self) -> tuple[float, ...]:
        return (self.initial_accumulator,)

    def apply(self, values: Floats, grads: Floats, state: Sequence[Floats]) -> None:
        (accumulator,) = state
        step = grads * grads
        accumulator += step
        np.sqrt(accumulator, out=step)
        step += np.float32(self.epsilon)
        np.divide(grads, step, out=step)
        step *= np.float32(self.learning_rate)
        values -= step


OPTIMIZERS: dict[str, type[Optimizer]] = {"sgd": Sgd, "adagrad": Adagrad}


def from_spec(spec: object) -> Optimizer:
    """{"name": "adagrad", "learning_rate": 0.05} -> Adagrad(0.05); ConfigError lists what is allowed."""
    return build("optimizer", OPTIMIZERS, spec)

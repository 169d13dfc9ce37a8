"""How a gradient changes a value: vectorised, in place, in float32, where the values live.

    name      state arrays   w becomes (r: learning rate of this step, g: gradient)
    assign    -              g
    add       -              w + g
    sgd       -              w - r g
    momentum  momentum m     m <- mu m + g;  w - r m,  with nesterov w - r (g + mu m)
    adagrad   accumulator a  a <- a + g g;  w - r g / (sqrt(a) + epsilon)
    adam      mean, square   running means of g and g g, each divided by 1 - beta ** t;
                             w - r mean / (sqrt(square) + epsilon)
    ftrl      z, n           e <- (beta + sqrt(n + g g)) / r;
                             z <- z + g - (e - what e was before) w;  n <- n + g g;
                             0 where |z| <= l1, else -(z - sign(z) l1) / (e + l2)

An optimizer is a formula over arrays of one shape: values, gradients, and one state array for each
entry of `state_initial`. A dense table applies it to every element; a sparse one gathers the rows
that got a gradient (each once), applies it, and scatters them back. So a formula is written once,
and knows nothing of keys. A row without a gradient stays as it is: its momentum and means do not
fade meanwhile ("lazy", as in TensorFlow's LazyAdam), and the t of Adam counts the gradients of that
row. Keys that repeat in one push have their gradients summed first, with assign too.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from prpc_engine.errors import ConfigError
from prpc_engine.kv.table import schedule
from prpc_engine.kv.table.gradients import GRADIENT_MAX
from prpc_engine.kv.table.schedule import Rate
from prpc_engine.kv.table.spec import build, checked_number

# of FTRL, which divides by it: sqrt(n) is below 2**53 (gradients.py), and z below the greatest
# float32
RATE_MIN = 1e-22
Floats = npt.NDArray[np.float32]
Steps = int | Floats


class Optimizer(ABC):
    """The settings of one formula: frozen, comparable, and back and forth to a plain dict."""

    name: ClassVar[str]
    state_names: ClassVar[tuple[str, ...]] = ()
    # greater ones are taken as this: formulas square them, or add them up
    gradient_max: ClassVar[float] = math.inf
    # whether apply() looks at `steps`: a sparse table then counts them for each row
    counts_steps: ClassVar[bool] = False

    @property
    def state_initial(self) -> dict[str, float]:
        """{name: the value it starts with} of each state array, in the order in which apply() takes
        them.
        """
        return dict.fromkeys(self.state_names, 0.0)

    @abstractmethod
    def apply(
        self, values: Floats, grads: Floats, state: Sequence[Floats], rate: float, steps: Steps
    ) -> None:
        """Change `values` and each array of `state` in place; all have the shape of `grads`, which
        is only read.

        rate: from rate_at(). steps: how many gradients each value has had with this one: a number,
        or float32[n, 1].
        """

    def settle(self, values: Floats, state: Sequence[Floats], rate: float) -> None:
        """Make the state agree with values put in the place of others, where the formula makes
        values from its state.
        """
        return

    def rate_at(self, step: int) -> float:
        """The learning rate of step 0, 1, 2, ... of a table; 1 where the formula has none."""
        return 1.0

    def to_spec(self) -> dict[str, Any]:
        """The dict from which from_spec() makes an equal optimizer."""
        settings = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        return {"name": self.name} | {
            key: schedule.to_spec(value) for key, value in settings.items()
        }


@dataclass(frozen=True)
class Assign(Optimizer):
    """A push sets values instead of changing them by a gradient: the row becomes what was pushed.
    It has no learning rate and no state.
    """

    name = "assign"

    def apply(
        self, values: Floats, grads: Floats, state: Sequence[Floats], rate: float, steps: Steps
    ) -> None:
        values[:] = grads


@dataclass(frozen=True)
class Add(Optimizer):
    """What was pushed is added, as ps-lite's KVServerDefaultHandle does."""

    name = "add"

    def apply(
        self, values: Floats, grads: Floats, state: Sequence[Floats], rate: float, steps: Steps
    ) -> None:
        values += grads


@dataclass(frozen=True)
class Descent(Optimizer):
    """What all formulas with a learning rate share: a number above 0, or a schedule (schedule.py)
    or its dict.
    """

    learning_rate: Rate

    def __post_init__(self) -> None:
        rate = schedule.from_spec(f"optimizer {self.name!r}: learning_rate", self.learning_rate)
        object.__setattr__(self, "learning_rate", rate)

    def rate_at(self, step: int) -> float:
        return schedule.rate_at(self.learning_rate, step)

    def _check(
        self,
        setting: str,
        *,
        at_least: float = -math.inf,
        above: float = -math.inf,
        below: float = math.inf,
    ) -> None:
        what = f"optimizer {self.name!r}: {setting}"
        value = checked_number(what, getattr(self, setting), at_least=at_least, above=above)
        if value >= below:
            raise ConfigError(f"{what} is {value}; a number below {below:g} is allowed")


@dataclass(frozen=True)
class Sgd(Descent):
    """Robbins and Monro, "A stochastic approximation method" (1951)."""

    name = "sgd"

    def apply(
        self, values: Floats, grads: Floats, state: Sequence[Floats], rate: float, steps: Steps
    ) -> None:
        values -= np.float32(rate) * grads


@dataclass(frozen=True)
class Momentum(Descent):
    """SGD with momentum, in the form of torch.optim.SGD without dampening.

    Sutskever, Martens, Dahl, Hinton, "On the importance of initialization and momentum in deep
    learning" (ICML 2013).
    """

    name = "momentum"
    gradient_max = GRADIENT_MAX
    state_names = ("momentum",)
    momentum: float = 0.9
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("momentum", at_least=0, below=1)
        if not isinstance(self.nesterov, bool):
            raise ConfigError(
                f"optimizer 'momentum': nesterov is {self.nesterov!r}; True or False is allowed"
            )

    def apply(
        self, values: Floats, grads: Floats, state: Sequence[Floats], rate: float, steps: Steps
    ) -> None:
        (momentum,) = state
        momentum *= np.float32(self.momentum)
        momentum += grads
        if self.nesterov:
            values -= np.float32(rate) * (grads + np.float32(self.momentum) * momentum)
        else:
            values -= np.float32(rate) * momentum


@dataclass(frozen=True)
class Adagrad(Descent):
    """Duchi, Hazan, Singer, "Adaptive subgradient methods" (JMLR 2011), in the form of TensorFlow's
    ApplyAdagradV2 (epsilon outside the root), with the defaults of tf.keras.optimizers.Adagrad: a
    starts at 0.1, epsilon is 1e-7.
    """

    name = "adagrad"
    gradient_max = GRADIENT_MAX
    state_names = ("accumulator",)
    initial_accumulator: float = 0.1
    epsilon: float = 1e-7

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("initial_accumulator", at_least=0)
        self._check("epsilon", above=0)  # 0/0 where a = 0 and g = 0

    @property
    def state_initial(self) -> dict[str, float]:
        return {"accumulator": self.initial_accumulator}

    def apply(
        self, values: Floats, grads: Floats, state: Sequence[Floats], rate: float, steps: Steps
    ) -> None:
        (accumulator,) = state
        step = grads * grads
        accumulator += step
        np.sqrt(accumulator, out=step)
        step += np.float32(self.epsilon)
        np.divide(grads, step, out=step)
        step *= np.float32(rate)
        values -= step


@dataclass(frozen=True)
class Adam(Descent):
    """Kingma and Ba, "Adam: a method for stochastic optimization" (ICLR 2015), algorithm 1 with its
    defaults.
    """

    name = "adam"
    gradient_max = GRADIENT_MAX
    state_names = ("mean", "square")
    counts_steps = True
    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("beta_1", at_least=0, below=1)
        self._check("beta_2", at_least=0, below=1)
        self._check("epsilon", above=0)

    def apply(
        self, values: Floats, grads: Floats, state: Sequence[Floats], rate: float, steps: Steps
    ) -> None:
        mean, square = state
        mean *= np.float32(self.beta_1)
        mean += np.float32(1 - self.beta_1) * grads
        step = grads * grads
        step *= np.float32(1 - self.beta_2)
        square *= np.float32(self.beta_2)
        square += step
        np.divide(square, _one_minus_power(self.beta_2, steps), out=step)
        np.sqrt(step, out=step)
        step += np.float32(self.epsilon)
        np.divide(mean, step, out=step)
        step *= np.float32(rate) / _one_minus_power(self.beta_1, steps)
        values -= step


@dataclass(frozen=True)
class Ftrl(Descent):
    """FTRL-Proximal: McMahan and others, "Ad click prediction: a view from the trenches" (KDD
    2013), algorithm 1.

    The first gradient of a value finds z = 0, so from then on its initial value counts only through
    that gradient.

    Algorithm 1 has one learning rate. With a schedule each value keeps the rate of its last
    gradient, from which follows what e was: z divided by the e of another rate would make all
    values smaller as the rate falls. A step whose rate is below RATE_MIN, as at the end of a
    schedule that falls to 0, changes nothing.
    """

    name = "ftrl"
    gradient_max = GRADIENT_MAX
    state_names = ("z", "n")
    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("beta", above=0)  # 0/0 where n = 0 and l2 = 0
        self._check("l1", at_least=0)
        self._check("l2", at_least=0)

    @property
    def state_initial(self) -> dict[str, float]:
        return super().state_initial | (
            {"rate": 0.0} if isinstance(self.learning_rate, schedule.Schedule) else {}
        )

    def apply(
        self, values: Floats, grads: Floats, state: Sequence[Floats], rate: float, steps: Steps
    ) -> None:
        z, n, *rates = state
        if rate < RATE_MIN:
            return
        root_before = np.sqrt(n)
        n += grads * grads
        root = np.sqrt(n)
        z += grads
        z -= (root - root_before) / np.float32(rate) * values
        for rate_before in rates:  # of e's change what is not the root's
            rate_before[rate_before == 0] = rate  # the first gradient
            z -= (
                (root_before + np.float32(self.beta))
                * (np.float32(1 / rate) - np.float32(1) / rate_before)
                * values
            )
            rate_before[...] = rate
        root += np.float32(self.beta)
        root /= np.float32(rate)
        root += np.float32(self.l2)
        # z - clip(z) is 0 within, z - sign(z) l1 outside
        shrunk = np.clip(z, np.float32(-self.l1), np.float32(self.l1))
        shrunk -= z
        np.divide(shrunk, root, out=values)

    def settle(self, values: Floats, state: Sequence[Floats], rate: float) -> None:
        z, n, *rates = state
        if rate < RATE_MIN:
            return
        e = np.sqrt(n) + np.float32(self.beta)
        e /= np.where(rates[0] == 0, np.float32(rate), rates[0]) if rates else np.float32(rate)
        z[...] = -values * (e + np.float32(self.l2)) - np.sign(values) * np.float32(self.l1)


OPTIMIZERS: dict[str, type[Optimizer]] = {
    "assign": Assign,
    "add": Add,
    "sgd": Sgd,
    "momentum": Momentum,
    "adagrad": Adagrad,
    "adam": Adam,
    "ftrl": Ftrl,
}


def from_spec(spec: object) -> Optimizer:
    """{"name": "adagrad", "learning_rate": 0.05} -> Adagrad(0.05); ConfigError lists what is
    allowed.
    """
    return build("optimizer", OPTIMIZERS, spec)


def _one_minus_power(base: float, exponents: Steps) -> Floats:
    """1 - base ** exponents to the last bits of float32, where base is near 1 and a plain
    difference keeps few.
    """
    if base == 0:
        return np.float32(1)  # type: ignore[return-value]
    power: Floats = -np.expm1(np.float32(math.log(base)) * np.asarray(exponents, np.float32))
    return power

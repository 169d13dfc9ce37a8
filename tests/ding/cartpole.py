"""A user's program: DQN on CartPole of DI-engine's zoo, in processes that find their roles by their
labels, `learner`, `evaluator` and `collector`. It knows nothing of prpc. Its middleware is that of
DI-engine's own example (ding.example.dqn); what is added writes down what went where.

Each main() writes <label>.<node id>.json into the folder JOBS_FOLDER, again after each of its
iterations:

    models       learner: checksums of the models that it has sent, in order
                 others: of those that they have computed with, their own first
    steps        collector: environment steps that it has taken, and then emits
                 learner: that came to it
    transitions  learner: that came to its replay buffer
    returns      evaluator: mean episode returns
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gym
from ding.config import compile_config
from ding.data import DequeBuffer
from ding.envs import BaseEnvManagerV2, DingEnvWrapper
from ding.framework import ding_init, task
from ding.framework.context import OnlineRLContext
from ding.framework.middleware import (
    ContextExchanger,
    ModelExchanger,
    OffPolicyLearner,
    StepCollector,
    data_pusher,
    eps_greedy_handler,
    interaction_evaluator,
)
from ding.model import DQN
from ding.policy import DQNPolicy
from ding.utils import set_pkg_seed
from dizoo.classic_control.cartpole.config.cartpole_dqn_config import create_config, main_config

ROLES = ("learner", "evaluator", "collector")


class Diary:
    """What this process has seen, in its file."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._file = Path(os.environ["JOBS_FOLDER"], f"{label}.{task.router.node_id}.json")
        self.models: list[int] = []
        self.returns: list[float] = []

    def note(self, model: DQN) -> None:
        """That this model was sent, or received."""
        parts = [tensor.numpy().tobytes() for tensor in model.state_dict().values()]
        checksum = zlib.crc32(b"".join(parts))
        if self.models[-1:] != [checksum]:
            self.models.append(checksum)

    def write(self, steps: int, transitions: int) -> None:
        unfinished = self._file.with_suffix(".new")
        content = {
            "models": self.models,
            "steps": steps,
            "transitions": transitions,
            "returns": self.returns,
        }
        unfinished.write_text(json.dumps(content))
        unfinished.replace(self._file)


def diary_keeper(
    label: str, model: DQN, buffer: DequeBuffer
) -> Callable[[OnlineRLContext], Iterator[None]]:
    """The middleware that writes, after those that compute and before what is sent."""
    diary = Diary(label)

    def keep(ctx: OnlineRLContext) -> Iterator[None]:
        if label != "learner":
            diary.note(model)
        evaluated = ctx.last_eval_iter
        yield
        if label == "learner":
            diary.note(model)
        if label == "evaluator" and ctx.last_eval_iter != evaluated:
            diary.returns.append(float(ctx.eval_value))
        diary.write(ctx.env_step, buffer.count())

    return keep


def main() -> None:
    """Of every worker."""
    cfg: Any = compile_config(main_config, create_cfg=create_config, auto=True, save_cfg=False)
    ding_init(cfg)
    with task.start(async_mode=False, ctx=OnlineRLContext()):
        (label,) = (one for one in ROLES if task.match_labels(one))
        task.add_role(getattr(task.role, label.upper()))
        envs = {
            name: BaseEnvManagerV2(
                env_fn=[lambda: DingEnvWrapper(gym.make("CartPole-v0"))] * count,
                cfg=cfg.env.manager,
            )
            for name, count in (
                ("collector", cfg.env.collector_env_num),
                ("evaluator", cfg.env.evaluator_env_num),
            )
        }
        set_pkg_seed(cfg.seed + task.router.node_id, use_cuda=False)
        model = DQN(**cfg.policy.model)
        buffer = DequeBuffer(size=cfg.policy.other.replay_buffer.replay_buffer_size)
        policy = DQNPolicy(cfg.policy, model=model)
        task.use(ContextExchanger(skip_n_iter=1))
        task.use(ModelExchanger(model))
        task.use(diary_keeper(label, model, buffer))
        task.use(interaction_evaluator(cfg, policy.eval_mode, envs["evaluator"]))
        task.use(eps_greedy_handler(cfg))
        task.use(StepCollector(cfg, policy.collect_mode, envs["collector"]))
        task.use(data_pusher(cfg, buffer))
        task.use(OffPolicyLearner(cfg, policy.learn_mode, buffer))
        task.run()

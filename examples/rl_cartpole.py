"""One learner and three actors on CartPole: actors send trajectories, the learner sends weights.

    pip install 'prpc-engine[rl]'
    python examples/rl_cartpole.py                      all three, one after the other
    python examples/rl_cartpole.py --over prpc --seconds 20

    over             trajectories                          weights
    prpc             a topic of each actor's               a topic, mode "latest"
    multiprocessing  one Queue                             a Queue of one item for each actor
    nng              push to a pull socket (pip install    publish to a sub socket each, which
                     pynng)                                may miss some

The policy is a network of 4, 32 and 2 units, trained by REINFORCE with a baseline. What is compared
is how many steps the actors take a second, all together, while the learner trains.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import multiprocessing
import pickle
import queue
import tempfile
import time

import gymnasium
import numpy as np

import prpc_engine
from prpc_engine import topics

BATCH, GAMMA, RATE, HIDDEN = 16, 0.99, 0.01, 32
START_S = 60.0


# -- the policy ------------------------------------------------------------------------------------


def new_weights(seed):
    generator = np.random.default_rng(seed)
    return {
        "w1": generator.normal(0, 0.5, (4, HIDDEN)),
        "b1": np.zeros(HIDDEN),
        "w2": generator.normal(0, 0.1, (HIDDEN, 2)),
        "b2": np.zeros(2),
    }


def forward(weights, observations):
    hidden = np.tanh(observations @ weights["w1"] + weights["b1"])
    logits = hidden @ weights["w2"] + weights["b2"]
    odds = np.exp(logits - logits.max(-1, keepdims=True))
    return hidden, odds / odds.sum(-1, keepdims=True)


def play(env, weights, generator):
    """One episode: observations, actions, how many steps."""
    observations, actions = [], []
    observation, _ = env.reset(seed=int(generator.integers(1 << 31)))
    over = False
    while not over:
        _, odds = forward(weights, observation)
        action = int(generator.random() < odds[1])
        observations.append(observation)
        actions.append(action)
        observation, _, terminated, truncated, _ = env.step(action)
        over = terminated or truncated
    return np.array(observations), np.array(actions)


def train(weights, episodes):
    """One step of REINFORCE with a baseline; new weights."""
    observations = np.concatenate([one for one, _ in episodes])
    actions = np.concatenate([one for _, one in episodes])
    returns = np.concatenate(
        [(1 - GAMMA ** np.arange(len(one), 0, -1)) / (1 - GAMMA) for one, _ in episodes]
    )
    advantages = (returns - returns.mean()) / (returns.std() + 1e-8)
    hidden, odds = forward(weights, observations)
    pull = (np.eye(2)[actions] - odds) * advantages[:, None] / len(actions)
    back = (pull @ weights["w2"].T) * (1 - hidden**2)
    steps = {
        "w1": observations.T @ back,
        "b1": back.sum(0),
        "w2": hidden.T @ pull,
        "b2": pull.sum(0),
    }
    return {
        name: weights[name] + RATE * step / (np.sqrt((step**2).mean()) + 1e-8)
        for name, step in steps.items()
    }


# -- the three ways between them -------------------------------------------------------------------


class OverPrpc:
    """Topics; the learner has the master."""

    def __init__(self):
        self.master = prpc_engine.Master("127.0.0.1:0")
        self.for_actor = self.master.address

    @contextlib.contextmanager
    def learner(self, actors):
        with (
            self.master,
            prpc_engine.RpcService(self.master.address) as service,
            topics.Publisher(service, "weights", mode="latest") as weights,
            topics.Subscriber(service, "trajectories") as trajectories,
        ):
            yield lambda: trajectories.receive(START_S).value, weights.publish

    @staticmethod
    @contextlib.contextmanager
    def actor(address, number):
        with (
            prpc_engine.RpcService(address) as service,
            topics.Subscriber(service, "weights") as weights,
            topics.Publisher(service, "trajectories", capacity=BATCH) as trajectories,
        ):

            def newest():
                item = weights.try_receive()
                return None if item is None else item.value

            yield newest, trajectories.publish


class OverQueues:
    """multiprocessing's."""

    def __init__(self, actors):
        spawn = multiprocessing.get_context("spawn")
        self.trajectories = spawn.Queue(4 * BATCH)
        self.weights = [spawn.Queue(1) for _ in range(actors)]
        self.for_actor = self.trajectories, self.weights

    @contextlib.contextmanager
    def learner(self, actors):
        def send(weights):
            for one in self.weights:
                with contextlib.suppress(queue.Empty):
                    one.get_nowait()  # what the actor has not taken is old
                with contextlib.suppress(queue.Full):
                    one.put_nowait(weights)

        yield lambda: self.trajectories.get(timeout=START_S), send
        for one in (self.trajectories, *self.weights):
            one.cancel_join_thread()

    @staticmethod
    @contextlib.contextmanager
    def actor(queues, number):
        trajectories, weights = queues

        def newest():
            with contextlib.suppress(queue.Empty):
                return weights[number].get_nowait()
            return None

        yield newest, trajectories.put
        trajectories.cancel_join_thread()


class OverNng:
    """Sockets of nng, with pickles."""

    def __init__(self):
        self.folder = tempfile.TemporaryDirectory()
        self.for_actor = self.folder.name

    @contextlib.contextmanager
    def learner(self, actors):
        import pynng

        with (
            self.folder,
            pynng.Pull0(listen=f"ipc://{self.folder.name}/t", recv_timeout=60_000) as pull,
            pynng.Pub0(listen=f"ipc://{self.folder.name}/w") as pub,
        ):
            yield lambda: pickle.loads(pull.recv()), lambda weights: pub.send(pickle.dumps(weights))

    @staticmethod
    @contextlib.contextmanager
    def actor(folder, number):
        import pynng

        with (
            pynng.Push0(dial=f"ipc://{folder}/t") as push,
            pynng.Sub0(dial=f"ipc://{folder}/w", topics=[b""]) as sub,
        ):

            def newest():
                found = None
                with contextlib.suppress(pynng.TryAgain):
                    while True:
                        found = sub.recv(block=False)
                return None if found is None else pickle.loads(found)

            yield newest, lambda trajectory: push.send(pickle.dumps(trajectory))


WAYS = {"prpc": OverPrpc, "multiprocessing": OverQueues, "nng": OverNng}


# -- the job ---------------------------------------------------------------------------------------


def act(way, given, number):
    """The life of an actor, until it is ended."""
    generator = np.random.default_rng(number)
    weights = new_weights(0)
    env = gymnasium.make("CartPole-v1")
    with WAYS[way].actor(given, number) as (newest, send):
        while True:
            found = newest()
            weights = weights if found is None else found
            send(play(env, weights, generator))


def run(way, actors, seconds):
    """Train for so long: steps a second, and the mean length of the first and the last episodes."""
    over = WAYS[way](*([actors] if way == "multiprocessing" else []))
    spawn = multiprocessing.get_context("spawn")
    processes = [
        spawn.Process(target=act, args=(way, over.for_actor, number), daemon=True)
        for number in range(actors)
    ]
    weights, lengths, episodes = new_weights(0), [], []
    with over.learner(actors) as (receive, send):
        for process in processes:
            process.start()
        receive()  # the first actor plays
        began = time.time()
        while time.time() < began + seconds:
            episodes.append(receive())
            lengths.append(len(episodes[-1][1]))
            if len(episodes) == BATCH:
                weights = train(weights, episodes)
                send(weights)
                episodes = []
        took_s = time.time() - began
        for process in processes:
            process.terminate()
            process.join()
    return sum(lengths) / took_s, np.mean(lengths[:100]), np.mean(lengths[-100:])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--over", choices=[*WAYS, "all"], default="all")
    parser.add_argument("--actors", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0)
    asked = parser.parse_args()
    print(f"{asked.actors} actors, {asked.seconds:g} s each")
    for way in WAYS if asked.over == "all" else [asked.over]:
        if way == "nng" and importlib.util.find_spec("pynng") is None:
            print("nng: pip install pynng")
            continue
        rate, first, last = run(way, asked.actors, asked.seconds)
        print(
            f"{way:16}{rate:9.0f} steps/s   episodes of {first:.0f} steps at first, "
            f"{last:.0f} at last",
            flush=True,
        )


if __name__ == "__main__":
    main()

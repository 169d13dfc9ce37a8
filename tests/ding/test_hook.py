"""The import hook, beside a DI-engine that has the shape of 0.5.3 and nothing in it: in
interpreters of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from prpc_engine.ding import hook
from tests.program import ROOT

PARALLEL = """
from ding.utils import MQ_REGISTRY

class Parallel:
    is_active = True

    def __init__(self, mq_type, said):
        self.mq_type = mq_type
        self._event_loop = type("Loop", (), {
            "on": lambda _, event, fn: said.append("on"),
            "once": lambda _, event, fn: said.append("once")})()
        self._mq = type("Queue", (), {"subscribe": lambda _, event: said.append("subscribe")})()

    def on(self, event, fn):
        if self.is_active:
            self._mq.subscribe(event)
        self._event_loop.on(event, fn)

    def once(self, event, fn):
        if self.is_active:
            self._mq.subscribe(event)
        self._event_loop.once(event, fn)

    @classmethod
    def runner(cls, n_parallel_workers, mq_type="nng", attach_to=None, protocol="ipc", address=None,
               ports=None, topology="mesh", labels=None, node_ids=None, auto_recover=False,
               max_retries=3, redis_host=None, redis_port=None, startup_interval=1):
        "DI-engine's own words."
        all_args = locals()
        del all_args["cls"]
        args_parsers = {"nng": cls._nng_args_parser}

        def _runner(main, *args, **kwargs):
            return [main(each) for each in args_parsers[mq_type](**all_args)]

        return _runner

    @classmethod
    def _nng_args_parser(cls, n_parallel_workers, attach_to=None, topology="mesh", node_ids=None,
                         **kwargs):
        nodes = [f"tcp://127.0.0.1:{50515 + one}" for one in range(n_parallel_workers)]
        of = {"mesh": lambda one: nodes[:one], "star": lambda one: nodes[:min(1, one)],
              "alone": lambda one: []}[topology]
        return [{**kwargs, "node_id": (node_ids or 0) + one, "listen_to": nodes[one],
                 "attach_to": of(one) + (attach_to or []), "n_parallel_workers": n_parallel_workers}
                for one in range(n_parallel_workers)]
"""
K8S = """
class K8SParser:
    def __init__(self, **kwargs):
        self.kwargs = kwargs

    def parse(self):
        if self.kwargs.get("mq_type", "nng") != "nng":
            return self.kwargs
        return {**self.kwargs, "address": "found"}
"""
UTILS = """
class Registry(dict):
    def register(self, name, module):
        assert name not in self
        self[name] = module

MQ_REGISTRY = Registry(nng=object)
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with such a DI-engine, and the hook as the wheel has it."""
    for name, content in {
        "ding/__init__.py": "",
        "ding/utils.py": UTILS,
        "ding/framework/__init__.py": "",
        "ding/framework/parallel.py": PARALLEL,
        "ding/entry/__init__.py": "",
        "ding/entry/cli_parsers/__init__.py": "",
        "ding/entry/cli_parsers/k8s_parser.py": K8S,
        "_prpc_ding_hook.py": Path(hook.__file__).read_text(),
    }.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    return tmp_path


def run(site: Path, code: str, **env: str) -> str:
    """What a program prints that begins as each interpreter does where the wheel is installed."""
    ran = subprocess.run(
        [sys.executable, "-c", f"import _prpc_ding_hook\n{code}"],
        env={
            **os.environ,
            "PYTHONPATH": f"{site}{os.pathsep}{ROOT}",
            "PYTHONWARNINGS": "default",
            **env,
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout + ran.stderr


RUNNER = "from ding.framework.parallel import Parallel, MQ_REGISTRY\nrunner = Parallel.runner\n"


def test_the_hook_imports_nothing(site: Path) -> None:
    code = "import sys; print(sorted(set(sys.modules) - before))"
    ran = subprocess.run(
        [
            sys.executable,
            "-S",  # no other one, where the wheel is installed
            "-c",
            f"import os, sys; before = set(sys.modules); import _prpc_ding_hook; {code}",
        ],
        env={"PYTHONPATH": str(site), "PRPC_DING": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert ran.stdout.strip() == "['_prpc_ding_hook']"


def test_di_engines_registry_knows_our_names_without_importing_us(site: Path) -> None:
    code = RUNNER + "import sys; print(sorted(MQ_REGISTRY), 'prpc_engine' in sys.modules)"
    assert run(site, code) == f"{sorted([*hook.NAMES, 'nng'])} False\n"


def test_a_name_in_the_registry_makes_our_queue(site: Path) -> None:
    code = RUNNER + (
        "mq = MQ_REGISTRY['prpc'](listen_to='ipc:///tmp/x', attach_to=[], name='node 0')\n"
        "print(type(mq).__name__, mq.listen_to)"
    )
    assert run(site, code) == "PrpcMQ ipc:///tmp/x\n"


def test_the_runner_tells_each_worker_whom_to_dial_and_whom_to_expect(site: Path) -> None:
    code = RUNNER + (
        "for topology in ('mesh', 'star', 'alone'):\n"
        "    for one in runner(3, 'prpc', topology=topology, node_ids=5)(lambda each: each):\n"
        "        print(topology, one['name'], [a[-1] for a in one['attach_to']],\n"
        "              [a[-1] for a in one['expects']])\n"
    )
    assert run(site, code).splitlines() == [
        "mesh node 5 [] ['6', '7']",
        "mesh node 6 ['5'] ['7']",
        "mesh node 7 ['5', '6'] []",
        "star node 5 [] ['6', '7']",
        "star node 6 ['5'] []",
        "star node 7 ['5'] []",
        "alone node 5 [] []",
        "alone node 6 [] []",
        "alone node 7 [] []",
    ]


def test_a_handler_is_there_before_its_topic_is_subscribed(site: Path) -> None:
    code = RUNNER + (
        "for name in ('prpc', 'nng'):\n"
        "    said = []\n"
        "    router = Parallel(name, said)\n"
        "    router.on('event', print)\n"
        "    router.once('event', print)\n"
        "    router.is_active = False\n"
        "    router.on('event', print)\n"
        "    print(said)\n"
    )
    assert run(site, code).splitlines() == [
        "['on', 'subscribe', 'once', 'subscribe', 'on']",
        "['subscribe', 'on', 'subscribe', 'once', 'on']",
    ]


def test_attach_to_takes_addresses_and_node_ids_of_the_launch(site: Path) -> None:
    code = RUNNER + (
        "attach_to = ['0', 'tcp://other:1']\n"
        "for one in runner(2, mq_type='torchrpc', topology='alone', attach_to=attach_to)(dict):\n"
        "    print(one['attach_to'], len(one['expects']))\n"
        "try: runner(2, mq_type='prpc', attach_to=['7'])(dict)\n"
        "except Exception as error: print(error)"
    )
    lines = run(site, code).splitlines()
    assert lines[:2] == [
        "['tcp://other:1'] 1",
        "['tcp://other:1', 'tcp://127.0.0.1:50515'] 0",
    ]
    assert lines[2].startswith("--attach-to 7: a node id is known within one launch alone")


def test_torchrpcs_options_are_taken_by_our_names_alone(site: Path) -> None:
    code = RUNNER + (
        "run = runner(1, mq_type='prpc', init_method='env://', use_cuda=False)\n"
        "print(len(run(dict)))\n"
        "try: runner(1, mq_type='nng', init_method='env://')\n"
        "except TypeError as error: print('TypeError')\n"
        "try: runner(1, mq_type='prpc', cuda_device_map='1_0')\n"
        "except Exception as error: print(type(error).__name__)\n"
        "print(len(runner(1)(dict)), runner.__doc__)"
    )
    assert run(site, code).splitlines() == [
        "1",
        "TypeError",
        "ConfigError",
        "1 DI-engine's own words.",
    ]


def test_kubernetes_addresses_are_derived_for_our_names_as_for_nng(site: Path) -> None:
    code = (
        "import ding.framework.parallel\n"
        "from ding.entry.cli_parsers.k8s_parser import K8SParser\n"
        "for name in ('prpc', 'nng', 'redis'):\n"
        "    parser = K8SParser(mq_type=name)\n"
        "    print(parser.parse(), parser.kwargs)\n"
    )
    assert run(site, code).splitlines() == [
        "{'mq_type': 'prpc', 'address': 'found'} {'mq_type': 'prpc'}",
        "{'mq_type': 'nng', 'address': 'found'} {'mq_type': 'nng'}",
        "{'mq_type': 'redis'} {'mq_type': 'redis'}",
    ]


def test_a_variable_turns_the_hook_off(site: Path) -> None:
    code = RUNNER + "print(sorted(MQ_REGISTRY))"
    assert run(site, code, PRPC_DING="0") == "['nng']\n"


def test_a_di_engine_of_another_shape_is_imported_and_warned_of(site: Path) -> None:
    (site / "ding/framework/parallel.py").write_text("hello = 1\n")
    said = run(site, "import ding.framework.parallel as module; print(module.hello)")
    assert "prpc-engine could not add --mq-type prpc to ding.framework.parallel" in said
    assert said.startswith("1") or said.endswith("1\n") or "\n1\n" in said


def test_a_runner_without_its_table_is_refused_by_name(site: Path) -> None:
    text = PARALLEL.replace("args_parsers", "other_parsers")
    (site / "ding/framework/parallel.py").write_text(text)
    code = RUNNER + (
        "try: runner(1, mq_type='prpc')\nexcept ImportError as error: print(error)\n"
        "print(len(runner(1, mq_type='nng')(dict)))"
    )
    lines = run(site, code).splitlines()
    assert "knows version 0.5.3" in lines[0]
    assert lines[1] == "1"


def test_a_di_engine_that_is_imported_already_is_followed_at_once(site: Path) -> None:
    (site / "_prpc_ding_hook.py").rename(site / "later.py")
    (site / "_prpc_ding_hook.py").write_text("")
    code = RUNNER + (
        "import later; later.install(); later.install()\n"
        "import sys\n"
        "found = lambda: [type(one).__name__ for one in sys.meta_path].count('PrpcDingFinder')\n"
        "print(len(MQ_REGISTRY), found())\n"
        "later.uninstall(); print(found())"
    )
    assert run(site, code).splitlines() == ["8 1", "0"]


def test_a_module_that_the_hook_follows_looks_as_any_other(site: Path) -> None:
    code = (
        "import importlib.util, inspect\n"
        "spec = importlib.util.find_spec('ding.framework.parallel')\n"
        "print('class Parallel' in spec.loader.get_source(spec.name))\n"
        "import ding.framework.parallel as module\n"
        "print(type(module.__loader__).__name__, type(module.__spec__.loader).__name__)\n"
        "print(inspect.getsource(module).count('def runner'))"
    )
    assert run(site, code).splitlines() == [
        "True",
        "SourceFileLoader SourceFileLoader",
        "1",
    ]

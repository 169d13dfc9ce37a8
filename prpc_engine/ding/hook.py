"""Lets DI-engine know `--mq-type prpc` in every process that imports it, spawned ones too. The
wheel has this file as `_prpc_ding_hook`, beside `prpc_ding.pth`, which imports it at each start of
the interpreter: so it imports nothing, and does nothing until DI-engine is imported.

    module that is imported              what follows its import
    ding.framework.parallel              its registry has our names; Parallel.runner knows them
    ding.entry.cli_parsers.k8s_parser    K8SParser treats our names as it treats nng
    any other                            nothing: one look at a dict, some 50 ns

What it does by itself is small; register.py has the rest, and is imported for our names alone.
PRPC_DING=0 turns it off. Whatever goes wrong here is a warning: no import fails by it.
"""

import os
import sys

TYPE_CHECKING = False  # typing itself would cost each start of an interpreter a millisecond
if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

NAMES = ("prpc", "prpc:cpu", "prpc:cuda", "torchrpc", "torchrpc:cpu", "torchrpc:cuda", "cuda")
OPT_OUT = "PRPC_DING"
DONE = "prpc_installed"  # what marks a module that is done


def install() -> None:
    """Watch imports from now on; again: does nothing."""
    if os.environ.get(OPT_OUT, "1") == "0" or any(
        type(finder).__name__ == PrpcDingFinder.__name__ for finder in sys.meta_path
    ):
        return
    sys.meta_path.insert(0, PrpcDingFinder())
    for name, follow in FOLLOWS.items():
        if name in sys.modules:
            _follow(follow, sys.modules[name])


def uninstall() -> None:
    """Watch no more; what was changed stays."""
    sys.meta_path[:] = [
        one for one in sys.meta_path if type(one).__name__ != PrpcDingFinder.__name__
    ]


def on_parallel(module: "Any") -> None:
    """ding.framework.parallel: our names are in its registry, and its runner takes them."""
    registry, parallel = module.MQ_REGISTRY, module.Parallel
    for name in NAMES:
        if name not in registry:  # a future DI-engine may have one of its own
            registry.register(name, _queue_of(name))
    original = parallel.runner.__func__

    def runner(cls: "Any", n_parallel_workers: int, *args: "Any", **kwargs: "Any") -> "Any":
        mq_type = args[0] if args else kwargs.get("mq_type", "nng")
        if mq_type not in NAMES:
            return original(cls, n_parallel_workers, *args, **kwargs)
        from prpc_engine.ding import register

        return register.runner(original, cls, n_parallel_workers, args, kwargs)

    runner.__doc__ = original.__doc__
    parallel.runner = classmethod(runner)
    parallel.on = _registering_first(parallel.on, "on")
    parallel.once = _registering_first(parallel.once, "once")


def _registering_first(original: "Callable[..., Any]", verb: str) -> "Callable[..., Any]":
    """Parallel.on() or once(): DI-engine's own subscribes first, and drops an event that comes
    before its handler is there.
    """

    def register(self: "Any", event: str, fn: "Any") -> None:
        if not self.is_active or getattr(self, "mq_type", None) not in NAMES:
            original(self, event, fn)
            return
        getattr(self._event_loop, verb)(event, fn)
        self._mq.subscribe(event)

    register.__doc__ = original.__doc__
    return register


def _queue_of(name: str) -> "Callable[..., Any]":
    def make(*args: "Any", **kwargs: "Any") -> "Any":
        from prpc_engine.ding import register

        return register.queue(name, *args, **kwargs)

    return make


def on_k8s_parser(module: "Any") -> None:
    """ding.entry.cli_parsers.k8s_parser: it derives addresses for nng alone."""
    original = module.K8SParser.parse

    def parse(self: "Any") -> "Any":
        given = self.kwargs
        if given.get("mq_type") not in NAMES:
            return original(self)
        self.kwargs = {**given, "mq_type": "nng"}
        try:
            return {**original(self), "mq_type": given["mq_type"]}
        finally:
            self.kwargs = given

    module.K8SParser.parse = parse


FOLLOWS = {
    "ding.framework.parallel": on_parallel,
    "ding.entry.cli_parsers.k8s_parser": on_k8s_parser,
}


def _follow(follow: "Callable[[Any], None]", module: "ModuleType") -> None:
    try:
        if not hasattr(module, DONE):
            setattr(module, DONE, True)
            follow(module)
    except Exception as error:
        import warnings

        warnings.warn(
            f"prpc-engine could not add --mq-type prpc to {module.__name__}: "
            f"{type(error).__name__}: {error}",
            stacklevel=2,
        )


class PrpcDingFinder:
    """The first of sys.meta_path: wraps the loaders of the modules in FOLLOWS."""

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "ModuleSpec | None":
        """None for all other modules."""
        follow = FOLLOWS.get(name)
        if follow is None:
            return None
        for finder in sys.meta_path:
            if finder is not self and hasattr(finder, "find_spec"):
                spec: Any = finder.find_spec(name, path, target)
                if spec is not None:
                    if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                        spec.loader = Loader(spec.loader, follow)
                    found: ModuleSpec = spec
                    return found
        return None


class Loader:
    """The loader of one of those modules, and what follows its import."""

    def __init__(self, loader: "Any", follow: "Callable[[Any], None]") -> None:
        self._loader, self._follow = loader, follow

    def create_module(self, spec: "ModuleSpec") -> "ModuleType | None":
        """As the loader does."""
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: "Any") -> None:
        """As the loader does; then what follows."""
        module.__loader__ = module.__spec__.loader = self._loader  # as if nobody had looked
        self._loader.exec_module(module)
        _follow(self._follow, module)

    def __getattr__(self, name: str) -> "Any":
        """What else it can: for who looks at the module without importing it."""
        return getattr(self._loader, name)


if __name__ == "_prpc_ding_hook":
    install()

"""The wheel holds `shard`, `prpc_engine` and the import hook for DI-engine alone, and all that an
installed `prpc` needs.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the wheel, and nothing else of this checkout, was unpacked into."""
    built = next(
        WheelBuilder(str(ROOT)).build(
            directory=str(tmp_path_factory.mktemp("dist")), versions=["standard"]
        )
    )
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(built) as wheel:
        wheel.extractall(folder)
    return folder


def python(installed: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with what is installed there, and nothing of this checkout."""
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": str(installed), "PYTHONSAFEPATH": "1"},
        cwd=installed,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def prpc(installed: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the installed command line."""
    return python(installed, "-m", "prpc_engine.cli", *arguments)


def test_the_wheel_takes_two_names_at_the_top_level_and_the_hook_of_di_engine(
    installed: Path,
) -> None:
    assert {path.name for path in installed.iterdir() if path.suffix != ".dist-info"} == {
        "shard",
        "prpc_engine",
        "prpc_ding.pth",
        "_prpc_ding_hook.py",
    }


def test_where_the_wheel_is_installed_each_interpreter_has_the_hook(installed: Path) -> None:
    code = "import site, sys; site.addsitedir(sys.argv[1]); print(*map(type, sys.meta_path))"
    for value, count in (("1", 1), ("0", 0)):
        ran = subprocess.run(
            [sys.executable, "-I", "-S", "-c", code, str(installed)],
            env={**os.environ, "PRPC_DING": value},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert ran.stdout.count("_prpc_ding_hook.PrpcDingFinder") == count
        assert not ran.stderr


def test_every_module_of_the_tree_is_in_the_wheel(installed: Path) -> None:
    for room in ("shard", "prpc_engine"):
        modules = {path.relative_to(ROOT) for path in (ROOT / room).rglob("*.py")}
        missing = {str(path) for path in modules if not (installed / path).is_file()}
        assert missing <= {"prpc_engine/ding/hook.py"}  # as _prpc_ding_hook.py


def test_ditask_of_the_wheel_says_what_it_needs(installed: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); sys.modules['ding'] = None\n"
        "from prpc_engine.ding.cli import main; main()"
    )
    ran = subprocess.run(
        [sys.executable, "-P" if sys.version_info >= (3, 11) else "-B", "-c", code, str(installed)],
        cwd=installed,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 1
    assert ran.stderr.startswith("prpc-ditask runs DI-engine, which cannot be imported")


def test_the_distribution_is_named_as_every_hint_says(installed: Path) -> None:
    metadata = next(installed.glob("*.dist-info")) / "METADATA"
    assert "\nName: prpc-engine\n" in metadata.read_text()


def test_no_hint_names_the_package_of_somebody_else() -> None:
    """`prpc` on the package index is a stranger's: whoever follows a hint that says
    `pip install 'prpc[...]'` runs that.
    """
    files = [
        ROOT / "README.md",
        ROOT / "CHANGELOG.md",
        ROOT / "ARCHITECTURE.md",
        ROOT / "pyproject.toml",
    ]
    for folder in ("shard", "prpc_engine", "perf", "docs", "configs", "examples"):
        files += [
            path
            for path in (ROOT / folder).rglob("*")
            if path.suffix in {".py", ".md", ".toml", ".sh", ".html", ".yaml"}
        ]
    extra = re.compile(r"(?<![\w.-])prpc\[|pip3? install[^\n&|;]*?['\" ]prpc(?![\w/-])")
    wrong = [f"{path}: {found[0]}" for path in files for found in extra.finditer(path.read_text())]
    assert len(files) > 300, "the folders are where they were"
    assert not wrong


def test_an_installed_prpc_prints_the_configuration_to_copy(installed: Path) -> None:
    ran = prpc(installed, "config", "--example")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == (ROOT / "configs" / "default.toml").read_text()


def test_each_benchmark_is_found_in_an_installed_prpc(installed: Path) -> None:
    code = (
        "import importlib; from prpc_engine.perf import cli_bench\n"
        "for one in cli_bench.SUBJECTS: importlib.import_module(f'prpc_engine.perf.bench_{one}')"
    )
    ran = python(installed, "-c", code)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.slow
def test_an_installed_prpc_has_its_benchmarks(installed: Path) -> None:
    ran = prpc(installed, "bench", "call", "--quick", "--json")
    assert ran.returncode == 0, ran.stderr
    assert '"call"' in ran.stdout

"""`prpc bench --record` and `--compare`: a real run of the ring, and what the files then say."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from perf import cli_bench, history_file
from perf.timing import Effort
from prpc_engine import cli
from prpc_engine.errors import ConfigError
from tests.imports import ROOT

CASE = "round trip, 64 B"
# Three repeats in fresh processes, as --quick has, and as little timed in each as may be.
SHORT = Effort(repeats=3, warm_s=0.0, timed_s=0.0, ops_min=3, ops_max=3, idle_s=0.1)


def checkout(path: Path) -> Path:
    """perf/history of another one."""
    (path / "pyproject.toml").write_text("")
    (path / "perf").mkdir()
    return path / "perf" / "history"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return checkout(tmp_path)


class Recorded(NamedTuple):
    """A real run: what --json prints of it, and where --record has put it."""

    run_file: Path
    folder: Path


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    path = tmp_path_factory.mktemp("recorded")
    made = Recorded(path / "run.jsonl", checkout(path))
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(cli_bench, "FULL", SHORT)
        assert cli_bench.main("ring", case=CASE, record=True, json=True, folder=made.folder) == 0
    made.run_file.write_text(printed.getvalue())
    return made


@pytest.fixture
def run_file(recorded: Recorded) -> Path:
    return recorded.run_file


def records(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.slow
def test_a_run_is_recorded_and_the_next_is_compared_with_it(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = recorded.folder
    monkeypatch.setattr(cli_bench, "FULL", SHORT)
    lines = history_file.read(folder / "ring.jsonl")
    assert [line.candidate for line in lines] == ["shard.Ring", "shard.Ring, in place"]
    for line in lines:
        assert (line.case, line.figure, line.unit, line.repeats) == (CASE, "p50_ns", "ns", 3)
        assert line.peer == "multiprocessing.Pipe"
        assert line.ours_low is not None
        assert line.ours_high is not None
        assert 0 < line.ours_low <= line.ours <= line.ours_high
        assert line.ratio_low is not None
        assert line.ratio_high is not None
        assert line.ratio is not None
        assert 0 < line.ratio_low <= line.ratio <= line.ratio_high
        assert line.commit == history_file.commit_of(ROOT)
    assert cli_bench.main("ring", case=CASE, compare="", json=True, folder=folder) == 0
    changes = [each for each in records(capsys.readouterr().out) if each["kind"] == "change"]
    assert [each["then"]["candidate"] for each in changes] == [line.candidate for line in lines]
    for each in changes:
        assert each["why"] == ""
        assert {each["by_ratio"], each["by_figure"]} <= {"better", "worse", "the same"}
    assert history_file.read(folder / "ring.jsonl") == lines, "a comparison records nothing"


@pytest.mark.slow
def test_a_finished_run_compared_with_itself_is_the_same(
    run_file: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And says so to people, with the rule by which it is judged."""
    told = {"finished": run_file, "folder": folder}
    assert cli_bench.main("ring", compare=str(run_file), json=True, **told) == 0
    for each in records(capsys.readouterr().out):
        assert (each["by_ratio"], each["by_figure"]) == ("the same", "the same")
    assert cli_bench.main("ring", compare=str(run_file), record=True, **told) == 0
    said = capsys.readouterr().out
    assert "do not meet" in said
    assert said.count("the same") >= 4
    commit = history_file.read(folder / "ring.jsonl")[0].commit
    assert cli_bench.main("ring", compare=commit[:6], json=True, **told) == 0
    assert records(capsys.readouterr().out)[0]["then"]["commit"] == commit


@pytest.mark.slow
def test_a_figure_without_an_earlier_line_is_said_to_have_none(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text(run_file.read_text().replace(CASE, "another case"))
    assert cli_bench.main("ring", compare=str(other), finished=run_file) == 0
    assert "2 of 2: no earlier line of this figure" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("text", [None, "", "\n", "of another benchmark"])
def test_a_history_without_a_figure_is_refused_before_anything_is_measured(
    text: str | None, run_file: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli_bench.main("ring", record=True, finished=run_file, folder=folder)
    path = folder / "kv.jsonl"
    if text == "of another benchmark":
        (folder / "ring.jsonl").rename(path)
    elif text is not None:
        path.write_text(text)
    monkeypatch.setattr(cli_bench, "measure", None)
    for asked in ("", str(path)) if text is not None else ("",):
        with pytest.raises(ConfigError, match=r"no figure of kv.*prpc bench kv --record") as told:
            cli_bench.main("kv", compare=asked, folder=folder)
        assert ("only of ring" in str(told.value)) == (text == "of another benchmark")


def test_a_damaged_history_is_refused_before_anything_is_measured(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir()
    (folder / "ring.jsonl").write_text("{}\n")
    monkeypatch.setattr(cli_bench, "measure", None)
    for told in ({"record": True}, {"compare": ""}, {"compare": "abcdef"}):
        with pytest.raises(ConfigError, match=r"ring\.jsonl:1: "):
            cli_bench.main("ring", folder=folder, **told)


def test_a_commit_that_has_no_line_is_refused_before_anything_is_measured(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"no line of that commit in .*none yet: --record"):
        cli_bench.main("ring", compare="abcdef", folder=folder)


@pytest.mark.slow
def test_a_run_of_another_benchmark_is_refused(run_file: Path, folder: Path) -> None:
    with pytest.raises(ConfigError, match="is of ring, and rpc was asked for"):
        cli_bench.main("rpc", compare="", finished=run_file, folder=folder)


@pytest.mark.slow
def test_wrong_files_are_told_in_one_line(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = tmp_path / "old.jsonl"
    each = [{**record, "each": None} for record in records(run_file.read_text())]
    for record in each:
        del record["each"]
    old.write_text("\n".join(map(json.dumps, each)))
    for name in (str(tmp_path / "nothing"), str(old)):
        assert cli.main(["bench", "ring", "--compare", "--from", name]) == cli.WRONG_USAGE
        said = capsys.readouterr().err
        assert name in said
        assert len(said.splitlines()) == 1


@pytest.mark.slow
def test_a_run_is_recorded_once(
    run_file: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli_bench.main("ring", record=True, finished=run_file, folder=folder) == 0
    before = (folder / "ring.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=r"the run of commit .* is in .*ring\.jsonl already"):
        cli_bench.main("ring", record=True, finished=run_file, folder=folder)
    assert (folder / "ring.jsonl").read_bytes() == before


def test_a_quick_run_is_not_recorded(folder: Path) -> None:
    with pytest.raises(ConfigError, match="give one of them"):
        cli_bench.main("ring", quick=True, record=True, folder=folder)
    assert not folder.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["-m", "prpc_engine.cli", "bench", "ring", "--quick"],
        ["-m", "perf.bench_ring", "--quick", "--case", CASE],
    ],
    ids=["prpc", "module"],
)
def test_a_benchmark_whose_reader_has_gone_ends_as_other_commands_do(arguments: list[str]) -> None:
    """As in `prpc bench ring | head -1`; the first lines, on the machine, find nobody."""
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb") as nobody:
        ran = subprocess.run(
            [sys.executable, *arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            stdout=nobody,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert (ran.returncode, ran.stderr) == (cli.READER_GONE, "")

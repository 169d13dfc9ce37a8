"""The files of perf/history/, in a folder of the test's own and in this tree."""

from __future__ import annotations

import datetime
import json
import subprocess
from pathlib import Path

import pytest

from perf import cli_bench, history_file
from perf.change import Host, Line, line_record
from prpc_engine.errors import ConfigError
from prpc_engine.release import VERSION

LINE = Line(
    commit="aaaa",
    date="2026-11-23T05:00:00Z",
    machine=Host("A CPU", 2, "6.1", "3.11.7"),
    doubt="",
    bench="rpc",
    case="call, 64 B",
    candidate="ours",
    figure="p50_ns",
    unit="ns",
    ours=10.0,
    ours_low=9.0,
    ours_high=12.0,
    peer="pipe",
    peers_figure=100.0,
    ratio=0.1,
    ratio_low=0.09,
    ratio_high=0.12,
    repeats=3,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """perf/history of a checkout that is not under git."""
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "perf").mkdir()
    return tmp_path / "perf" / "history"


def git(root: Path, *arguments: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    subprocess.run(["git", "-C", str(root), *who, *arguments], check=True, capture_output=True)


def test_lines_are_read_as_they_were_appended(folder: Path) -> None:
    path = history_file.file_of("rpc", folder)
    assert history_file.read(path) == []
    history_file.append([LINE], "rpc", folder)
    history_file.append([LINE, LINE], "rpc", folder)
    assert history_file.read(path) == [LINE, LINE, LINE]
    assert len(path.read_text().splitlines()) == 3, "one line a figure"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "truncated"),
        ("[1]", "Expected `object`"),
        ('{"commit": "a"}', "missing required field"),
        (json.dumps(line_record(LINE)).replace("10.0", '"x"'), "`$.ours`"),
    ],
)
def test_a_damaged_line_is_named_by_file_and_number(folder: Path, text: str, why: str) -> None:
    path = history_file.append([LINE], "rpc", folder)
    with path.open("a") as file:
        file.write(f"\n{text}\n")
    with pytest.raises(ConfigError, match=r"rpc\.jsonl:3: ") as raised:
        history_file.read(path)
    assert why in str(raised.value)
    assert "remove that line" in str(raised.value), "and what to do"


def test_a_history_without_its_last_newline_is_extended_by_a_line_of_its_own(folder: Path) -> None:
    path = history_file.append([LINE], "rpc", folder)
    path.write_text(path.read_text().rstrip("\n"))
    history_file.append([LINE], "rpc", folder)
    assert history_file.read(path) == [LINE, LINE]
    assert path.read_text().count("\n") == 2


def test_two_objects_in_one_line_are_told_where_a_new_line_begins(folder: Path) -> None:
    path = history_file.append([LINE, LINE], "rpc", folder)
    path.write_text(path.read_text().replace("\n", ""))
    with pytest.raises(ConfigError, match=r"rpc\.jsonl:1: .*a new line where `}{` stands"):
        history_file.read(path)


def test_a_file_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no file"):
        history_file.read_run(tmp_path / "nothing.jsonl", "rpc")
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ConfigError, match="no results"):
        history_file.read_run(tmp_path / "empty.jsonl", "rpc")


@pytest.mark.parametrize("name", ["/dev/zero", "."])
def test_a_device_or_a_folder_is_said_to_be_no_regular_file(folder: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name} is no regular file"):
        history_file.read_run(Path(name), "rpc")
    with pytest.raises(ConfigError, match=f"^{name} is no regular file"):
        history_file.past("rpc", name, folder)


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    most = history_file.FILE_BYTES_MAX
    with (tmp_path / "large.jsonl").open("wb") as file:
        file.truncate(most + 1)  # takes no room
    with pytest.raises(ConfigError, match=f"has {most + 1} bytes, at most {most}"):
        history_file.read_run(tmp_path / "large.jsonl", "rpc")


def test_an_installed_package_is_not_written_to(tmp_path: Path) -> None:
    folder = tmp_path / "prpc_engine" / "perf" / "history"
    with pytest.raises(ConfigError, match="run `prpc bench` there"):
        history_file.append([LINE], "rpc", folder)
    assert not folder.exists()
    assert history_file.commit_of(history_file.checkout(folder)) == f"v{VERSION}"


def test_a_file_in_the_place_of_the_folder_is_told_before_anything_is_measured(
    folder: Path,
) -> None:
    folder.write_text("")
    with pytest.raises(ConfigError, match=r"history is no folder: move it away"):
        cli_bench.main("ring", record=True, folder=folder)


def test_a_commit_is_told_with_a_plus_where_files_differ_from_it(folder: Path) -> None:
    root = folder.parent.parent
    assert history_file.commit_of(root) == f"v{VERSION}", "no repository"
    git(root, "init", "--quiet")
    assert history_file.commit_of(root) == f"v{VERSION}", "no commit"
    history_file.append([LINE], "rpc", folder)
    git(root, "add", ".")
    git(root, "commit", "--quiet", "-m", "Begin")
    commit = history_file.commit_of(root)
    assert len(commit) == history_file.COMMIT_LENGTH
    history_file.append([LINE], "rpc", folder)
    assert history_file.commit_of(root) == commit, "a recorded run is no change of what is measured"
    (root / "pyproject.toml").write_text("[project]\n")
    assert history_file.commit_of(root) == f"{commit}+"


def test_a_package_inside_another_repository_does_not_take_its_commit(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet")
    (tmp_path / "file").write_text("")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "Begin")
    inside = tmp_path / "vendored"
    inside.mkdir()
    assert history_file.commit_of(inside) == f"v{VERSION}"


def test_a_stamp_has_the_time_in_utc() -> None:
    now = datetime.datetime(2026, 11, 23, 5, 0, tzinfo=datetime.timezone.utc)
    assert history_file.stamp(now).date == "2026-11-23T05:00:00Z"


def test_every_history_of_this_tree_can_be_read_and_is_of_a_benchmark() -> None:
    for path in history_file.FOLDER.glob("*"):
        assert path.stem in cli_bench.SUBJECTS
        lines = history_file.read(path)
        assert lines
        assert {line.bench for line in lines} == {path.stem}
        dates = [line.date for line in lines]
        assert dates == sorted(dates), "the newest stands last"
        for text in path.read_text().splitlines():
            assert list(json.loads(text)) == list(Line.__struct_fields__)

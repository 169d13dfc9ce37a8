"""Fragments of changelog.d/, and the section of CHANGELOG.md that is made from them at a release.

python .ci/changelog.py check            are all fragments well-formed? exit code 1 and why if not
python .ci/changelog.py show             the section Unreleased as it would be released now
python .ci/changelog.py release 0.2.0    write it, remove the fragments, set the version

A fragment is a file of one change, `<slug>.<kind>.md`, with the text of one entry: one paragraph of
sentences, without "- ". Two changes never edit one file, so two branches that both tell users
something merge without a conflict.

    kind     section    a text that begins with "Breaking: "
    added    Added      is refused
    changed  Changed    goes to "Changed: what users must look at"
    fixed    Fixed      the same
    removed  Removed    the same; it has to begin so: what is removed breaks who used it

The version stands in pyproject.toml and in prpc_engine/release.py; STATED has the two lines.
What decides here takes texts and returns texts; main(), files_of() and release() do the I/O.
"""

from __future__ import annotations

import argparse
import datetime
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
FOLDER = "changelog.d"
ABOUT = "README.md"  # of the folder; no fragment
KINDS = {"added": "Added", "changed": "Changed", "fixed": "Fixed", "removed": "Removed"}
BREAKING, BREAKING_SECTION = "Breaking: ", "Changed: what users must look at"
SECTIONS = ("Added", BREAKING_SECTION, "Changed", "Fixed", "Removed")  # their order in a release
NAME = re.compile(r"(?P<slug>[a-z0-9]+(-[a-z0-9]+)*)\.(?P<kind>[a-z]+)\.md")
LINE_LENGTH_MAX = 150
UNRELEASED = "## [Unreleased]\n"
HEADING = re.compile(r"^## \[(\d+\.\d+\.\d+)\] - (\d{4}-\d{2}-\d{2})$", re.MULTILINE)
VERSION = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)")
# Where the number stands: file -> the line, with the number as its only group.
STATED = {
    "pyproject.toml": re.compile(r'^version = "(.+)"$', re.MULTILINE),
    "prpc_engine/release.py": re.compile(r'^VERSION = "(.+)"$', re.MULTILINE),
}


class Malformed(ValueError):
    """A fragment, the changelog or a version is not as this file's head says."""


class Fragment(NamedTuple):
    """One change."""

    section: str
    text: str


def fragment(name: str, text: str) -> Fragment:
    """What a file of changelog.d/ says. Raises Malformed."""
    found = NAME.fullmatch(name)
    if not found:
        raise Malformed(f"{name}: <slug>.<kind>.md expected, a slug of a-z, 0-9 and single hyphens")
    kind = found["kind"]
    if kind not in KINDS:
        raise Malformed(f"{name}: no kind {kind!r}; there are: {', '.join(KINDS)}")
    lines = text.rstrip("\n").split("\n")
    if not text.strip():
        raise Malformed(f"{name} is empty: write what a user notices, in a sentence")
    if any(not line.strip() for line in lines):
        raise Malformed(
            f"{name} has an empty line: one paragraph expected; a second change is a second file"
        )
    if lines[0].startswith(("-", "*", "#", " ")) and not lines[0].startswith("**"):
        raise Malformed(
            f"{name} begins with {lines[0][0]!r}: plain text expected; a release makes the list"
        )
    if not lines[-1].endswith("."):
        raise Malformed(f"{name} ends with {lines[-1][-1]!r}: sentences end with a full stop")
    longest = max(lines, key=len)
    if len(longest) > LINE_LENGTH_MAX:
        raise Malformed(
            f"{name} has a line of {len(longest)} characters, at most {LINE_LENGTH_MAX} allowed"
        )
    breaking = lines[0].startswith(BREAKING)
    if not breaking and lines[0].lower().startswith(BREAKING.strip().lower()):
        raise Malformed(f"{name} begins with {lines[0][:10]!r}: {BREAKING!r} is the word")
    if kind == "added" and breaking:
        raise Malformed(f"{name} begins with {BREAKING!r}: what breaks is changed or removed")
    if kind == "removed" and not breaking:
        raise Malformed(
            f"{name} begins without {BREAKING!r}: users must learn of it; say what to use instead"
        )
    text = "\n".join(line.strip() for line in lines)
    return Fragment(BREAKING_SECTION if breaking else KINDS[kind], text.removeprefix(BREAKING))


def complaints(files: Mapping[str, str]) -> list[str]:
    """What is wrong with the files of changelog.d/, by name."""
    found = []
    for name, text in sorted(files.items()):
        try:
            fragment(name, text)
        except Malformed as error:
            found.append(str(error))
    return found


def unreleased(changelog: str, fragments: Iterable[Fragment]) -> str:
    """The body of Unreleased with each fragment as the first of its section. Raises Malformed."""
    _, own, _ = _cut(changelog)
    sections: dict[str, str] = {}
    before, *parts = re.split(r"^### (.+)\n", own, flags=re.MULTILINE)
    if before.strip():
        first = before.strip().splitlines()[0]
        raise Malformed(f"CHANGELOG.md has text before the first ### of Unreleased: {first!r}")
    for heading, body in zip(parts[::2], parts[1::2], strict=True):
        sections[heading] = sections.get(heading, "") + body.strip("\n") + "\n"
    added: dict[str, str] = {}
    for section, text in fragments:
        added[section] = added.get(section, "") + "- " + text.replace("\n", "\n  ") + "\n"
    order = [*SECTIONS, *(heading for heading in sections if heading not in SECTIONS)]
    return "\n".join(
        f"### {heading}\n\n{added.get(heading, '')}{sections.get(heading, '')}"
        for heading in order
        if heading in added or heading in sections
    )


def released(changelog: str, fragments: Sequence[Fragment], version: str, date: str) -> str:
    """The changelog after a release, with Unreleased as its newest version. Raises Malformed."""
    before, _, after = _cut(changelog)
    newest = newest_version(changelog)
    if not VERSION.fullmatch(version):
        raise Malformed(f"version {version!r}: three numbers expected, as in 0.2.0")
    if newest is not None and numbers(version) <= numbers(newest):
        raise Malformed(f"version {version} is not after {newest}, which has been released")
    body = unreleased(changelog, fragments)
    if not body:
        raise Malformed("nothing to release: Unreleased is empty, and so is changelog.d/")
    text = f"{before}{UNRELEASED}\n## [{version}] - {date}\n\n{body}"
    return text + (f"\n{after}" if after else "")


def newest_version(changelog: str) -> str | None:
    """The version of the first release in the changelog; None before the first release."""
    found = HEADING.search(changelog)
    return found[1] if found else None


def numbers(version: str) -> tuple[int, ...]:
    """A version in the order of releases."""
    return tuple(map(int, version.split(".")))


def _cut(changelog: str) -> tuple[str, str, str]:
    """What stands before Unreleased, its body, and the releases after it."""
    before, heading, rest = changelog.partition(UNRELEASED)
    if not heading:
        raise Malformed(f"CHANGELOG.md has no line {UNRELEASED.strip()!r}")
    next_release = HEADING.search(rest)
    end = next_release.start() if next_release else len(rest)
    return before, rest[:end], rest[end:]


def files_of(root: Path) -> dict[str, str]:
    """Name -> text of each file in changelog.d/ that is to be a fragment. Raises Malformed."""
    paths = [path for path in sorted((root / FOLDER).iterdir()) if path.name != ABOUT]
    return {path.name: _text_of(path) for path in paths}


def _text_of(path: Path) -> str:
    if path.is_symlink() or not path.is_file():  # a link may name any file of the machine
        raise Malformed(f"{FOLDER}/{path.name} is no regular file: remove it, or write one")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise Malformed(f"{FOLDER}/{path.name} is no UTF-8: {error}") from error


def release(root: Path, version: str, date: str) -> None:
    """Write all that a release changes in the tree. Raises Malformed before anything is written."""
    files = files_of(root)
    changelog = root / "CHANGELOG.md"
    text = released(
        changelog.read_text(), [fragment(name, files[name]) for name in files], version, date
    )
    stated = {}
    for name, line in STATED.items():
        content = (root / name).read_text()
        found = line.search(content)
        if not found:
            raise Malformed(f"{name} has no line {line.pattern!r}")
        stated[name] = content[: found.start(1)] + version + content[found.end(1) :]
    changelog.write_text(text)
    for name, content in stated.items():
        (root / name).write_text(content)
    for name in files:
        (root / FOLDER / name).unlink()


def main(arguments: Sequence[str], root: Path = ROOT) -> int:
    """0 when it worked, 1 when a fragment, the changelog or the version is wrong."""
    parser = argparse.ArgumentParser(
        prog="changelog.py", description="The fragments of changelog.d/ and CHANGELOG.md."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check", help="are all fragments well-formed?")
    commands.add_parser("show", help="the section Unreleased as it would be released now")
    releasing = commands.add_parser(
        "release", help="write CHANGELOG.md and the version, remove the fragments"
    )
    releasing.add_argument("version", help="as in 0.2.0")
    given = parser.parse_args(arguments)
    try:
        files = files_of(root)
        wrong = complaints(files)
        if wrong:
            raise Malformed("\n".join(wrong))
        if given.command == "check":
            print(f"{len(files)} fragments, all well-formed")
        elif given.command == "show":
            print(
                unreleased(
                    (root / "CHANGELOG.md").read_text(),
                    [fragment(name, files[name]) for name in files],
                ),
                end="",
            )
        else:
            today = datetime.datetime.now(datetime.timezone.utc).date()
            release(root, given.version, today.isoformat())
            print(
                f"wrote CHANGELOG.md, {', '.join(STATED)}; next: commit, git tag v{given.version}"
            )
    except Malformed as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

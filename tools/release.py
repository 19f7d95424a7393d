"""Prepares and checks a release; docs/releasing.md is the walk.

`python -m tools.release prepare VERSION` gives every distribution the version, also where one names
another, and the changelog's unreleased changes a section of it. The workflow "Release" asks
`check VERSION` whether the commit is that release, `links VERSION` to lead the READMEs' links from
PyPI into the repository, and `notes VERSION` for the section.
"""

import argparse
import os
import re
import subprocess
import sys
from datetime import UTC, date, datetime
from pathlib import Path

from packaging.version import InvalidVersion, Version

from tools.requirements import ROOT, project_files

_VERSION = re.compile(r'(?m)^(version = )"([^"]+)"$')
_PIN = re.compile(r'"(flotilla-rl[a-z-]*(?:\[[a-z0-9,-]+\])?==)([^"]+)"')
_HEADING = re.compile(r"(?m)^## (\S+)(?: - \d{4}-\d\d-\d\d)?$\n")
_UNRELEASED = "Unreleased"
# A link, or an image, within the repository.
_LINK = re.compile(r"(!?)(\[[^\]]*\])\((?![a-z]+:|#)([^)#\s]+)(#[^)]*)?\)")


class ReleaseError(Exception):
    """The version cannot be released; the message says what to do."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.release", description=__doc__)
    parser.add_argument("what", choices=("prepare", "check", "links", "notes"))
    parser.add_argument("version", help="of PEP 440, such as 0.2.0 or 1.0.0rc1")
    args = parser.parse_args()
    try:
        if args.what == "prepare":
            prepare_release(ROOT, args.version, datetime.now(UTC).date())
        elif args.what == "check":
            check_release(ROOT, args.version)
        elif args.what == "links":
            link_readmes(ROOT, args.version, _name_repository())
        else:
            print(read_notes(ROOT, args.version))
    except ReleaseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def prepare_release(root: Path, version: str, today: date) -> None:
    """Write the version into all projects and the changelog. Raises ReleaseError and changes
    nothing if it cannot be released."""
    _require_version(version)
    if _git(root, "tag", "--list", f"v{version}"):
        raise ReleaseError(f"{version} is released: the tag v{version} exists; choose another")
    newest = max(Version(each) for each in stated_versions(root).values())
    if Version(version) < newest:
        raise ReleaseError(f"{version} is older than {newest}, which the projects have")
    sections = _sections(root)
    if version in sections:
        raise ReleaseError(f"CHANGELOG.md has a section {version}; prepare a release only once")
    if not sections.get(_UNRELEASED):
        raise ReleaseError(f'CHANGELOG.md has nothing under "{_UNRELEASED}"; describe the changes')
    for file in project_files(root):
        text = _VERSION.sub(rf'\g<1>"{version}"', file.read_text(encoding="utf-8"))
        file.write_text(_PIN.sub(rf'"\g<1>{version}"', text), encoding="utf-8")
    changelog = root / "CHANGELOG.md"
    heading = f"## {_UNRELEASED}\n"
    text = changelog.read_text(encoding="utf-8")
    text = text.replace(heading, f"{heading}\n## {version} - {today}\n", 1)
    changelog.write_text(text, encoding="utf-8")


def check_release(root: Path, version: str) -> None:
    """Raise ReleaseError unless this commit is the release of a version. It may have the tag
    already: a release that failed in the middle is repeated."""
    _require_version(version)
    others = [f"{place}{has}" for place, has in stated_versions(root).items() if has != version]
    if others:
        told = f"prepare {version} first, and commit it. Of another version are:"
        raise ReleaseError("\n  ".join([told, *others]))
    read_notes(root, version)
    tagged = _git(root, "rev-parse", "--quiet", "--verify", f"refs/tags/v{version}^{{commit}}")
    if tagged not in ("", _git(root, "rev-parse", "HEAD")):
        raise ReleaseError(f"the tag v{version} is of another commit, {tagged}: choose a version")


def link_readmes(root: Path, version: str, repository: str) -> None:
    """Make the relative links in the READMEs of all distributions lead to the version's tag in a
    repository, given by its URL: on PyPI a README has no files around it."""
    for readme in (file.with_name("README.md") for file in project_files(root)):

        def lead(link: re.Match[str], folder: Path = readme.parent) -> str:
            image, text, target, anchor = link.groups(default="")
            path = os.path.relpath(folder / target, root)
            kind = "raw" if image else "blob"
            return f"{image}{text}({repository}/{kind}/v{version}/{path}{anchor})"

        readme.write_text(_LINK.sub(lead, readme.read_text(encoding="utf-8")), encoding="utf-8")


def _name_repository() -> str:
    """Return the URL of the repository whose workflow this is. Raises ReleaseError outside one."""
    server, name = os.environ.get("GITHUB_SERVER_URL"), os.environ.get("GITHUB_REPOSITORY")
    if not (server and name):
        raise ReleaseError("the workflow sets GITHUB_SERVER_URL and GITHUB_REPOSITORY; set both")
    return f"{server}/{name}"


def read_notes(root: Path, version: str) -> str:
    """Return the changelog's section of a version. Raises ReleaseError if there is none."""
    found = _sections(root).get(version)
    if not found:
        raise ReleaseError(f"CHANGELOG.md has no section {version}: prepare the release first")
    return found


def stated_versions(root: Path) -> dict[str, str]:
    """Return every version that the projects state: of each, and in each place that pins one."""
    found: dict[str, str] = {}
    for file in project_files(root):
        name = str(file.relative_to(root))
        text = file.read_text(encoding="utf-8")
        for match in (*_VERSION.finditer(text), *_PIN.finditer(text)):
            found[f"{name}: {match[1]}"] = match[2]
    return found


def _sections(root: Path) -> dict[str, str]:
    """Return the text under each heading of the changelog, by version."""
    _, *parts = _HEADING.split((root / "CHANGELOG.md").read_text(encoding="utf-8"))
    return dict(zip(parts[::2], map(str.strip, parts[1::2]), strict=True))


def _require_version(text: str) -> None:
    try:
        version = Version(text)
    except InvalidVersion:
        raise ReleaseError(f"{text} is no version of PEP 440; 0.2.0 and 1.0.0rc1 are") from None
    if str(version) != text or version.local:
        raise ReleaseError(f"write {text} as {version.public}")


def _git(root: Path, *words: str) -> str:
    command = ("git", "-C", str(root), *words)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())

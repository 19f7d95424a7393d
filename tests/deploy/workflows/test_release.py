"""The workflow that publishes a release: its order, and its scripts with programs that record."""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.repository import ROOT

JOBS: dict[str, Any] = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
COMMIT = "c" * 40
# As a runner has it, but for the two last.
SURROUNDINGS = {
    "GITHUB_SHA": COMMIT,
    "GITHUB_ACTOR": "maintainer",
    "GITHUB_REPOSITORY": "Some-Owner/Flotilla",
    "GITHUB_REPOSITORY_OWNER": "Some-Owner",
    "GITHUB_SERVER_URL": "https://github.example",
    "SERVICE": "env_gateway",
    "VERSION": "1.2.0",
}


def steps_before(job: str) -> set[str]:
    """The jobs that must succeed before one, however indirectly."""
    needs = JOBS[job].get("needs", [])
    found = {needs} if isinstance(needs, str) else set(needs)
    return found.union(*map(steps_before, found))


def test_nothing_is_published_before_all_wheels_were_tried_and_the_page_comes_last() -> None:
    assert steps_before("pypi") == {"build", "wheels", "types"}
    assert steps_before("images") == {"build", "wheels", "types", "pypi"}
    assert steps_before("page") == JOBS.keys() - {"page"}
    assert JOBS["pypi"]["environment"] == "pypi"


def test_wheels_are_tried_on_every_python_that_docs_promise_and_projects_allow() -> None:
    pythons = JOBS["wheels"]["strategy"]["matrix"]["python"]
    page = (ROOT / "docs/releasing.md").read_text()
    assert f"| environment | {' | '.join(pythons)} |" in page
    assert f'requires-python = ">={pythons[0]}"' in (ROOT / "pyproject.toml").read_text()


def test_every_image_of_deploy_docker_is_pushed() -> None:
    there = [path.name.split(".")[0] for path in (ROOT / "deploy/docker").glob("*.Dockerfile")]
    assert sorted(JOBS["images"]["strategy"]["matrix"]["service"]) == sorted(there)


def test_every_target_that_the_workflow_makes_is_one_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text()
    lines = [step.get("run", "") for job in JOBS.values() for step in job["steps"]]
    targets = {found[1] for line in lines if (found := re.match(r"make ([a-z-]+)", line))}
    assert targets == {"release-tools", "dist", "check-wheels", "types"}
    assert [target for target in targets if f"\n{target}: " not in makefile] == []


def run(folder: Path, script: str, programs: dict[str, str], **environ: str) -> list[str]:
    """Run a script of .ci among programs that record their words, and return the lines."""
    folder.mkdir(exist_ok=True)
    record = folder / "record"
    record.touch()
    checkout = folder / "checkout"
    for part in (".ci", "build/release/bin", "build/dist", "bin"):
        (checkout / part).mkdir(parents=True, exist_ok=True)
    (checkout / ".ci" / script).write_text((ROOT / ".ci" / script).read_text())
    for name in ("flotilla_rl-1.2.0.tar.gz", "flotilla_rl-1.2.0-py3-none-any.whl"):
        (checkout / "build/dist" / name).touch()
    for name, text in programs.items():
        program = checkout / name
        program.write_text(f'#!/bin/sh\necho "{program.name} $*" >>"{record}"\n{text}\n')
        program.chmod(0o755)
    path = f"{checkout / 'bin'}:{os.environ['PATH']}"
    subprocess.run(
        ("bash", str(checkout / ".ci" / script)),
        check=True,
        capture_output=True,
        env={**SURROUNDINGS, "PATH": path, **environ},
    )
    return record.read_text().splitlines()


DOCKER = 'case "$1" in login) cat >"$HOME/password" ;; manifest) exit {found} ;; esac'


def push(folder: Path, *, found: int) -> list[str]:
    programs = {"bin/docker": DOCKER.format(found=found), "bin/sudo": ""}
    return run(folder, "release-image", programs, REGISTRY_TOKEN="token_of_job", HOME=str(folder))


def test_an_image_is_built_of_the_commit_and_pushed_as_the_version(tmp_path: Path) -> None:
    image = "ghcr.io/some-owner/flotilla-env-gateway:1.2.0"
    lines = push(tmp_path, found=1)
    assert [line.split()[1] for line in lines] == ["login", "manifest", "build", "push"]
    built, pushed = lines[-2:]
    assert "--file deploy/docker/env_gateway.Dockerfile" in built
    assert f"--tag {image} --build-arg FLOTILLA_COMMIT={COMMIT}" in built
    assert pushed == f"docker push {image}"
    # The token is in no list of processes.
    assert "token_of_job" not in " ".join(lines)
    assert (tmp_path / "password").read_text() == "token_of_job\n"


def test_an_image_that_is_there_is_not_pushed_again(tmp_path: Path) -> None:
    assert [line.split()[1] for line in push(tmp_path, found=0)] == ["login", "manifest"]


def publish(folder: Path, *, view: str, version: str = "1.2.0") -> list[str]:
    programs = {
        "bin/gh": f'[ "$2" != view ] || {{ {view}; }}',
        "build/release/bin/python": "echo notes of $4",
    }
    return run(folder, "release-page", programs, VERSION=version)


def test_a_page_has_the_notes_and_all_files_and_tags_the_commit(tmp_path: Path) -> None:
    created = publish(tmp_path, view="exit 1")[-1]
    assert created.startswith(f"gh release create v1.2.0 --target {COMMIT} --title 1.2.0 ")
    assert created.endswith(
        " build/dist/flotilla_rl-1.2.0.tar.gz build/dist/flotilla_rl-1.2.0-py3-none-any.whl"
    )
    assert "--prerelease" not in created
    assert (tmp_path / "checkout/build/notes.md").read_text() == "notes of 1.2.0\n"


@pytest.mark.parametrize("version", ["1.2.0a1", "1.2.0b2", "1.2.0rc1", "1.2.0.dev3"])
def test_a_candidate_is_no_release_that_users_are_led_to(tmp_path: Path, version: str) -> None:
    assert " --prerelease " in publish(tmp_path, view="exit 1", version=version)[-1]


def test_a_page_is_published_once_and_a_draft_is_replaced(tmp_path: Path) -> None:
    there = publish(tmp_path / "there", view="echo false")
    assert [line.split()[2] for line in there] == ["view"]
    draft = publish(tmp_path / "draft", view="echo true")
    assert [line.split()[2] for line in draft if line.startswith("gh")] == [
        *("view", "delete", "create"),
    ]

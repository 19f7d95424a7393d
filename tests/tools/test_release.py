"""A release has one version everywhere, a section of the changelog, and no other commit's tag."""

import re
import shutil
import subprocess
from datetime import date
from pathlib import Path

import pytest
import yaml
from packaging.version import Version

from tests.support.repository import ROOT
from tools import release
from tools.requirements import project_files

CURRENT = max(release.stated_versions(ROOT).values())
TODAY = date(2026, 12, 1)
CHANGELOG = """# Changelog

About it.

## Unreleased

### Added
- A feature.

## 0.0.9 - 2026-01-02

### Fixed
- A mistake.
"""


def git(folder: Path, *words: str) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    subprocess.run(("git", *identity, *words), cwd=folder, check=True, capture_output=True)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with the project files of this one, and a changelog."""
    for file in project_files(ROOT):
        copy = tmp_path / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy)
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    git(tmp_path, "init", "--quiet")
    commit(tmp_path)
    return tmp_path


def commit(folder: Path) -> None:
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--allow-empty", "--message", "Something")


def test_all_distributions_of_this_repository_state_one_version_and_pin_each_other_by_it() -> None:
    stated = release.stated_versions(ROOT)
    assert len(set(stated.values())) == 1
    own = {f"{file.relative_to(ROOT)}: version = " for file in project_files(ROOT)}
    assert own <= stated.keys()
    named = [
        line
        for file in project_files(ROOT)
        for line in re.findall(r'"flotilla-rl[^"]*"', file.read_text())
        # The distribution's own name.
        if line not in re.findall(r"(?m)^name = (.*)$", file.read_text())
    ]
    assert named
    assert [line for line in named if "==" not in line] == []


def test_the_changelog_of_this_repository_has_its_newest_changes_on_top() -> None:
    headings = re.findall(r"(?m)^## (.*)$", (ROOT / "CHANGELOG.md").read_text())
    assert headings[0] == "Unreleased"
    versions = [Version(heading.split(" - ")[0]) for heading in headings[1:]]
    assert versions == sorted(versions, reverse=True)


def test_what_was_prepared_and_committed_can_be_released(root: Path) -> None:
    release.prepare_release(root, "98.0rc1", TODAY)
    commit(root)
    release.check_release(root, "98.0rc1")
    assert set(release.stated_versions(root).values()) == {"98.0rc1"}
    assert release.read_notes(root, "98.0rc1") == "### Added\n- A feature."
    headings = re.findall(r"(?m)^## .*$", (root / "CHANGELOG.md").read_text())
    assert headings == ["## Unreleased", "## 98.0rc1 - 2026-12-01", "## 0.0.9 - 2026-01-02"]


def test_preparing_changes_versions_and_nothing_else_of_a_project(root: Path) -> None:
    before = {file: file.read_text() for file in project_files(root)}
    release.prepare_release(root, "97.0", TODAY)
    for file, text in before.items():
        assert file.read_text().replace("97.0", CURRENT) == text


@pytest.mark.parametrize(
    ("version", "told"),
    [
        ("one", "no version of PEP 440"),
        ("v98.0", "write v98.0 as 98.0"),
        ("98.0+mine", "write 98.0+mine as 98.0"),
        ("0.0.1", f"older than {CURRENT}"),
        ("99.0", "the tag v99.0 exists"),
    ],
)
def test_a_version_that_cannot_be_released_changes_nothing(
    root: Path, version: str, told: str
) -> None:
    git(root, "tag", "v99.0")
    with pytest.raises(release.ReleaseError, match=re.escape(told)):
        release.prepare_release(root, version, TODAY)
    done = subprocess.run(("git", "status", "--short"), cwd=root, check=True, capture_output=True)
    assert done.stdout == b""


def test_a_release_without_described_changes_is_refused(root: Path) -> None:
    (root / "CHANGELOG.md").write_text(CHANGELOG.replace("### Added\n- A feature.\n", ""))
    with pytest.raises(release.ReleaseError, match='nothing under "Unreleased"'):
        release.prepare_release(root, "98.0", TODAY)


def test_a_section_is_made_once(root: Path) -> None:
    release.prepare_release(root, "98.0", TODAY)
    with pytest.raises(release.ReleaseError, match="only once"):
        release.prepare_release(root, "98.0", TODAY)


def test_a_commit_of_another_version_is_no_release_and_the_error_names_each_place(
    root: Path,
) -> None:
    release.prepare_release(root, "98.0", TODAY)
    file = root / "services/tinker/pyproject.toml"
    file.write_text(file.read_text().replace("common==98.0", "common==97.0"))
    with pytest.raises(release.ReleaseError) as refused:
        release.check_release(root, "98.0")
    assert str(refused.value).splitlines()[1:] == [
        "  services/tinker/pyproject.toml: flotilla-rl-common==97.0"
    ]


def test_a_version_without_a_section_is_no_release(root: Path) -> None:
    with pytest.raises(release.ReleaseError, match="no section"):
        release.check_release(root, CURRENT)


def test_a_release_may_be_repeated_by_its_own_commit_only(root: Path) -> None:
    release.prepare_release(root, "98.0", TODAY)
    commit(root)
    git(root, "tag", "v98.0")
    release.check_release(root, "98.0")
    commit(root)
    with pytest.raises(release.ReleaseError, match="of another commit"):
        release.check_release(root, "98.0")


def copy_readmes(root: Path) -> list[Path]:
    files = [file.with_name("README.md") for file in project_files(ROOT)]
    return [Path(shutil.copy(file, root / file.relative_to(ROOT))) for file in files]


def test_links_of_the_readmes_lead_from_pypi_to_the_tag(root: Path) -> None:
    copy_readmes(root)
    (root / "README.md").write_text(
        "[a](docs/a.md#b) ![c](docs/c.svg) [`d`](LICENSE) [e](#f) [g](https://g.org/h) [i](j.md)(k)"
    )
    release.link_readmes(root, "0.2.0", "https://github.com/o/r")
    there = "https://github.com/o/r/blob/v0.2.0"
    assert (root / "README.md").read_text() == (
        f"[a]({there}/docs/a.md#b) ![c](https://github.com/o/r/raw/v0.2.0/docs/c.svg)"
        f" [`d`]({there}/LICENSE) [e](#f) [g](https://g.org/h) [i]({there}/j.md)(k)"
    )
    assert f"({there}/docs/models.md)" in (root / "services/rollout/README.md").read_text()


def test_every_link_of_the_readmes_leads_to_a_file_of_this_repository(root: Path) -> None:
    readmes = copy_readmes(root)
    release.link_readmes(root, "0.2.0", "https://github.com/o/r")
    links = [link for each in readmes for link in re.findall(r"\]\(([^)]*)\)", each.read_text())]
    paths = [re.sub(r"^https://github.com/o/r/\w+/v0.2.0/|#.*", "", link) for link in links]
    assert len(paths) > 40
    assert [
        path for path in paths if not path.startswith("https:") and not (ROOT / path).exists()
    ] == []


def test_what_is_built_after_the_links_changed_names_the_commit_of_the_release() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    steps = workflow["jobs"]["build"]["steps"]
    [linked] = [at for at, step in enumerate(steps) if " links " in step.get("run", "")]
    [built] = [at for at, step in enumerate(steps) if step.get("run") == "make dist"]
    assert linked < built
    assert steps[built]["env"]["FLOTILLA_COMMIT"] == "${{ github.sha }}"


def test_links_outside_a_workflow_are_refused_and_change_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("GITHUB_REPOSITORY", raising=False)
    monkeypatch.setattr("sys.argv", ["release", "links", "0.2.0"])
    monkeypatch.setattr(release, "link_readmes", pytest.fail)
    assert release.main() == 1
    assert "GITHUB_REPOSITORY" in capsys.readouterr().err

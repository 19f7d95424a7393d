"""What a release uploads: each source archive makes the wheel that the repository makes."""

import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest

from flotilla_common.process.own_version import commit_of_checkout
from tests.support.repository import ROOT
from tools.requirements import project_files

FILES = project_files(ROOT)
NAMES = [tomllib.loads(file.read_text())["project"]["name"] for file in FILES]
each_distribution = pytest.mark.parametrize("name", NAMES)


def build(folder: Path, *options: str) -> Path:
    # With what builds this project here: see requirements/build.txt.
    uv = (str(Path(sys.executable).parent / "uv"), "build", "--offline", "--no-build-isolation")
    command = (*uv, "--all-packages", "--python", sys.executable, "--out-dir", str(folder))
    subprocess.run((*command, *options), cwd=ROOT, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Source archives, and the wheels made of them."""
    return build(tmp_path_factory.mktemp("released"))


@pytest.fixture(scope="module")
def wheels_of_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("tree"), "--wheel")


def known_to_git(folder: Path) -> set[str]:
    command = ("git", "ls-files", "--cached", "--others", "--exclude-standard")
    done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    return set(done.stdout.splitlines())


def wheel_in(folder: Path, name: str) -> dict[str, bytes]:
    """Return the files of a wheel, but for the list that follows from them, in any order."""
    (found,) = folder.glob(f"{name.replace('-', '_')}-[0-9]*.whl")
    with ZipFile(found) as archive:
        names = (each for each in archive.namelist() if not each.endswith(".dist-info/RECORD"))
        return {each: archive.read(each) for each in names}


@pytest.mark.slow
@each_distribution
def test_a_source_archive_makes_the_wheel_that_the_repository_makes(
    name: str, released: Path, wheels_of_tree: Path
) -> None:
    one, other = wheel_in(released, name), wheel_in(wheels_of_tree, name)
    assert one.keys() == other.keys()
    assert [each for each in one if one[each] != other[each]] == []


@pytest.mark.slow
@each_distribution
def test_a_wheel_has_its_license_its_types_and_no_file_that_git_does_not_know(
    name: str, released: Path
) -> None:
    files = wheel_in(released, name)
    (license_file,) = [each for each in files if each.endswith(".dist-info/licenses/LICENSE")]
    assert files[license_file] == (ROOT / "LICENSE").read_bytes()
    own = {each for each in files if ".dist-info/" not in each} - {"flotilla_common/commit.txt"}
    shipped = {each for each in own if each.startswith("flotilla_launcher/shipped/")}
    assert own - shipped <= known_to_git(FILES[NAMES.index(name)].parent)
    assert {each.partition("/shipped/")[2] for each in shipped} <= known_to_git(ROOT)
    assert {each.partition("/")[0] for each in own} == {
        each.partition("/")[0] for each in own if each.endswith("/py.typed")
    }


@pytest.mark.slow
@each_distribution
def test_a_source_archive_holds_files_and_no_links(name: str, released: Path) -> None:
    (found,) = released.glob(f"{name.replace('-', '_')}-[0-9]*.tar.gz")
    with tarfile.open(found) as archive:
        assert [each.name for each in archive if not each.isfile()] == []


@pytest.mark.slow
def test_what_is_released_knows_its_commit(released: Path) -> None:
    recorded = wheel_in(released, "flotilla-rl-common")["flotilla_common/commit.txt"]
    assert recorded.decode().strip() == commit_of_checkout(ROOT)


@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_every_distribution_has_the_license_as_a_file_of_its_own(file: Path) -> None:
    """A link would lead out of the source archive, where installers refuse it."""
    copy = file.parent / "LICENSE"
    assert not copy.is_symlink()
    assert copy.read_bytes() == (ROOT / "LICENSE").read_bytes()

"""Files of the repository in the launcher's wheel, also in one that is built from its archive."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from flotilla_launcher.cli import shipped_files
from flotilla_launcher.cli.shipped_files import find_shipped
from flotilla_launcher.cli.terminal import CommandError
from tests.support.repository import ROOT

NAMES = ("deploy/runs/local.toml", "requirements/cpu.txt", "requirements/torch-cpu.txt")


def build(source: Path, target: str, to: Path) -> Path:
    command = (sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(to))
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    [built] = to.glob("*.whl" if target == "wheel" else "*.tar.gz")
    return built


def shipped_in(wheel: Path) -> dict[str, bytes]:
    prefix = "flotilla_launcher/shipped/"
    with zipfile.ZipFile(wheel) as archive:
        found = [name for name in archive.namelist() if name.startswith(prefix)]
        return {name.removeprefix(prefix): archive.read(name) for name in found}


def test_the_wheel_has_all_run_specs_and_the_pins_as_they_are_in_the_repository(
    tmp_path: Path,
) -> None:
    shipped = shipped_in(build(ROOT / "services/launcher", "wheel", tmp_path / "from-checkout"))
    specs = {f"deploy/runs/{path.name}" for path in (ROOT / "deploy/runs").iterdir()}
    assert shipped.keys() == specs | set(NAMES)
    assert all((ROOT / name).read_bytes() == content for name, content in shipped.items())
    with tarfile.open(build(ROOT / "services/launcher", "sdist", tmp_path / "sdist")) as archive:
        files = [member for member in archive.getmembers() if not member.issym()]
        archive.extractall(tmp_path / "source", files, filter="data")
    [source] = (tmp_path / "source").iterdir()
    # A link to the repository's.
    shutil.copy(ROOT / "LICENSE", source)
    assert shipped_in(build(source, "wheel", tmp_path / "from-source")) == shipped


@pytest.mark.parametrize("name", NAMES)
def test_in_a_checkout_they_are_the_repositorys_own(name: str) -> None:
    assert find_shipped(name) == ROOT / name


def test_what_an_installation_lacks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipped_files, "_PLACES", (tmp_path,))
    with pytest.raises(CommandError, match=r"lacks deploy/runs/local\.toml: install flotilla-rl"):
        find_shipped(NAMES[0])

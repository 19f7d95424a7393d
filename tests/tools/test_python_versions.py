"""Which versions of Python have packages that fit each other, asked of an index of made files."""

import tarfile
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.support.repository import ROOT
from tools.python_versions import ENVIRONMENTS, describe_fit
from tools.requirements import find_packages


@pytest.fixture(autouse=True)
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that uv takes for all that is published."""
    monkeypatch.setenv("UV_NO_INDEX", "1")
    monkeypatch.setenv("UV_FIND_LINKS", str(tmp_path))
    return tmp_path


def publish(index: Path, tag: str) -> None:
    with ZipFile(index / f"engine-1.0-{tag}.whl", "w") as wheel:
        metadata = "Metadata-Version: 2.4\nName: engine\nVersion: 1.0\n"
        wheel.writestr("engine-1.0.dist-info/METADATA", metadata)
        wheel.writestr("engine-1.0.dist-info/WHEEL", f"Wheel-Version: 1.0\nTag: {tag}\n")


def test_a_package_fits_the_python_that_it_has_a_wheel_for_and_the_error_names_it_for_another(
    index: Path,
) -> None:
    publish(index, "cp311-cp311-manylinux_2_28_x86_64")
    assert describe_fit(["engine==1.0"], "3.11") == "wheels"
    assert "engine==1.0 has no wheels with a matching" in describe_fit(["engine==1.0"], "3.13")


def test_a_wheel_for_a_newer_c_library_than_that_of_our_images_does_not_fit(index: Path) -> None:
    publish(index, "cp313-cp313-manylinux_2_39_x86_64")
    assert "engine==1.0 has no wheels" in describe_fit(["engine==1.0"], "3.13")


def test_a_package_that_has_only_its_source_builds(index: Path) -> None:
    metadata = index / "PKG-INFO"
    metadata.write_text("Metadata-Version: 2.4\nName: engine\nVersion: 1.0\n")
    project = index / "pyproject.toml"
    project.write_text('[project]\nname = "engine"\nversion = "1.0"\n')
    with tarfile.open(index / "engine-1.0.tar.gz", "w:gz") as archive:
        archive.add(metadata, "engine-1.0/PKG-INFO")
        archive.add(project, "engine-1.0/pyproject.toml")
    assert describe_fit(["engine==1.0"], "3.13") == "builds"


def test_the_page_has_a_row_for_every_environment() -> None:
    page = (ROOT / "docs/releasing.md").read_text()
    assert [each for each in ENVIRONMENTS if f"\n| `{each}` |" not in page] == []
    assert "torch>=2.13" in set(find_packages(ENVIRONMENTS[4]))

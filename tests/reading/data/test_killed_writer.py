"""A writer that is killed leaves the old folder, the new one or none: never a mixture."""

import os
import signal
import sys
from pathlib import Path

import pytest

from flotilla_reading.data.dataset_folder import describe, read_parts, write_folder
from flotilla_reading.data.preparation import Wishes, prepare
from flotilla_reading.data.row_files import FileFormat
from tests.reading.data.made_tasks import make_rows, to_rows

# What changes a folder, as Python's audit names it. A file that is opened is empty; killed at the
# next event, it may be written or not.
EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")


def write(out: Path, tasks: int, form: FileFormat = "jsonl") -> None:
    wishes = Wishes()
    prepared = prepare(to_rows(make_rows({"shop": tasks})), wishes)
    source = {"kind": "file", "url": "tasks.json", "sha256": "12"}
    write_folder(out, prepared, describe(prepared, wishes, source, None), form)


def write_and_die(out: Path, tasks: int, after: int) -> bool:
    """Write in a process that is killed at one of its writes; return whether it lived that long."""
    child = os.fork()
    if not child:
        left = after

        def count(event: str, arguments: object) -> None:
            nonlocal left
            if event in EVENTS and str(out.parent) in str(arguments):
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        try:
            write(out, tasks)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFEXITED(status)


@pytest.mark.parametrize("old", [0, 50])
def test_a_folder_is_old_new_or_absent_wherever_the_writer_is_killed(
    tmp_path: Path, old: int
) -> None:
    seen: set[int] = set()
    for after in range(200):
        out = tmp_path / str(after) / "data"
        out.parent.mkdir()
        if old:
            write(out, old)
        lived = write_and_die(out, 60, after)
        # Reads by the manifest, which vouches for each file.
        parts = read_parts(out) if out.exists() else {}
        seen.add(sum(map(len, parts.values())))
        write(out, 60)
        assert sum(map(len, read_parts(out).values())) == 60
        assert [path.name for path in out.parent.iterdir()] == ["data"]
        if lived:
            break
    else:
        pytest.fail("the writer never lived")
    assert after > 8
    assert seen == {0, old, 60}

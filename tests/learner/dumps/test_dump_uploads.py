"""Uploads of dumps: reports about a store that takes nothing, or takes long."""

import threading
from pathlib import Path

from flotilla_learner.checkpoints.adapters.fsspec_store import open_store
from flotilla_learner.dumps.dump_uploads import DumpUploads
from flotilla_learner.dumps.jobs import DumpReport
from flotilla_learner.ports import RemoteStoreError, RemoteStoreRefusedError
from tests.support.remote_checkpoints import unreliable


def write_files(run_dir: Path, count: int) -> list[Path]:
    found = [run_dir / "rollouts" / f"step_{number}.jsonl" for number in range(count)]
    found[0].parent.mkdir()
    for path in found:
        path.write_text(path.name)
    return found


def lost_names(reports: list[DumpReport]) -> list[str]:
    return [name for report in reports for name in report.lost]


def test_a_store_that_stands_still_is_left_and_every_file_is_reported(tmp_path: Path) -> None:
    entered, release = threading.Event(), threading.Event()

    def stand_still(call: str, what: str) -> None:
        entered.set()
        release.wait(60)

    store = unreliable(open_store(f"memory://{tmp_path}", {}), stand_still)
    reports: list[DumpReport] = []
    uploads = DumpUploads(store, tmp_path, reports.append)
    files = write_files(tmp_path, 3)
    for path in files:
        uploads.offer(path)
    assert entered.wait(30)
    uploads.close(0.1)
    expected = [f"dumps/rollouts/{path.name}" for path in files]
    assert sorted(lost_names(reports)) == expected
    assert "the store took more than 0.1 s" in reports[0].lost[lost_names(reports)[0]]
    release.set()


def test_a_store_that_refuses_is_tried_once_and_a_file_that_was_pruned_is_no_loss(
    tmp_path: Path,
) -> None:
    calls: list[str] = []
    files = write_files(tmp_path, 2)

    def refuse(call: str, what: str) -> None:
        calls.append(what)
        if len(calls) > 1:
            files[1].unlink()
            raise RemoteStoreError("gone")
        raise RemoteStoreRefusedError("no permission")

    store = unreliable(open_store(f"memory://{tmp_path}", {}), refuse)
    reports: list[DumpReport] = []
    uploads = DumpUploads(store, tmp_path, reports.append)
    for path in files:
        uploads.offer(path)
    uploads.close(30)
    assert len(calls) == 2
    assert lost_names(reports) == ["dumps/rollouts/step_0.jsonl"]

"""Dumps and exports name the pictures that attempts show, and hold each file once."""

import hashlib
import json
import sqlite3
import zipfile
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import pytest_asyncio

from flotilla_common.run_folder.dump_files import pictures_path, prune_steps, rollouts_path
from flotilla_common.run_folder.journal_file import JOURNAL_FILE
from flotilla_reading.attempt_filter import AttemptFilter
from flotilla_reading.trajectory_export import Exported, export_trajectories
from tests.learner.dumps.dumped_run import dumped_run, read_rows, setup_of
from tests.support.pictures import first_picture


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def seen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two steps whose attempts show pictures."""
    folder = tmp_path_factory.mktemp("seen")
    await dumped_run(folder, setup_of(folder), in_step=True, sees=True, steps=2)
    policy = {"model": str(folder / "model"), "dtype": "float32", "max_model_len": 128}
    spec = {"name": "test", "policy": policy}
    (folder / "run" / "spec.json").write_text(json.dumps(spec))
    return folder / "run"


def shown_in(rows: list[dict[str, Any]]) -> set[str]:
    return {
        item["sha256"] for row in rows for each in row["sequences"] for item in each["pictures"]
    }


def hashes_in(archive: Path) -> set[str]:
    """Return the hashes by which files are named, which are those of their bytes."""
    with zipfile.ZipFile(archive) as opened:
        assert opened.testzip() is None
        names = opened.namelist()
        assert len(set(names)) == len(names)
        for name in names:
            assert name == hashlib.sha256(opened.read(name)).hexdigest() + ".png"
    return {name.removesuffix(".png") for name in names}


def test_a_step_has_the_pictures_of_its_rows_once(seen: Path) -> None:
    rows = read_rows(rollouts_path(seen, 1))
    assert len(rows) == 6
    for row in rows:
        (sequence,) = row["sequences"]
        first, second = sequence["pictures"]
        assert first["sha256"] == first_picture(row["group_id"]).sha256
        assert (first["mime"], first["grid"], second["grid"]) == ("image/png", [1, 4, 6], [1, 2, 2])
        assert row["num_screenshots"] == 2
    assert hashes_in(pictures_path(seen, 1)) == shown_in(rows)
    assert len(shown_in(rows)) == 9


def test_an_evaluation_has_them_beside_its_files(seen: Path) -> None:
    folder = seen / "evals" / "step_0"
    rows = [row for path in folder.glob("env*.jsonl") for row in read_rows(path)]
    assert len(rows) == 12
    assert hashes_in(folder / "pictures.zip") == shown_in(rows)


def export(run: Path, out: Path) -> Exported:
    return export_trajectories(run, out, "parquet", AttemptFilter(), lambda done, total: None)


def test_an_export_has_every_picture_from_the_journal_or_else_from_dumps(
    seen: Path, tmp_path: Path
) -> None:
    export(seen, tmp_path / "whole")
    with closing(sqlite3.connect(seen / JOURNAL_FILE)) as db:
        kept = db.execute("SELECT group_id, sha256, grid, data FROM pictures").fetchall()
        try:
            db.execute("DELETE FROM pictures")
            db.commit()
            export(seen, tmp_path / "dumped")
        finally:
            db.executemany("INSERT INTO pictures VALUES (?, ?, ?, ?)", kept)
            db.commit()
    for name in ("whole", "dumped"):
        rows = pq.read_table(tmp_path / name / "episodes.parquet").to_pylist()
        files = [*(tmp_path / name / "pictures").iterdir()]
        assert {path.stem for path in files} == shown_in(rows)
        for path in files:
            assert path.name == hashlib.sha256(path.read_bytes()).hexdigest() + ".png"


def test_archives_go_with_their_steps(tmp_path: Path) -> None:
    for step in (1, 2):
        for path in (rollouts_path(tmp_path, step), pictures_path(tmp_path, step)):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"")
    (tmp_path / "token_stats").mkdir()
    assert prune_steps(tmp_path, 1) == [1]
    assert [path.name for path in sorted((tmp_path / "rollouts").iterdir())] == [
        "step_2.jsonl",
        "step_2.pictures.zip",
    ]


async def test_more_bytes_than_are_allowed_are_left_out_and_counted(tmp_path: Path) -> None:
    dumps, _ = await dumped_run(
        tmp_path, setup_of(tmp_path, picture_bytes=3000), sees=True, steps=1
    )
    archive = pictures_path(tmp_path / "run", 1)
    with zipfile.ZipFile(archive) as opened:
        sizes = [each.file_size for each in opened.infolist()]
    assert 0 < sum(sizes) <= 3000
    assert len(sizes) < 9
    assert len(read_rows(rollouts_path(tmp_path / "run", 1))) == 6
    assert dumps.lost

"""Models of checkpoints, exported once below their run's folder."""

import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from flotilla_launcher.cli import exported_models
from flotilla_launcher.cli.exported_models import keep_export
from flotilla_launcher.cli.terminal import CommandError

Exported = list[tuple[int | None, str]]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with checkpoints of two steps."""
    with closing(sqlite3.connect(tmp_path / "journal.sqlite", isolation_level=None)) as db:
        db.execute("CREATE TABLE checkpoints (step INTEGER, directory TEXT)")
        for step in (10, 20):
            folder = tmp_path / f"checkpoints/step-{step:06d}"
            folder.mkdir(parents=True)
            (folder / "manifest.json").write_text("{}")
            db.execute("INSERT INTO checkpoints VALUES (?, ?)", (step, str(folder)))
    return tmp_path


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> Exported:
    """What was exported: in place of the learner's program, which reads weights."""
    made: Exported = []

    def export(_run: Path, step: int | None, out: Path, *, adapters: bool = False) -> None:
        made.append((step, out.name))
        out.mkdir()

    monkeypatch.setattr(exported_models, "export_run", export)
    return made


def test_a_checkpoint_is_exported_once(run: Path, exported: Exported) -> None:
    for step, found in ((10, 10), (None, 20), (10, 10), (20, 20)):
        out, known = keep_export(run, step)
        assert (out, known) == (run / f"exports/step-{found:06d}", found)
    assert keep_export(run, None, adapters=True)[0].name == "step-000020-adapters"
    assert exported == [
        (10, "step-000010"),
        (20, "step-000020"),
        (20, "step-000020-adapters"),
    ]


def test_the_model_of_a_completed_run_is_used_unless_the_run_has_gone_on(
    run: Path, exported: Exported
) -> None:
    sums, manifest = run / "model/SHA256SUMS", run / "checkpoints/step-000020/manifest.json"
    sums.parent.mkdir()
    sums.touch()
    assert keep_export(run, None) == (run / "model", 20)
    assert keep_export(run, None, adapters=True)[0] != run / "model"
    later = sums.stat().st_mtime + 10
    os.utime(manifest, (later, later))
    assert keep_export(run, None) == (run / "exports/step-000020", 20)


def test_a_run_without_the_checkpoint_says_what_it_has(run: Path, exported: Exported) -> None:
    def refusal(prepare: Callable[[], object], step: int | None) -> str:
        prepare()
        with pytest.raises(CommandError) as error:
            keep_export(run, step)
        return str(error.value)

    journal = run / "journal.sqlite"

    def drop() -> None:
        with closing(sqlite3.connect(journal, isolation_level=None)) as db:
            db.execute("DELETE FROM checkpoints")

    assert "no checkpoint of step 15; it has 10, 20" in refusal(lambda: None, 15)
    assert "no checkpoint yet: learner.checkpoint.every" in refusal(drop, None)
    assert "its learner never began" in refusal(journal.unlink, None)
    assert exported == []

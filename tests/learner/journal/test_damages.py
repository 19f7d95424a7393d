"""Damage to the folder of a stopped run, foreign files among it: a start refuses it in a sentence
that names the file, or goes on without a loss and raises an alarm that names it; none is silent."""

import asyncio
import json
import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from flotilla_common.rpc.errors import ConfigError
from flotilla_learner.alarms.adapters.jsonl_sink import JsonlAlarmSink
from flotilla_learner.alarms.event_rules import failure_verdict
from flotilla_learner.alarms.types import Alarm
from flotilla_learner.journal.audit import audit_journal
from flotilla_learner.run.step_trainer import ReplayError
from tests.learner.journal.stopped_run import ENOUGH, PLAYED, stopped_run
from tests.learner.run.test_train_loop import run_to_the_end
from tests.support.learner import FakeWorker, learner, make_config
from tests.support.waiting import until

JOURNAL, WAL, MARK, LOCK = "journal.sqlite", "journal.sqlite-wal", "journal.mark", "journal.lock"
METRICS, ALARMS, SUMMARY, SPEC = "metrics.jsonl", "alarms.jsonl", "summary.json", "spec.json"
OLD, NEW = "checkpoints/step-000002", "checkpoints/step-000004"
MODEL, MANIFEST = f"{NEW}/model.bin", f"{NEW}/manifest.json"
RECEIVED = 6 * PLAYED + 2
ALARM = Alarm(failure_verdict("it failed"), raised=True, step=4, since_step=4)
# The run resumes, and ends without another trajectory: its replayed steps are all.
RESUMED = {**ENOUGH, "steps": PLAYED}


@dataclass(frozen=True, slots=True)
class Folders:
    """The damaged run, and the folder of another run of the same spec."""

    run: Path
    foreign: Path


Damage = Callable[[Folders], None]


def changed(name: str, change: Callable[[bytes], bytes]) -> Damage:
    def damage(at: Folders) -> None:
        path = at.run / name
        before = path.read_bytes() if path.exists() else b""
        path.write_bytes(change(before))
        assert path.read_bytes() != before

    return damage


def removed(name: str) -> Damage:
    def damage(at: Folders) -> None:
        path = at.run / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return damage


def replaced(name: str, make: Callable[[Path], object]) -> Damage:
    """Something else than the file, in its place."""

    def damage(at: Folders) -> None:
        path = at.run / name
        if path.exists():
            removed(name)(at)
        make(path)

    return damage


def foreign(*names: str) -> Damage:
    """Files of another run, as a backup restored into the wrong place brings them."""

    def damage(at: Folders) -> None:
        for name in names:
            if (at.run / name).exists():
                removed(name)(at)
            source = at.foreign / name
            (shutil.copytree if source.is_dir() else shutil.copyfile)(source, at.run / name)

    return damage


def merged(change: Callable[[bytes], bytes]) -> Damage:
    """Damage to the journal after its log was merged into it, as the end of a learner does."""

    def damage(at: Folders) -> None:
        with closing(sqlite3.connect(at.run / JOURNAL)) as db:
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        changed(JOURNAL, change)(at)

    return damage


def sql(text: str) -> Damage:
    def damage(at: Folders) -> None:
        with closing(sqlite3.connect(at.run / JOURNAL)) as db:
            assert db.execute(text).rowcount, text
            db.commit()

    return damage


def a_folder(path: Path) -> None:
    path.mkdir()


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_file(path: Path) -> None:
    path.write_bytes(b"?")


def a_dead_link(path: Path) -> None:
    path.symlink_to(path.parent / "nothing" / "there")


def a_circle(path: Path) -> None:
    path.symlink_to(path)


def flip(data: bytes, at: int = -1) -> bytes:
    """One bit of the byte in the middle, or of another one."""
    place = len(data) // 2 if at < 0 else at
    return data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]


def without_line(number: int) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        lines = data.splitlines(keepends=True)
        del lines[number]
        return b"".join(lines)

    return change


def foreign_lines(at: Folders) -> None:
    with (at.run / METRICS).open("ab") as file:
        file.write((at.foreign / METRICS).read_bytes())


def other_digit(data: bytes) -> bytes:
    """Another number in the second line."""
    lines = data.splitlines(keepends=True)
    place = lines[1].index(b'"policy/loss": ') + len(b'"policy/loss": ')
    lines[1] = lines[1][:place] + b"7" + lines[1][place:]
    return b"".join(lines)


def other_alarm(at: Folders) -> None:
    """An alarm of the run, since another step."""
    path = at.run / ALARMS
    JsonlAlarmSink(path, "run").send_alarm(ALARM)
    changed(ALARMS, lambda data: data.replace(b'"since_step": 4', b'"since_step": 2'))(at)


def swapped(at: Folders) -> None:
    (at.run / OLD).rename(at.run / "aside")
    (at.run / NEW).rename(at.run / OLD)
    (at.run / "aside").rename(at.run / NEW)


def everything_foreign(at: Folders) -> None:
    shutil.rmtree(at.run)
    shutil.copytree(at.foreign, at.run)


def as_a_newer_step(at: Folders) -> None:
    shutil.copytree(at.foreign / NEW, at.run / "checkpoints/step-000008")


def half(data: bytes) -> bytes:
    return data[: len(data) // 2]


def zeros_behind(data: bytes) -> bytes:
    return half(data).ljust(len(data), b"\0")


def emptied(_data: bytes) -> bytes:
    return b""


def noise(data: bytes) -> bytes:
    return bytes(range(7, 250)) * (len(data) // 243 + 1)


# Both ids are in every refusal of foreign files.
FOREIGN = "belongs to run other, but this is run run"
# By name: the word that the refusal or the alarm must have, and the damage.
DAMAGES: dict[str, tuple[str, Damage]] = {
    "all files of another run": (f"{JOURNAL} {FOREIGN}", everything_foreign),
    "another run's journal, mark, checkpoints and metrics": (
        FOREIGN,
        foreign(JOURNAL, MARK, "checkpoints", METRICS),
    ),
    "another run's journal and log": (f"{JOURNAL} {FOREIGN}", foreign(JOURNAL, WAL)),
    "another run's journal, log and mark": (f"{JOURNAL} {FOREIGN}", foreign(JOURNAL, WAL, MARK)),
    "another run's mark": (f"{MARK} {FOREIGN}", foreign(MARK)),
    "another run's checkpoints": (f"manifest.json {FOREIGN}", foreign("checkpoints")),
    "another run's newest checkpoint": (f"{MANIFEST} {FOREIGN}", foreign(NEW)),
    "another run's oldest checkpoint": (f"{OLD}/manifest.json {FOREIGN}", foreign(OLD)),
    "another run's checkpoint as a newer step": (
        f"step-000008/manifest.json {FOREIGN}",
        as_a_newer_step,
    ),
    "another run's model in a checkpoint": (NEW, foreign(MODEL)),
    "another run's manifest in a checkpoint": (f"{MANIFEST} {FOREIGN}", foreign(MANIFEST)),
    "another run's metrics": (f"{METRICS} {FOREIGN}", foreign(METRICS)),
    "another run's metrics behind the own": (f"{METRICS} {FOREIGN}", foreign_lines),
    "another run's alarms": (f"{ALARMS} {FOREIGN}", foreign(ALARMS)),
    "another run's summary": (f"{SUMMARY} {FOREIGN}", foreign(SUMMARY)),
    "another id in the journal": (
        f"{JOURNAL} {FOREIGN}",
        sql("""UPDATE meta SET value = '"other"' WHERE key = 'run_id'"""),
    ),
    "no id in the journal": (JOURNAL, sql("DELETE FROM meta WHERE key = 'run_id'")),
    "another format": (JOURNAL, sql("UPDATE meta SET value = '3' WHERE key = 'schema_version'")),
    "another reward in the journal": (
        "g000003r0",
        sql("UPDATE trajectories SET reward = 0.5 WHERE group_id = 'g000003r0'"),
    ),
    "other rewards in the journal": ("the journal", sql("UPDATE trajectories SET reward = 0.5")),
    "a trajectory less": (JOURNAL, sql("DELETE FROM trajectories WHERE group_id = 'g000003r0'")),
    "a lease less": (JOURNAL, sql("DELETE FROM leases WHERE group_id = 'g000003r0'")),
    "a publication less": (JOURNAL, sql("DELETE FROM publications WHERE version = 1")),
    "an epoch more": (JOURNAL, sql("INSERT INTO epochs VALUES (9, 0, 0)")),
    "a checkpoint more": (JOURNAL, sql("INSERT INTO checkpoints VALUES (5, 'x', '{}', 0)")),
    "a table less": (JOURNAL, sql("INSERT INTO evals VALUES ('e', 'before', 0, '{}')")),
    "a journal without its first page": (JOURNAL, merged(lambda d: bytes(4096) + d[4096:])),
    "a journal with a flipped bit in its head": (JOURNAL, merged(lambda d: flip(d, 3))),
    "half a journal": (JOURNAL, merged(half)),
    "an emptied journal": (JOURNAL, changed(JOURNAL, emptied)),
    "noise for a journal": (JOURNAL, changed(JOURNAL, noise)),
    "no journal": (JOURNAL, removed(JOURNAL)),
    "a folder for a journal": (JOURNAL, replaced(JOURNAL, a_folder)),
    "a pipe for a journal": (JOURNAL, replaced(JOURNAL, a_pipe)),
    "a link to nothing for a journal": (JOURNAL, replaced(JOURNAL, a_dead_link)),
    "a link to itself for a journal": (JOURNAL, replaced(JOURNAL, a_circle)),
    "no log": (WAL, removed(WAL)),
    "an emptied log": (WAL, changed(WAL, emptied)),
    "half a log": (WAL, changed(WAL, half)),
    "zeros in the log": (WAL, changed(WAL, zeros_behind)),
    "a flipped bit in the log": (WAL, changed(WAL, flip)),
    "noise for a log": (WAL, changed(WAL, noise)),
    "another run's log": (f"{JOURNAL} {FOREIGN}", foreign(WAL)),
    "a folder for a log": (WAL, replaced(WAL, a_folder)),
    "a link to nothing for a log": (WAL, replaced(WAL, a_dead_link)),
    "no mark": (MARK, removed(MARK)),
    "an emptied mark": (MARK, changed(MARK, emptied)),
    "noise for a mark": (MARK, changed(MARK, noise)),
    "a folder for a mark": (MARK, replaced(MARK, a_folder)),
    "a pipe for a mark": (MARK, replaced(MARK, a_pipe)),
    "a link to nothing for a mark": (MARK, replaced(MARK, a_dead_link)),
    "a folder for a lock": (LOCK, replaced(LOCK, a_folder)),
    "a link to nothing for a lock": (LOCK, replaced(LOCK, a_dead_link)),
    "no metrics": (METRICS, removed(METRICS)),
    "emptied metrics": (METRICS, changed(METRICS, emptied)),
    "half of the metrics": (METRICS, changed(METRICS, half)),
    "metrics without their first line": (METRICS, changed(METRICS, without_line(0))),
    "metrics without a line between": (METRICS, changed(METRICS, without_line(2))),
    "another number in the metrics": (METRICS, changed(METRICS, other_digit)),
    "a flipped bit in the metrics": (METRICS, changed(METRICS, flip)),
    "zeros in the metrics": (METRICS, changed(METRICS, zeros_behind)),
    "noise behind the metrics": (METRICS, changed(METRICS, lambda d: d + b"\x01\x02\n")),
    "a folder for metrics": (METRICS, replaced(METRICS, a_folder)),
    "a pipe for metrics": (METRICS, replaced(METRICS, a_pipe)),
    "a link to nothing for metrics": (METRICS, replaced(METRICS, a_dead_link)),
    "a folder for alarms": (ALARMS, replaced(ALARMS, a_folder)),
    "noise for alarms": (ALARMS, changed(ALARMS, lambda _: b"\x01\x02\n")),
    "another number in the alarms": (ALARMS, other_alarm),
    "a folder for the summary": (SUMMARY, replaced(SUMMARY, a_folder)),
    "a folder for the spec": (SPEC, replaced(SPEC, a_folder)),
    "a link to nothing for the spec": (SPEC, replaced(SPEC, a_dead_link)),
    "no checkpoints": ("checkpoints/", removed("checkpoints")),
    "a file for the checkpoints": ("checkpoints", replaced("checkpoints", a_file)),
    "a link to nothing for the checkpoints": ("checkpoints", replaced("checkpoints", a_dead_link)),
    "no newest checkpoint": (NEW, removed(NEW)),
    "a file for the newest checkpoint": (NEW, replaced(NEW, a_file)),
    "checkpoints in each other's place": ("checkpoints/", swapped),
    "no manifest": (NEW, removed(MANIFEST)),
    "an emptied manifest": (NEW, changed(MANIFEST, emptied)),
    "a flipped bit in a manifest": (NEW, changed(MANIFEST, flip)),
    "a folder for a manifest": (NEW, replaced(MANIFEST, a_folder)),
    "no model in a checkpoint": (NEW, removed(MODEL)),
    "half a model in a checkpoint": (NEW, changed(MODEL, half)),
    "a flipped bit in a model": (NEW, changed(MODEL, flip)),
    "a folder for a model": (NEW, replaced(MODEL, a_folder)),
    "a pipe for a model": (NEW, replaced(MODEL, a_pipe)),
    "a link to nothing for a model": (NEW, replaced(MODEL, a_dead_link)),
    "a file for the logs": ("logs", replaced("logs", a_file)),
    "a file for the token values": ("token_stats", replaced("token_stats", a_file)),
    "a file for the episodes": ("rollouts", replaced("rollouts", a_file)),
    "a file for the folder": ("run is not a folder", replaced("", a_file)),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def originals(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """The run, stopped in its sixth step, and a finished one of the same spec."""
    folder = tmp_path_factory.mktemp("damages")
    await stopped_run(folder)
    other = folder / "other"
    other.mkdir()
    stopped = folder / "stopped"
    async with (
        learner(other, make_config(other, **ENOUGH), run_id="other") as running,
        FakeWorker(running.address).working(),
    ):
        await until((other / "run" / NEW).exists, 90.0)
        shutil.copytree(other / "run", stopped)
        await asyncio.wait_for(running.task, 90)
    shutil.copyfile(other / "run" / SUMMARY, stopped / SUMMARY)
    JsonlAlarmSink(stopped / ALARMS, "other").send_alarm(ALARM)
    return Folders(folder / "run", stopped)


@pytest.fixture
def folders(originals: Folders, tmp_path: Path) -> Folders:
    run = Path(shutil.copytree(originals.run, tmp_path / "run"))
    return Folders(run, Path(shutil.copytree(originals.foreign, tmp_path / "other")))


def contents(folder: Path) -> dict[str, bytes]:
    """All files but SQLite's index of its log, and an empty log, which every reader makes."""
    files = (p for p in folder.rglob("*") if p.is_file() and p.stat().st_size)
    return {str(p): p.read_bytes() for p in files if not p.name.endswith("-shm")}


async def resume(folder: Path, **config: object) -> list[str]:
    """Resume the run, and let it replay what it has; return the causes of the alarms."""
    known = len(alarms(folder))
    async with learner(folder, make_config(folder, **RESUMED, **config)) as running:
        await asyncio.wait_for(running.task, 60)
    return [alarm["cause"] for alarm in alarms(folder)[known:]]


def alarms(folder: Path) -> list[dict[str, str]]:
    path = folder / "run" / ALARMS
    lines = path.read_bytes().splitlines() if path.is_file() else []
    return [json.loads(line) for line in lines if line.startswith(b"{")]


async def test_an_undamaged_run_resumes_without_an_alarm(folders: Folders) -> None:
    assert await resume(folders.run.parent) == []
    assert audit_of(folders.run) == (RECEIVED, True)


@pytest.mark.parametrize("name", DAMAGES)
async def test_no_damage_is_silent(folders: Folders, name: str) -> None:
    word, damage = DAMAGES[name]
    damage(folders)
    before = contents(folders.run)
    try:
        causes = await resume(folders.run.parent)
    except ConfigError as error:
        assert word in str(error), f"{name}: the refusal does not name it: {error}"
        # The journal may be continued until a step cannot be replayed.
        unchanged = contents(folders.run) == before or isinstance(error, ReplayError)
        assert unchanged, "a refused start has changed something"
        return
    assert any(word in cause for cause in causes), f"{name}: silent, with alarms {causes}"
    acknowledged, holds = audit_of(folders.run)
    assert (acknowledged, holds or "g000003r0" in word) == (RECEIVED, True)


def audit_of(run_dir: Path) -> tuple[int, bool]:
    with closing(sqlite3.connect(run_dir / JOURNAL)) as db:
        found = audit_journal(db)
    return found.acknowledged, found.holds


async def test_damaged_alarms_are_reported_where_no_metrics_are_written(folders: Folders) -> None:
    other_alarm(folders)
    (cause,) = await resume(folders.run.parent, tracking={"backends": []})
    assert ALARMS in cause


async def test_a_gap_in_the_metrics_is_reported_once(folders: Folders) -> None:
    (folders.run / METRICS).write_bytes(b"")
    assert len(await resume(folders.run.parent)) == 1
    assert await resume(folders.run.parent) == []


async def test_a_run_goes_on_under_its_id_and_each_file_names_it(folders: Folders) -> None:
    await run_to_the_end(folders.run.parent, **ENOUGH)
    lines = [json.loads(line) for line in (folders.run / METRICS).read_text().splitlines()]
    assert {line["run_id"] for line in lines} == {"run"}
    assert json.loads((folders.run / SUMMARY).read_text())["run_id"] == "run"

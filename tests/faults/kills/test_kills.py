"""kill -9 of a learner with a real rank, anywhere: nothing is lost, nothing is trained twice, and
the parameters come out as if nothing had happened."""

import random
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from flotilla_common.run_folder.journal_file import JOURNAL_FILE, open_read_only
from flotilla_learner.journal.store import open_journal
from tests.faults.kills import strace
from tests.faults.kills.fork_server import ForkServer
from tests.faults.kills.killed_run import (
    Death,
    KilledRun,
    Verdict,
    checkpoint_files,
    journal_files,
    next_epoch,
    random_death,
)
from tests.faults.kills.strace import CALLS, Call, Injection

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(300)]
needs_strace = pytest.mark.skipif(bool(strace.why_not()), reason=strace.why_not() or "-")
EVERY_CALL = tuple(name for names in CALLS.values() for name in names)
# More often than any call comes: strace then only watches.
NEVER = "65000"


async def new_run(server: ForkServer, model: Path, folder: Path, steps: int = 4) -> KilledRun:
    run = KilledRun(server, folder, model, steps)
    await run.prepare()
    return run


def check(verdict: Verdict) -> None:
    assert verdict.good, verdict


async def watched(run: KilledRun) -> list[Call]:
    """The calls of a whole run without kills, in order."""
    files = checkpoint_files(run.run_dir, run.steps, 1) + journal_files(run.run_dir)
    assert await run.start(Death(Injection(EVERY_CALL, files, when=NEVER))) == 0
    return run.calls


async def kill_at_each(model: KilledRun, run: KilledRun, names: Iterable[str]) -> None:
    """Kill a start of `run` at each call on a checkpoint that `model` made, and resume it."""
    for each in (model, run):
        # Else the first start alone would make it.
        (each.run_dir / "checkpoints").mkdir()
    times = Counter(c for c in await watched(model) if c.name in names and _of_checkpoint(c.path))
    for (_, name, path), most in times.items():
        for number in range(1, most + 1):
            place = _moved(path, model, run)
            status = await run.start(Death(Injection((name,), [place], when=str(number))))
            assert status != 0, f"{name} {path} did not come for the {number}th time"


async def test_a_learner_killed_at_random_ends_as_if_it_had_never_been(
    server: ForkServer, model: Path, tmp_path: Path
) -> None:
    chooser = random.Random(0)
    run = await new_run(server, model, tmp_path / "run", steps=6)
    for _ in range(4):
        await run.start(random_death(chooser, run, ["time", "moment"]))
    check(await run.finish())
    assert run.kills.total() >= 3


async def test_a_learner_whose_policy_sees_ends_as_if_it_had_never_been_killed(
    server: ForkServer, vision_model: Path, tmp_path: Path
) -> None:
    """Its tower is trained, on pictures that the journal keeps once for each group."""
    chooser = random.Random(1)
    run = await new_run(server, vision_model, tmp_path / "run", steps=6)
    for _ in range(4):
        await run.start(random_death(chooser, run, ["time", "moment"]))
    check(await run.finish())
    assert run.kills.total() >= 3
    with open_read_only(run.run_dir / JOURNAL_FILE) as db:
        pictures, groups, tries = db.execute(
            "SELECT (SELECT count(*) FROM (SELECT * FROM pictures UNION SELECT * FROM gallery)),"
            " count(DISTINCT group_id), count(*) FROM trajectories"
        ).fetchone()
    assert pictures == groups + tries


@needs_strace
async def test_a_checkpoint_is_on_the_disk_before_it_counts(
    server: ForkServer, model: Path, tmp_path: Path
) -> None:
    run = await new_run(server, model, tmp_path / "run", steps=2)
    calls = [(call.name, call.path) for call in await watched(run)]
    root = run.run_dir / "checkpoints"
    made, final = root / "step-000002.tmp-1", root / "step-000002"
    renamed = calls.index(("rename", made))
    synced = {path for name, path in calls[:renamed] if name == "fsync"}
    assert synced == {made, *(made / path.name for path in final.iterdir())}
    after = [call for call in calls[renamed:] if call[0] in CALLS["sync"]]
    assert after[:2] == [("fsync", root), ("fdatasync", journal_files(run.run_dir)[1])]


@needs_strace
@pytest.mark.slow
async def test_a_checkpoint_cut_off_at_any_sync_or_rename_is_made_again(
    server: ForkServer, model: Path, tmp_path: Path
) -> None:
    run = await new_run(server, model, tmp_path / "run", steps=2)
    again = await new_run(server, model, tmp_path / "again", steps=2)
    await kill_at_each(run, again, [*CALLS["sync"], *CALLS["rename"]])
    assert again.kills.total() >= 7
    check(await again.finish())


def _of_checkpoint(path: Path) -> bool:
    """Names that safetensors draws at random do not come again."""
    return "checkpoints" in path.parts and not path.name.startswith(".tmp")


def _moved(path: Path, source: KilledRun, target: KilledRun) -> Path:
    """A file in another run: the temporary folder is named by the epoch of its start."""
    moved = target.folder / path.relative_to(source.folder)
    return Path(str(moved).replace(".tmp-1", f".tmp-{next_epoch(target.run_dir)}"))


@needs_strace
@pytest.mark.slow
async def test_a_checkpoint_cut_off_at_any_call_at_all_is_made_again(
    server: ForkServer, model: Path, tmp_path: Path
) -> None:
    run = await new_run(server, model, tmp_path / "run", steps=2)
    again = await new_run(server, model, tmp_path / "again", steps=2)
    await kill_at_each(run, again, EVERY_CALL)
    assert again.kills.total() >= 25
    check(await again.finish())


@needs_strace
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["write", "sync", "remove", "create"])
async def test_a_journal_cut_off_at_each_call_in_turn_keeps_what_it_acknowledged(
    server: ForkServer, model: Path, tmp_path: Path, kind: str
) -> None:
    """The n-th start is killed at its n-th call."""
    run = await new_run(server, model, tmp_path / "run", steps=8)
    number = 1
    while await run.start(
        Death(Injection(CALLS[kind], journal_files(run.run_dir), when=str(number)))
    ):
        number += 1
    assert run.kills.total() == number - 1
    check(await run.verdict())


@needs_strace
@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_new_journal_cut_off_at_any_write_is_made_again(
    server: ForkServer, model: Path, tmp_path: Path
) -> None:
    number, status = 1, -9
    while status:
        run = KilledRun(server, tmp_path / str(number), model, steps=0)
        run.folder.mkdir()
        run.make_pipe()
        files = journal_files(run.run_dir)
        writes = (*CALLS["write"], *CALLS["sync"])
        status = await run.start(Death(Injection(writes, files, when=str(number))))
        await open_journal(run.run_dir).close()
        assert await run.start(Death()) == 0
        number += 1
    assert number > 10

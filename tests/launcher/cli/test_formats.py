"""Which Flotilla wrote a run, and files of another format."""

import json
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import pytest

from flotilla_common.process.own_version import own_version
from flotilla_launcher.control.spec_changes import diff_specs
from flotilla_launcher.store.ledger import Ledger
from flotilla_launcher.store.schema import SCHEMA_VERSION
from tests.launcher.cli.test_app import run_cli
from tests.support.launcher import run_cli_here, serving, spec

OTHER = {"version": "0.0.9", "commit": "f" * 40}
COMMANDS = {
    "status": ("status",),
    "status of one": ("status", "r"),
    "logs": ("logs", "r"),
    "show": ("show", "r"),
    "stop": ("stop", "r"),
    "inspect": ("inspect", "r"),
    "export": ("export", "r", "--out", "model"),
}


@pytest.mark.parametrize("name", COMMANDS)
async def test_a_ledger_of_another_format_is_refused_with_both_numbers_and_a_way_to_read_it(
    tmp_path: Path, name: str
) -> None:
    path = tmp_path / "launcher.sqlite"
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE runs (run_id)")
        db.execute("INSERT INTO runs VALUES ('r')")
        db.execute("PRAGMA user_version = 99")
        db.commit()
    code, output = await run_cli(*COMMANDS[name], "--runs", str(tmp_path))
    assert (code, "Traceback" in output) == (1, False), output
    words = output.replace("\n", " ")
    for part in ("format 99", f"format {SCHEMA_VERSION}", f"flotilla dump {path}"):
        assert part in words, output
    code, output = await run_cli_here("dump", str(path))
    assert (code, json.loads(output)) == (0, {"table": "runs", "row": {"run_id": "r"}})


@pytest.mark.parametrize("content", [b"no database at all" * 99, None])
async def test_a_file_that_is_no_ledger_is_refused_in_a_sentence(
    tmp_path: Path, content: bytes | None
) -> None:
    path = tmp_path / "launcher.sqlite"
    path.mkdir() if content is None else path.write_bytes(content)
    code, output = await run_cli("status", "--runs", str(tmp_path))
    assert (code, "Traceback" in output) == (1, False), output
    assert str(path) in output.replace("\n", "")


async def test_the_version_has_its_commit() -> None:
    code, output = await run_cli_here("--version")
    assert (code, output.strip()) == (0, str(own_version()))
    assert own_version().commit in output


async def test_a_run_says_which_flotilla_wrote_it_and_another_one_is_a_notice(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as served:
        run_id = await served.start(spec())
        await served.ended(run_id)
        path = tmp_path / run_id / "spec.json"
        assert json.loads(path.read_text())["written_by"] == own_version().to_dict()
        older = {**json.loads(path.read_text()), "written_by": OTHER}
        await rewrite(served.launcher.store, run_id, older)
        again = {**spec(), "learner": {"steps": 5}}
        assert await served.start(again, resume_run_id=run_id) == run_id
        await served.ended(run_id)
        events = served.launcher.store.list_events(run_id, 0, 1000)
        told = [event.body["text"] for event in events if event.kind == "message"]
        assert any("was written by flotilla 0.0.9 (commit ffff" in text for text in told), told
        assert json.loads(path.read_text())["written_by"] == own_version().to_dict()


async def rewrite(store: Ledger, run_id: str, wish: Mapping[str, object]) -> None:
    """Have another Flotilla have written the run's spec."""
    with store.transaction():
        vars(store)["_db"].execute(
            "UPDATE runs SET spec_json = ? WHERE run_id = ?", (json.dumps(wish), run_id)
        )


def test_who_wrote_a_spec_is_no_difference_between_specs() -> None:
    assert diff_specs({**spec(), "written_by": OTHER}, spec()) == []

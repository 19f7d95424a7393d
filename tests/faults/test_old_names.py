"""A run that was begun before each service was a package of its own."""

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flotilla_launcher.store.run_files import SPEC_FILE
from tests.faults.harness import GATEWAY, LEARNER, MCP, RANK, ROLLOUT, FaultRun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
PYTHON = ("python", "-P", "-m")


def old_words(spec: dict[str, Any], made: Path) -> dict[str, Any]:
    """Return a spec in the words of that time."""
    server = {"command": [*PYTHON, "environments.serve"], "instances": True}
    words = ("environments.tasks", "--split", "train", "--count", "3", "--out", str(made))
    return {
        **spec,
        "env_gateway": {**spec["env_gateway"], "servers": [server]},
        "prepare": [{"creates": str(made), "command": [*PYTHON, *words]}],
    }


def record_old_words(run: FaultRun, made: Path) -> None:
    """Write them to the run's own spec and to the ledger, as a launcher of that time had, and to
    the user's file."""
    for path in (run.path, run.folder / SPEC_FILE):
        path.write_text(json.dumps(old_words(json.loads(path.read_text()), made)))
    with sqlite3.connect(run.runs / "launcher.sqlite") as ledger:
        stored = (run.folder / SPEC_FILE).read_text()
        ledger.execute("UPDATE runs SET spec_json = ?", [stored])


@pytest.mark.parametrize("ledger", ["kept", "lost"])
async def test_it_goes_on_with_the_words_of_its_time_in_its_spec_and_the_users(
    new_run: Callable[..., FaultRun], tmp_path: Path, ledger: str
) -> None:
    made, steps = tmp_path / "made.json", 4
    run = new_run(env_gateway=MCP, learner={"steps": steps})
    await run.train()
    await run.step(2)
    # The command goes first: it would start another launcher.
    run.kill_command()
    run.kill_launcher()
    run.kill(LEARNER, RANK, ROLLOUT, GATEWAY)
    await run.exit()
    record_old_words(run, made)
    recorded = (run.folder / SPEC_FILE).read_text()
    run_id = run.folder.name
    if ledger == "lost":
        for file in run.runs.glob("launcher.sqlite*"):
            file.unlink()
        # Its folder is found by its id.
        await run.train("--resume", run_id)
    else:
        await run.train("--resume")
    await run.completes()
    told = "`python -P -m environments.serve` is `flotilla env serve` now"
    assert run.output.count(f"warning: {run.path}: ") == 1 and told in run.output
    await run.check_end(steps)
    if ledger == "kept":
        # Another launcher took over what was running, and its services read the old words.
        assert (run.folder / SPEC_FILE).read_text() == recorded
        return
    assert json.loads(made.read_text())["tasks"], "made by a command of that time"
    own = json.loads((run.folder / SPEC_FILE).read_text())
    assert own["env_gateway"]["servers"][0]["command"] == ["flotilla", "env", "serve"]
    assert own["prepare"][0]["command"][:2] == ["flotilla", "tasks"]

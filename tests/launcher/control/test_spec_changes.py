"""The spec of a resumed run: its own or a corrected file, and neither is chosen silently."""

import json
from pathlib import Path
from typing import Any

import pytest

from flotilla_common.rpc.errors import ConfigError
from flotilla_launcher.control.spec_changes import diff_specs
from flotilla_launcher.store.ledger import Ledger
from tests.launcher.store.test_run_files import refusal, run_cli, write_run
from tests.support.launcher import serving, spec


def write_spec(folder: Path, **sections: Any) -> Path:
    path = folder / "my spec.json"
    path.write_text(json.dumps(spec(**sections)))
    return path


def stored(runs: Path, run_id: str) -> dict[str, Any]:
    store = Ledger(runs / "launcher.sqlite")
    found = store.get_run(run_id)
    store.close()
    assert found is not None
    return json.loads(found.spec_json)


async def test_a_corrected_file_is_named_key_by_key_and_taken_with_update(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    write_run(runs / "fake-1", learner={"steps": 3})
    path = write_spec(tmp_path, learner={"steps": 4, "message": "mended"})
    train = ("train", str(path), "--resume", "--runs", str(runs))
    code, output = await run_cli(*train, "fake-1")
    assert code == 2, output
    assert f"{path} differs from the spec of run fake-1:" in output
    assert "  learner.steps: the run has 3, the file 4\n" in output
    assert "  learner.message: the run has none, the file 'mended'\n" in output
    again = f"flotilla train '{path}' --resume fake-1 --update --runs {runs}"
    keep = f"flotilla train {runs}/fake-1/spec.json --resume fake-1 --runs {runs}"
    assert again in output
    assert keep in output
    assert not (runs / "launcher.sqlite").exists(), "nothing was started"
    code, output = await run_cli(*train, "fake-1", "--update")
    assert code == 0, output
    assert (runs / "fake-1" / "steps").read_text() == "4"
    assert stored(runs, "fake-1")["learner"] == {"steps": 4, "message": "mended"}


async def test_an_option_of_the_command_line_needs_no_update_and_is_part_of_the_hints(
    tmp_path: Path,
) -> None:
    runs = tmp_path / "runs"
    write_run(runs / "fake-1", learner={"steps": 3})
    path = write_spec(tmp_path, learner={"steps": 9, "step_s": 0.01})
    train = ("train", str(path), "--resume", "fake-1", "--runs", str(runs), "--learner.steps=4")
    code, output = await run_cli(*train, "--learner.message=a b")
    assert code == 2
    assert "learner.steps" not in output.partition("To take")[0]
    assert "--update --learner.steps=4 '--learner.message=a b' --runs" in output


async def test_what_a_run_stands_on_is_refused_by_name(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    write_run(runs / "fake-1", learner={"steps": 3})
    path = write_spec(tmp_path, learner={"steps": 3})
    train = ("train", str(path), "--resume", "fake-1", "--runs", str(runs), "--update")
    changed = ("--seed=1", "--policy.model=other", "--policy.dtype=float32", "--learner.steps=9")
    code, output = await run_cli(*train, *changed)
    assert code == 2, output
    assert "run fake-1 cannot resume with these changes; start a new run:" in output
    for key in ("seed", "policy.model", "policy.dtype"):
        assert f"  {key}: the run has " in output
    assert "learner.steps" not in output
    assert (runs / "fake-1" / "steps").read_text() == "2"


@pytest.mark.slow
async def test_no_hint_to_resume_follows_a_refusal_that_resuming_cannot_mend(
    tmp_path: Path,
) -> None:
    runs = tmp_path / "runs"
    path = write_spec(tmp_path, learner={"crash": "refuse"})
    code, output = await run_cli("train", str(path), "--runs", str(runs))
    assert code == 1, output
    assert "learner.tasks: it is not there" in output
    assert "--resume" not in output
    assert "Nothing was trained. To begin again, once that is fixed:" in output
    assert f"  flotilla train '{path}' --runs" in output
    [run_dir] = [found.parent for found in runs.glob("fake-*/spec.json")]
    (run_dir / "journal.sqlite").touch()
    code, output = await run_cli("train", str(path), "--resume", "--runs", str(runs))
    assert code == 1, output
    assert "--resume" not in output
    assert "All training is kept." in output
    code, output = await run_cli("status", "newest", "--runs", str(runs))
    assert "outcome refused" in output
    (run_dir / "journal.sqlite").unlink()
    path.write_text(json.dumps({**spec(), "seed": 5}))
    code, output = await run_cli("train", str(path), "--resume", "--update", "--runs", str(runs))
    assert code == 0, "what never began takes any correction: " + output


async def test_newest_names_nothing_where_there_are_no_runs(tmp_path: Path) -> None:
    code, output = await run_cli("eval", "newest", "--runs", str(tmp_path / "runs"))
    assert (code, "there are no runs" in output) == (2, True), output


async def test_newest_names_a_run_for_eval(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    path = write_spec(tmp_path, learner={"steps": 1})
    code, output = await run_cli("train", str(path), "--runs", str(runs))
    assert code == 0, output
    code, output = await run_cli("eval", "newest", "--runs", str(runs))
    assert code == 0, output


@pytest.mark.slow
async def test_newest_names_a_run_for_resume_and_eval_too(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    path = write_spec(tmp_path, learner={"steps": 2})
    code, output = await run_cli("train", str(path), "--runs", str(runs), "--learner.steps=1")
    assert code == 0, output
    code, output = await run_cli("eval", "newest", "--runs", str(runs))
    assert code == 0, output
    train = ("train", str(path), "--resume", "newest", "--runs", str(runs), "--update")
    code, output = await run_cli(*train)
    assert code == 0, output
    assert "step 2/2" in output
    [own] = runs.glob("fake-*/spec.json")
    path.write_text(json.dumps(spec(learner={"steps": 7})))
    code, output = await run_cli("eval", str(path), "--runs", str(runs))
    assert code == 0, output
    assert "learner.steps: the run has 2, the file 7" in output
    keep = ("train", str(own), "--resume", own.parent.name, "--runs", str(runs))
    code, output = await run_cli(*keep)
    assert code == 0, output
    assert stored(runs, own.parent.name)["learner"] == {"steps": 2}


async def test_a_launcher_refuses_a_change_of_a_runs_base_from_any_caller(
    tmp_path: Path,
) -> None:
    write_run(tmp_path / "fake-1", learner={"steps": 3})
    async with serving(tmp_path) as served:
        answer = await refusal(served, "fake-1", json.dumps({**spec(), "seed": 3}))
    assert answer.startswith("BAD_SPEC: run fake-1 cannot resume with these changes")
    assert "seed: the run has 0, the file 3" in answer


def test_changes_name_keys_in_lists_and_take_defaults_for_what_they_are() -> None:
    sets = [{"name": "a", "tasks": "x"}, {"name": "b", "tasks": "y"}]
    old = spec(learner={"eval": {"sets": sets}, "on": True})
    new = {**old, "learner": {"eval": {"sets": [sets[0], {**sets[1], "count": 3}]}, "on": 1}}
    del new["seed"]
    assert [(c.key, c.fixed_reason) for c in diff_specs(old, new)] == [
        ("learner.eval.sets.1.count", ""),
        ("learner.on", ""),
    ]
    with pytest.raises(ConfigError, match="spec: "):
        diff_specs(old, {"name": "x"})


def test_a_secret_that_differs_is_not_shown() -> None:
    old, new = (spec(learner={"chat": {"webhook": f"https://x/{n}"}}) for n in (1, 2))
    assert [c.format_change() for c in diff_specs(old, new)] == ["learner.chat.webhook: differs"]

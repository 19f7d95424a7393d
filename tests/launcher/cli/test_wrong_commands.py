"""Wrong commands of every kind: a documented exit code, one sentence, and nothing left behind."""

import sys
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import pytest

from flotilla_launcher.cli import app
from tests.support.repository import ROOT

LOCAL = "deploy/runs/local.toml"
EMPTY = "no-runs"
# Words of the commands: {t} is a folder with the files below, and {r} its folder of runs, which
# does not exist.
HERE = ("--runs", "{r}")
TRAIN = ("train", LOCAL, *HERE)
WRONG_SPECS = (
    (("--learner.optimizer.lrr=1",), "learner.optimizer.lrr: unknown key; did you mean 'lr'?"),
    (("--learner.optimizer.lr=fast",), "learner.optimizer.lr: Input should be a valid number"),
    (("--learner.eval.sets.0.task=x",), "learner.eval.sets.0.task: unknown key"),
    (("--learner.eval.sets.9.tasks=x",), "'9' is not one of the 3 indices"),
    (("--env_gateway.backends.fleet.comand=1",), "did you mean 'command'?"),
    (("--env_gateway.limits.booking.max_opne=1",), "unknown key"),
    (("--rollout.engine.max_num_seq=1",), "did you mean 'max_num_seqs'?"),
    (("--rollout.dialect.finsh=x",), "did you mean 'finish'?"),
    (("--launcher.max_hour=1",), "launcher.max_hour: unknown key"),
    (("--lerner.steps=1",), "did you mean 'learner'?"),
    (("--policy.modle=x",), "policy.modle: unknown key; did you mean 'model'?"),
    (("--learner.steps=0",), "learner.steps: Input should be greater than or equal to 1"),
    (("--learner.steps=many",), "learner.steps: Input should be a valid integer"),
    (("--seed=π",), "seed: Input should be a valid integer; got 'π'"),
    (("--seed=-1",), "seed: Input should be greater than or equal to 0"),
    (("--name=../up",), "name: String should match"),
    (("--learner",), "write --section.key=value"),
    (("--learner=1",), "learner: expected a table; got 1"),
    (("--prepare=1",), "prepare: write [[prepare]]"),
    (("learner.steps=3",), "a run id requires --resume"),
    (("--policy.model=build/no/model",), "policy.model: 'build/no/model' does not exist"),
    (("--policy.model=README.md/",), "policy.model: 'README.md/'"),
    (("--policy.model=/nowhere",), "policy.model: '/nowhere' does not exist"),
    (("--learner.tasks=nowhere.json",), "learner.tasks: 'nowhere.json' does not exist"),
    (("--learner.tasks=build",), "learner.tasks: 'build' is no file"),
    (("--learner.eval.sets.1.tasks=no",), "learner.eval.sets.1.tasks: 'no' does not exist"),
    (
        ("--learner.select.checked=true", "--learner.select.checks=no"),
        "learner.select.checks: 'no' does not exist",
    ),
    (("--resume",), "there is no run of spec 'local'"),
    (("no-run", "--resume"), "there is no run no-run"),
    (("--update",), "it requires --resume"),
    (("--accept-loss",), "it requires --resume"),
)
WRONG_COMMANDS: Sequence[tuple[tuple[str, ...], int, str]] = (
    *(((*TRAIN, *words), 2, message) for words, message in WRONG_SPECS),
    (("train", "{t}/broken.toml", *HERE), 2, "not TOML"),
    (("train", "{t}/list.json", *HERE), 2, "the top level must be a table"),
    (("train", "{t}/nowhere.toml", *HERE), 2, "does not exist"),
    (("train", "{t}", *HERE), 2, "cannot read"),
    (("train", LOCAL, "--runs", "/proc/nope"), 1, "cannot use /proc/nope"),
    (("train", LOCAL, "--runs", "{t}/list.json"), 2, "list.json is not a folder"),
    (("train", LOCAL, "--runs", "/proc/sys"), 1, "cannot use /proc/sys/launcher.log"),
    (("train", LOCAL, "--runs", "/sys/nope"), 1, "cannot use /sys/nope"),
    (("eval", "newest", *HERE), 2, "there are no runs in"),
    (("eval", LOCAL, "--learner.optimizer.lrr=1", *HERE), 2, "did you mean 'lr'?"),
    (("eval", "no-run", *HERE), 2, "cannot read no-run"),
    (("eval", LOCAL, "--model", "http://x", "--temperature", "inf"), 2, "'--temperature': Input"),
    (("eval", LOCAL, "--model", "http://x", "--temperature", "nan"), 2, "'--temperature': Input"),
    (("plan", LOCAL, "--learner.optimizer.lrr=1", *HERE), 2, "did you mean 'lr'?"),
    (("plan", LOCAL, "--gpus", "eighty", *HERE), 2, "write number and memory, such as 4x80GB"),
    (("submit", LOCAL, *HERE), 2, "Missing option '--request-id'"),
    (("status", "no-run", *HERE), 1, "there are no runs in"),
    (("status", "--runs", "/proc/nope"), 1, "there are no runs in /proc/nope"),
    (("status", "--runs", "{t}/no-ledger"), 1, "launcher.sqlite cannot be opened"),
    (("logs", "newest", *HERE), 1, "there are no runs in"),
    (("logs", "newest", "--lines", "-1", *HERE), 2, "should be greater than or equal to 0"),
    (("show", "newest", "--passed", "--failed", *HERE), 2, "leave no attempt"),
    (("show", "newest", "--tasks", "--step", "1", *HERE), 2, "it has no effect with --tasks"),
    (("show", "newest", *HERE), 1, "there are no runs in"),
    (("inspect", "--step", "1", *HERE), 2, "--step requires --bundle"),
    (("inspect", "--bundle", "x.zip", "--port", "80", *HERE), 2, "no effect with --bundle"),
    (("inspect", "no-run", *HERE), 1, "no-run"),
    (("export", "newest", "--out", "{t}/out", *HERE), 1, "there are no runs in"),
    (("export-trajectories", "newest", "--out", "{t}/out", "--format", "csv"), 2, "'csv' is not"),
    (("scale", "newest", "rollout", *HERE), 1, "rollout"),
    (("stop", "newest", "--grace", "soon", *HERE), 2, "'soon' is not a number of seconds"),
    (("doctor", LOCAL, "--skip", "nothing", *HERE), 1, "no such probe"),
    (("doctor", LOCAL, "--learner.steps", *HERE), 1, "write --section.key=value"),
    (("env", "status", *HERE), 1, "there are no runs in"),
    (("env", "try", LOCAL, "{t}/no-tasks.json"), 1, "no-tasks.json holds no task"),
    (("env", "try", LOCAL, "{t}/tasks.json", "--key", "b"), 1, "none of its 1 tasks has the key"),
    (("env", "try", LOCAL, "{t}/tasks.json", "--attempts", "2"), 2, "no effect with an episode by"),
    (("env", "try", LOCAL, "{t}/nowhere.json"), 1, "nowhere.json: there is no such task"),
    (("env", "try", LOCAL, "{t}/broken.toml"), 1, "broken.toml: not JSON: Expecting"),
    (("data",), 2, ""),
    (("data", "prepare", "{t}/tasks.json"), 2, "Missing option '--out'"),
    (("data", "prepare", "{t}/nowhere.json", "--out", "{t}/out"), 2, "there is no such task file"),
    (("data", "prepare", "{t}/tasks.json", "--out", "{t}/out"), 2, "no task of"),
    (("data", "prepare", "{t}", "--out", "{t}/out"), 2, "is a folder without Harbor tasks"),
    (("data", "show", "{t}"), 2, "manifest.json"),
    (("data", "stats", "{t}/no-tasks.json"), 2, "at least one task"),
    (("data", "diff", "{t}/tasks.json", "{t}/tasks.json"), 2, "needs a non-empty string 'prompt'"),
    (("watch", "no-run", *HERE), 1, "no-run"),
    (("cancel", *HERE), 2, "Missing argument"),
    (("join", "10.0.0.1", "--machine", "0", *HERE), 2, "should be greater than or equal to 1"),
    (("trian", LOCAL), 2, "No such command 'trian'"),
    ((), 2, ""),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("wrong")
    (made / "broken.toml").write_text("name = \n")
    (made / "list.json").write_text("[]")
    (made / "no-tasks.json").write_text('{"tasks": []}')
    (made / "tasks.json").write_text('[{"key": "a", "env_id": "booking"}]')
    (made / "no-ledger/launcher.sqlite").mkdir(parents=True)
    return made


def run_here(*words: str) -> int:
    """Run the command in this process, whose privacy it must not change; return its exit code."""
    with (
        patch.object(sys, "argv", ["flotilla", *words]),
        patch.object(app, "keep_private"),
        patch.object(app, "refuse_core_dumps"),
        pytest.raises(SystemExit) as ended,
    ):
        app.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.parametrize(
    ("words", "code", "message"),
    WRONG_COMMANDS,
    ids=lambda given: " ".join(given)[:60] if isinstance(given, tuple) else "",
)
def test_a_wrong_command_is_answered_by_one_sentence_and_leaves_nothing(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    code: int,
    message: str,
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "400")
    before = sorted(folder.rglob("*"))
    runs = folder / EMPTY
    prepared = patch("flotilla_launcher.control.prepare_commands.execute_command")
    with prepared as execute, patch("flotilla_launcher.cli.prepare.execute_command", execute):
        ended = run_here(*(word.format(t=folder, r=runs) for word in words))
    output = "".join(capfd.readouterr())
    assert ended == code, output
    assert message in output
    assert "Traceback" not in output
    execute.assert_not_called()
    assert sorted(folder.rglob("*")) == before

"""`flotilla eval --model`, suites and comparisons: models by script play through a real gateway."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.asked_tasks import write_asked_tasks
from tests.support.http_answers import Answer, serve_answers
from tests.support.launcher import forged_command
from tests.support.repository import ROOT
from tests.support.scripted_model import Say, as_answer, completion, serve_model

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Evaluator:
    """The command with a spec and three tasks, in a folder."""

    folder: Path
    spec: Path
    tasks: Path

    @property
    def out(self) -> Path:
        return self.folder / "results"

    def words(self, *more: object) -> list[str]:
        return ["-m", "flotilla_launcher.cli.app", "eval", *map(str, more)]

    def play_words(self, url: str, *more: object) -> list[str]:
        given = ("--model", url, "--tasks", self.tasks, "--concurrency", "1", *more)
        out = () if "--out" in more else ("--out", self.out)
        return self.words(self.spec, *given, *out)

    def run(self, words: Sequence[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            forged_command(*words),
            capture_output=True,
            text=True,
            cwd=ROOT,
            timeout=110,
            check=False,
        )

    def rows(self) -> list[dict[str, Any]]:
        lines = (self.out / "results.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


@pytest.fixture
def evaluator(tmp_path: Path) -> Evaluator:
    return Evaluator(tmp_path, *write_asked_tasks(tmp_path, 3))


def asked_for(messages: Messages) -> str:
    return messages[0]["content"].rpartition("What is ")[2].rstrip("?")


def knows(*numbers: str) -> Say:
    """A model that knows the words of these tasks."""
    return lambda messages: {"content": "right" if asked_for(messages) in numbers else "wrong"}


def test_a_model_is_scored_by_environment_with_intervals(evaluator: Evaluator) -> None:
    with serve_model(knows("0", "1")) as (url, asked):
        done = evaluator.run(evaluator.play_words(url, "--attempts", "2", "--temperature", "0.5"))
    assert done.returncode == 0, done.stdout + done.stderr
    heading, notes, every = (line.split() for line in done.stdout.splitlines()[-3:])
    assert heading[:6] == ["environment", "tasks", "attempts", "graded", "no", "grade"]
    assert heading[-2:] == ["pass@2", "pass^2"]
    assert notes[:6] == ["notes", "3", "6", "6", "0", "0.667"]
    assert every[:6] == ["all", "3", "6", "6", "0", "0.667"]
    low, high = float(every[6]), float(every[8])
    assert 0.15 < low < 0.667 < high < 0.98
    assert [body["temperature"] for body in asked.bodies] == [0.5] * 6
    rows = evaluator.rows()
    assert {(row["task_key"], row["attempt"]) for row in rows} == {
        (f"ask-{n}", attempt) for n in range(3) for attempt in (1, 2)
    }
    first = rows[0]
    assert (first["env_key"], first["turns"], first["calls"]) == ("notes", 1, 0)
    assert [message["role"] for message in first["messages"]] == ["user", "assistant"]
    manifest = json.loads((evaluator.out / "evaluation.json").read_text())
    assert manifest["model"] == f"scripted at {url}"
    assert set(manifest["tasks"]) == {"ask-0", "ask-1", "ask-2"}
    assert manifest["written_by"]["version"]
    assert "<svg" in (evaluator.out / "scores.svg").read_text()


@pytest.mark.slow
def test_an_evaluation_that_is_killed_goes_on_and_plays_nothing_graded_twice(
    evaluator: Evaluator,
) -> None:
    asked, started = Counter[str](), list[psutil.Process]()

    def say(messages: Messages) -> Mapping[str, Any] | Answer:
        asked[asked_for(messages)] += 1
        if asked.total() == 3:
            started.extend(psutil.Process(process.pid).children(recursive=True))
            process.kill()
        return {"content": "right"}

    with serve_model(say) as (url, _):
        words = evaluator.play_words(url, "--attempts", "2")
        # In a process of its own: one of the forge's would be killed with others.
        process = subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, cwd=ROOT)
        process.communicate(timeout=110)
        assert process.returncode == -signal.SIGKILL
        assert psutil.wait_procs(started, timeout=20)[1] == []
        graded = {(row["task_key"], row["attempt"]) for row in evaluator.rows()}
        assert graded == {("ask-0", 1), ("ask-1", 1)}
        with (evaluator.out / "results.jsonl").open("a") as file:
            file.write('{"task_key": "ask-2", "env')
        before = asked.copy()
        done = evaluator.run(words)
        assert done.returncode == 0, done.stdout + done.stderr
        assert asked - before == {"0": 1, "1": 1, "2": 2}
        done = evaluator.run(words)
        assert "plays" not in done.stderr, "nothing is left"
    assert done.stdout.splitlines()[-1].split()[:6] == ["all", "3", "6", "6", "0", "1.000"]
    assert len(evaluator.rows()) == 6


@pytest.mark.slow
def test_ctrl_c_ends_an_evaluation_with_its_processes_and_the_same_command_goes_on(
    evaluator: Evaluator,
) -> None:
    asked, started = Counter[str](), list[psutil.Process]()

    def say(messages: Messages) -> Mapping[str, Any] | Answer:
        asked[asked_for(messages)] += 1
        if asked.total() == 3:
            started.extend(psutil.Process(process.pid).children(recursive=True))
            # A terminal sends it to all processes of the group.
            os.killpg(process.pid, signal.SIGINT)
            process.wait(60)
        return {"content": "right"}

    with serve_model(say) as (url, _):
        words = evaluator.play_words(url, "--attempts", "2")
        process = subprocess.Popen(
            [sys.executable, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            start_new_session=True,
        )
        output, progress = process.communicate(timeout=110)
        assert process.returncode == 130, output + progress
        assert output.splitlines()[-1].split()[:6] == ["all", "2", "2", "2", "0", "1.000"]
        assert "Traceback" not in output + progress
        assert len(started) >= 2, "a gateway, and the server of an environment"
        assert psutil.wait_procs(started, timeout=20)[1] == []
        graded = {(row["task_key"], row["attempt"]) for row in evaluator.rows()}
        assert graded == {("ask-0", 1), ("ask-1", 1)}
        assert {path.name for path in evaluator.out.iterdir()} == {
            "evaluation.json",
            "results.jsonl",
        }
        before = asked.copy()
        done = evaluator.run(words)
        assert done.returncode == 0, done.stdout + done.stderr
        assert asked - before == {"0": 1, "1": 1, "2": 2}
    assert done.stdout.splitlines()[-1].split()[:6] == ["all", "3", "6", "6", "0", "1.000"]
    assert len(evaluator.rows()) == 6


def test_an_attempt_without_a_grade_is_shown_beside_and_played_again(evaluator: Evaluator) -> None:
    away = [True]

    def say(messages: Messages) -> Mapping[str, Any] | Answer:
        return as_answer({}, 400) if away and asked_for(messages) == "1" else {"content": "right"}

    with serve_model(say) as (url, _):
        words = evaluator.play_words(url, "--attempts", "1")
        done = evaluator.run(words)
        assert done.returncode == 1, done.stdout + done.stderr
        assert done.stdout.splitlines()[-1].split()[:6] == ["all", "3", "3", "2", "1", "1.000"]
        assert "attempts without a grade: 1; the same command makes them once more" in done.stderr
        away.clear()
        done = evaluator.run(words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].split()[:6] == ["all", "3", "3", "3", "0", "1.000"]


def test_a_folder_of_other_settings_is_refused_with_what_differs(evaluator: Evaluator) -> None:
    with serve_model(knows("0")) as (url, _):
        assert evaluator.run(evaluator.play_words(url, "--attempts", "1")).returncode == 0
        kept = evaluator.rows()
        done = evaluator.run(evaluator.play_words(url, "--attempts", "2", "--temperature", "1"))
        assert done.returncode == 2
        assert "other settings: attempts 1, now 2; temperature None, now 1.0." in done.stdout
        write_asked_tasks(evaluator.folder, 4)
        done = evaluator.run(evaluator.play_words(url, "--attempts", "1"))
        assert "1 tasks were added, removed or changed, such as ask-3" in done.stdout
        done = evaluator.run(
            evaluator.play_words(url, "--attempts", "1", "--out", evaluator.folder)
        )
        assert (done.returncode, "holds something else" in done.stdout) == (2, True)
    assert evaluator.rows() == kept


def test_a_password_in_an_address_is_kept_nowhere(evaluator: Evaluator) -> None:
    with serve_model(knows("0")) as (url, asked):
        url = url.replace("http://", "http://ann:hunter2@")
        given = ("--model", url, "--tasks", evaluator.tasks, "--attempts", "1")
        words = evaluator.words(evaluator.spec, *given)
        program = forged_command(*words)
        done = subprocess.run(
            program, capture_output=True, text=True, cwd=evaluator.folder, timeout=110, check=False
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert asked.headers[-1]["authorization"].startswith("Basic ")
    (folder,) = (evaluator.folder / "evaluations").iterdir()
    kept = "".join(path.read_text() for path in folder.iterdir())
    assert "hunter2" not in f"{folder}{kept}{done.stdout}{done.stderr}"


def test_an_endpoint_that_refuses_the_key_is_named_and_asked_no_more(
    evaluator: Evaluator,
) -> None:
    with serve_model(lambda _messages: as_answer({"error": "wrong key"}, 401)) as (url, _):
        more = ("--attempts", "4", "--model-name", "scripted")
        done = evaluator.run(evaluator.play_words(url, *more))
    assert done.returncode == 1
    assert "error: 10 attempts in succession failed, the last by the endpoint: " in done.stdout
    assert "/chat/completions answered 401: " in done.stdout
    assert len(evaluator.rows()) == 10, "of 12"


@pytest.mark.slow
def test_two_evaluations_are_compared_by_task(evaluator: Evaluator) -> None:
    write_asked_tasks(evaluator.folder, 8)
    ones, others = evaluator.folder / "ones", evaluator.folder / "others"
    with serve_model(knows("0")) as (url, _):
        more = ("--attempts", "1", "--out")
        assert evaluator.run(evaluator.play_words(url, *more, ones)).returncode == 0
    with serve_model(knows(*"1234567")) as (url, _):
        words = evaluator.play_words(url, *more, others, "--against", ones, "--json")
        done = evaluator.run(words)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert told["evaluations"][0]["scores"][-1]["pass_at_1"]["mean"] == 7 / 8
    found = told["comparison"]
    assert (found["name"], found["against"]) == (str(others), str(ones))
    needed, found = found["tasks_to_show"], found["result"]
    assert (found["won"], found["lost"], found["tied"]) == (7, 1, 0)
    assert found["difference"] == 6 / 8
    assert found["low"] < 6 / 8 < found["high"]
    assert found["p"] == pytest.approx(2 * 9 / 2**8), "all changes of signs as far from 0"
    assert needed["0.1"] > found["tasks"]
    done = evaluator.run(evaluator.words(ones, "--against", others))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "difference of the mean reward -0.750, 95 % interval " in done.stdout
    assert "tasks won 1, lost 7, tied 0; p = 0.07 " in done.stdout


@pytest.mark.slow
def test_what_cannot_be_compared_is_named(evaluator: Evaluator) -> None:
    ones, others = evaluator.folder / "ones", evaluator.folder / "others"
    with serve_model(knows("0")) as (url, _):
        more = ("--attempts", "1", "--out")
        assert evaluator.run(evaluator.play_words(url, *more, ones)).returncode == 0
        text = evaluator.tasks.read_text()
        evaluator.tasks.write_text(text.replace("ask-", "other-"))
        assert evaluator.run(evaluator.play_words(url, *more, others)).returncode == 0
    done = evaluator.run(evaluator.words(ones, "--against", others))
    assert (done.returncode, "have no task in common" in done.stdout) == (1, True)
    done = evaluator.run(evaluator.words(ones, "--against", "nothing"))
    assert "nothing is neither a folder that `flotilla eval --model` wrote" in done.stdout
    evaluator.tasks.write_text(text.replace("What is 1", "And what is 1"))
    changed = evaluator.folder / "changed"
    with serve_model(knows("0")) as (url, _):
        words = evaluator.play_words(url, *more, changed, "--against", ones)
        done = evaluator.run(words)
    assert done.returncode == 1
    assert "1 tasks of the same key differ, such as ask-1: evaluate both on the same" in done.stdout
    results = others / "results.jsonl"
    rows = [{**json.loads(line), "reward": None} for line in results.read_text().splitlines()]
    results.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = evaluator.run(evaluator.words(ones, "--against", others))
    assert (done.returncode, "has no attempt with a grade" in done.stdout) == (1, True)


def test_without_tasks_the_held_out_set_of_the_spec_is_played(evaluator: Evaluator) -> None:
    with serve_model(knows("0")) as (url, _):
        more = ("--model", url, "--attempts", "1", "--out", evaluator.out)
        done = evaluator.run(evaluator.words(evaluator.spec, *more))
        assert (done.returncode, "pass --tasks FILE" in done.stdout) == (1, True)
        sets = [{"name": "heldout", "tasks": str(evaluator.tasks)}]
        spec = json.loads(evaluator.spec.read_text()) | {"learner": {"eval": {"sets": sets}}}
        evaluator.spec.write_text(json.dumps(spec))
        done = evaluator.run(evaluator.words(evaluator.spec, *more))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].split()[:6] == ["all", "3", "3", "3", "0", "0.333"]


@pytest.mark.slow
def test_a_suite_makes_all_of_its_evaluations(evaluator: Evaluator) -> None:
    suite = evaluator.folder / "paper.toml"
    with serve_model(knows("0", "1")) as (url, _):
        named = [
            f'[[eval]]\nname = "{name}"\nspec = "{evaluator.spec}"\ntasks = "{evaluator.tasks}"\n'
            f'model = "{url}"\nattempts = {attempts}\n'
            for name, attempts in (("once", 1), ("twice", 2))
        ]
        suite.write_text("\n".join(named))
        done = evaluator.run(evaluator.words("--suite", suite, "--out", evaluator.out, "--json"))
    assert done.returncode == 0, done.stdout + done.stderr
    told = {Path(each["name"]).name: each for each in json.loads(done.stdout)["evaluations"]}
    assert [told[name]["scores"][-1]["attempts"] for name in ("once", "twice")] == [3, 6]
    kept = evaluator.out / "once" / "results.jsonl"
    kept.unlink()
    suite.write_text(named[0] + named[1].replace("tasks.json", "tusks.json"))
    done = evaluator.run(evaluator.words("--suite", suite, "--out", evaluator.out))
    assert (done.returncode, "tusks.json" in done.stdout) == (2, True)
    assert not kept.exists(), "the first one is not played"
    suite.write_text(named[0] + 'modle = "x"\n')
    done = evaluator.run(evaluator.words("--suite", suite))
    assert (done.returncode, "modle" in done.stdout) == (2, True)
    done = evaluator.run(evaluator.words("--suite", suite, "--attempts", "3"))
    assert (done.returncode, "no effect with --suite" in done.stderr) == (2, True)


@pytest.mark.slow
def test_a_suite_goes_on_after_a_model_that_cannot_be_reached(evaluator: Evaluator) -> None:
    away, suite = [True], evaluator.folder / "paper.toml"

    def answer(request: BaseHTTPRequestHandler) -> Answer:
        if away:
            return as_answer({"error": "closed"}, 401)
        if request.command == "GET":
            return as_answer({"data": [{"id": "awake"}]})
        return as_answer(completion({"content": "right"}))

    with serve_model(knows("0")) as (gone, _):
        pass
    with serve_answers(answer) as closed, serve_model(knows("0", "1")) as (url, asked):
        named = [
            f'[[eval]]\nname = "{name}"\nspec = "{evaluator.spec}"\ntasks = "{evaluator.tasks}"\n'
            f'model = "{model}"\nattempts = 1\n'
            for name, model in (("gone", gone), ("there", url), ("closed", f"{closed}/v1"))
        ]
        suite.write_text("\n".join(named))
        words = evaluator.words("--suite", suite, "--out", evaluator.out)
        done = evaluator.run(words)
        assert done.returncode == 1, done.stdout + done.stderr
        lines = done.stdout.splitlines()
        assert lines[0].endswith("/gone")
        assert lines[1].startswith(f"failed: try 5: {gone}/models: ")
        assert lines[-3].split()[:6] == ["all", "3", "3", "3", "0", "0.667"]
        assert lines[-2].endswith("/closed")
        assert lines[-1].startswith(f"failed: {closed}/v1/models answered 401: ")
        assert "<svg" in (evaluator.out / "scores.svg").read_text()
        away.clear()
        before = len(asked.bodies)
        again = evaluator.run([*words, "--json", "--against", str(evaluator.out / "there")])
    assert len(asked.bodies) == before == 3, "what is graded is not played again"
    told = json.loads(again.stdout)
    by_name = {Path(each["name"]).name: each for each in told["evaluations"]}
    assert again.returncode == 1, "one is still gone"
    assert (by_name["gone"]["scores"], by_name["there"]["failed"]) == ([], "")
    assert by_name["gone"]["failed"].startswith("try 5: ")
    assert by_name["closed"]["scores"][-1]["pass_at_1"]["mean"] == 1
    assert (told["comparison"]["result"]["won"], told["not_compared"]) == (1, "")

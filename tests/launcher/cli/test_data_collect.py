"""`flotilla data collect`: the command itself, at a real gateway with the shipped apps, taught by a
script behind a real endpoint."""

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from flotilla_reading.data.collect.ledger import open_ledger
from tests.support.repository import ROOT
from tests.support.scripted_teacher import ScriptedTeacher, serve_teacher
from tests.support.task_collector import KEYS, SPEC, TASKS, Collector


@pytest.fixture
def collector(tmp_path: Path) -> Collector:
    return Collector(tmp_path)


def taught(*ways: str, **settings: Any) -> ScriptedTeacher:
    """A teacher that plays the tries at each task in these ways, one word a task or one for all."""
    each = ways * len(KEYS) if len(ways) == 1 else ways
    return ScriptedTeacher(
        TASKS, {key: words.split() for key, words in zip(KEYS, each, strict=True)}, **settings
    )


def test_a_teacher_that_fails_stalls_and_lies_keeps_what_is_solvable_and_not_trivial(
    collector: Collector,
) -> None:
    teacher = taught(
        "solve lie solve lie",
        "solve solve solve solve",
        "lie boast lie boast",
        "flaky lie stall boast",
        "refuse refuse refuse solve",
        "solve refuse lie refuse",
    )
    with serve_teacher(teacher) as url:
        done = collector.collect("--teacher", url, "--turn-timeout", "5")
    assert done.returncode == 1, done.stdout + done.stderr
    fates = ("kept", "too_easy", "unsolved", "kept", "undecided", "kept")
    assert collector.fates() == dict(zip(KEYS, fates, strict=True))
    kept = [KEYS[0], KEYS[3], KEYS[5]]
    assert collector.rows("tasks.jsonl") == [task for task in TASKS if task["key"] in kept]
    assert [row["key"] for row in collector.rows("solutions.jsonl")] == kept
    lines = [line.split() for line in done.stdout.splitlines()]
    reasons = ["unsolved", "too_easy", "undecided"]
    assert ["environment", "source", "kept", *reasons] in lines
    assert ["total", "6", "3", "1", "1", "1"] in lines
    assert "undecided: only 1 of the 2 graded tries needed; no grade: the endpoint: " in done.stdout
    manifest = json.loads((collector.out / "manifest.json").read_text())
    assert manifest["counts"] == {
        "source": 6,
        "kept": 3,
        "too_easy": 1,
        "unsolved": 1,
        "undecided": 1,
    }
    assert manifest["spent"]["requests"] == teacher.asked
    half = next(row for row in collector.rows("evidence.jsonl") if row["key"] == KEYS[5])
    assert (half["graded"], half["passed"]) == (2, 1)
    assert sorted(str(each["reward"]) for each in half["tries"]) == ["0.0", "1.0", "None", "None"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("concurrency", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_a_collection_that_is_killed_and_resumed_pays_no_try_twice(
    collector: Collector, concurrency: int
) -> None:
    # Farther apart than the requests of one process that are under way when it is killed.
    moments, running = {1, 7, 18, 33}, list[subprocess.Popen[str]]()

    def strike(number: int) -> None:
        if number in moments:
            running[-1].kill()

    teacher = taught("solve lie solve lie", on_request=strike)
    killed, shown = 0, ""
    with serve_teacher(teacher) as url:
        while not running or running[-1].returncode == -signal.SIGKILL:
            running.append(collector.start("--teacher", url, "--concurrency", concurrency))
            shown, _ = running[-1].communicate(timeout=110)
            killed += running[-1].returncode == -signal.SIGKILL
    assert (running[-1].returncode, killed) == (0, len(moments)), shown
    assert collector.fates() == dict.fromkeys(KEYS, "kept")
    # One try at each place, and the ledger knew of every request before the endpoint did.
    assert collector.query("SELECT count(*) FROM tries WHERE ended") == [(4 * len(KEYS),)]
    assert collector.query("SELECT count(*) FROM tries") == [(4 * len(KEYS),)]
    found: dict[str, list[bool]] = {}
    sql = "SELECT try, turn, answer IS NOT NULL FROM requests ORDER BY id"
    for one, turn, answered in collector.query(sql):
        found.setdefault(f"{one}-{turn}", []).append(bool(answered))
    for key, count in teacher.requests.items():
        answers = found[key.partition("-")[2]]
        # Asked again only because the answer had not arrived.
        assert (count <= len(answers), answers) == (True, [False] * (len(answers) - 1) + [True])
    assert len(found) <= teacher.asked <= len(found) + killed * concurrency
    if concurrency == 1:
        assert teacher.asked == len(found) + killed


def test_ctrl_c_writes_what_was_found_and_the_next_run_goes_on(collector: Collector) -> None:
    running = list[subprocess.Popen[str]]()

    def interrupt(number: int) -> None:
        if number == 12:
            running[-1].send_signal(signal.SIGINT)

    teacher = taught("solve lie", on_request=interrupt)
    with serve_teacher(teacher) as url:
        words = ("--teacher", url, "--tries", 2, "--concurrency", 1)
        running.append(collector.start(*words))
        shown, _ = running[-1].communicate(timeout=110)
        assert running[-1].returncode == 130, shown
        first = collector.fates()
        assert (first[KEYS[0]], first[KEYS[-1]]) == ("kept", "undecided")
        assert "the same command goes on with them" in shown
        done = collector.collect(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert collector.fates() == dict.fromkeys(KEYS, "kept")


@pytest.mark.timeout(300)
def test_budgets_end_the_tries_and_a_larger_one_goes_on(collector: Collector) -> None:
    teacher = taught("solve lie")
    with serve_teacher(teacher) as url:
        words = ("--teacher", url, "--tries", 2, "--concurrency")
        done = collector.collect(*words, 3, "--max-calls", 7)
        assert (done.returncode, teacher.asked) == (1, 7), done.stdout + done.stderr
        assert "stopped: --max-calls 7 is reached" in done.stdout
        assert collector.collect(*words, 3, "--max-calls", 7).returncode == 1
        assert teacher.asked == 7
        done = collector.collect(*words, 1, "--max-tokens", 1320)
        assert (done.returncode, teacher.asked) == (1, 12), done.stdout + done.stderr
        assert "requests: 12, tokens of prompts: 1200, of answers: 120" in done.stdout
        prices = ("--price-in", 100, "--price-out", 1000)
        done = collector.collect(*words, 1, "--max-cost", 0.3, *prices)
        assert (done.returncode, teacher.asked) == (1, 15), done.stdout + done.stderr
        assert "cost: 0.3000" in done.stdout
        assert "stopped: --max-cost 0.3 is reached" in done.stdout
        done = collector.collect(*words, 1)
    assert done.returncode == 0, done.stdout + done.stderr
    assert collector.fates() == dict.fromkeys(KEYS, "kept")
    # What was played before a budget ended was not played again.
    turns = collector.query("SELECT count(*) FROM (SELECT DISTINCT try, turn FROM requests)")
    assert turns == [(teacher.asked,)]


def test_a_budget_of_tokens_needs_an_endpoint_that_counts_them(collector: Collector) -> None:
    teacher = taught("solve", counts_tokens=False)
    with serve_teacher(teacher) as url:
        done = collector.collect("--teacher", url, "--max-tokens", 10**6, "--concurrency", 1)
    assert (done.returncode, teacher.asked) == (1, 1), done.stdout + done.stderr
    assert "stopped: the endpoint does not count tokens" in done.stdout


def test_an_outage_ends_the_tries_before_it_uses_them_up(collector: Collector) -> None:
    teacher = taught("refuse")
    with serve_teacher(teacher) as url:
        done = collector.collect("--teacher", url, "--concurrency", 1)
        assert (done.returncode, teacher.asked) == (1, 10), done.stdout + done.stderr
        assert "stopped: 10 turns in succession failed: " in done.stdout
        teacher.ways = {key: ["solve", "lie"] for key in KEYS}
        assert "--retry-ungraded makes them once more" in done.stdout
        done = collector.collect("--teacher", url, "--retry-ungraded")
    assert done.returncode == 0, done.stdout + done.stderr
    assert collector.fates() == dict.fromkeys(KEYS, "kept")


def test_a_collection_is_not_made_of_its_own_files(collector: Collector) -> None:
    with serve_teacher(taught("solve lie")) as url:
        done = collector.collect("--teacher", url, "--tries", 2)
    assert done.returncode == 0, done.stdout + done.stderr
    done = collector.collect("--episodes", collector.out / "demonstrations.jsonl")
    assert done.returncode == 2
    assert "whose files are replaced: choose another folder" in done.stdout + done.stderr


def test_requests_are_spaced(collector: Collector) -> None:
    times = list[float]()
    teacher = taught("lie", on_request=lambda _number: times.append(time.monotonic()))
    with serve_teacher(teacher) as url:
        done = collector.collect("--teacher", url, "--tries", 2, "--requests-per-minute", 300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert collector.fates() == dict.fromkeys(KEYS, "unsolved")
    # 12 requests, with 0.2 s from one to the next.
    assert max(times) - min(times) > 11 * 0.2 * 0.95


def test_other_teachers_and_options_without_effect_are_refused(collector: Collector) -> None:
    teacher = taught("solve lie")
    with serve_teacher(teacher) as url:
        asked = ("--teacher", url, "--max-calls", 1)
        assert collector.collect(*asked).returncode == 1
        done = collector.collect(*asked, "--temperature", 0.5)
        assert done.returncode == 2
        assert "began with --temperature by default, not 0.5" in done.stdout
    for words, message in (
        (("--teacher", url, "--tries", 1), "--tries 1 is less than --min-graded 2"),
        (("--teacher", url, "--max-cost", 1), "--max-cost needs --price-in and --price-out"),
        (("--teacher", url, "--min-pass-rate", 0.95), "--min-pass-rate is more than"),
        (("--episodes", "nowhere"), "--episodes nowhere is no file, and "),
        ((), "--teacher, --episodes or both are needed"),
        (("--episodes", SPEC, "--max-calls", 3), "it has no effect with no --teacher"),
        (("--episodes", SPEC), "local.toml: line 1: "),
    ):
        done = collector.collect(*words)
        assert (done.returncode, message in done.stdout + done.stderr) == (2, True), done


def test_two_collections_cannot_work_in_one_folder(collector: Collector) -> None:
    with open_ledger(collector.out):
        done = collector.collect("--teacher", "http://127.0.0.1:9/v1")
    assert (done.returncode, "another `flotilla data collect` works in" in done.stdout) == (2, True)


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(580)
def test_a_model_that_vllm_serves_teaches(engine_folder: Path, tmp_path: Path) -> None:
    options = (
        "--enforce-eager --max-model-len 256 --kv-cache-memory-bytes 268435456 --block-size 32"
        " --dtype float32"
    )
    tasks = json.loads((ROOT / "docs/examples/notes_tasks.json").read_text())
    collector = Collector(tmp_path, tasks, [str(ROOT / "docs/examples/notes.toml")])
    words = ("--teacher", engine_folder, "--vllm-args", options, "--tries", 2)
    process = collector.start(*words, "--max-tokens", 10**6)
    shown, _ = process.communicate(timeout=560)
    assert process.returncode == 0, shown
    # Its weights are random: it writes noise, which is graded, and whose tokens are counted.
    assert {*collector.fates().values()} == {"unsolved"}
    [(requests, counted)] = collector.query("SELECT count(*), sum(completion > 0) FROM requests")
    assert requests == counted == 2 * len(collector.fates())
    done = collector.collect(*words)
    assert (done.returncode, "is served" in shown, "is served" in done.stdout) == (0, True, False)

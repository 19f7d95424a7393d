"""Transcripts as Inspect AI itself reads them back: of the program's own process, and of calls of
it in this one."""

import json
import subprocess
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from flotilla_common.domain.attempts import AttemptKey
from flotilla_common.domain.token_authors import Author, policy_mask
from flotilla_reading.inspector.queries.run_folders import read_journal
from flotilla_reading.inspector.queries.transcript_attempts import (
    TranscriptSubject,
    read_attempts,
    sample_place,
)
from tests.reading.inspector.made_runs import (
    MadeAttempt,
    MadeRun,
    conversation,
    open_run,
    run_apart,
)
from tests.reading.inspector.served_pages import inspector_command
from tests.reading.inspector.transcript_logs import read_log, write_here
from tests.support.repository import ROOT

if TYPE_CHECKING:
    from inspect_ai.log import EvalLog, EvalSample

HOSTILE = "<script>alert(1)</script>\x1b[31m\u202e ![x](https://example.com/x.png)"


# Runs a command, and prints the seconds and kilobytes that it took. A process counts the memory of
# the one that starts it, so this one is small.
MEASURE = """
import resource, subprocess, sys
done = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(done.returncode, used.ru_utime, used.ru_maxrss)
"""


def write_transcript(
    run: Path, to: Path, *what: str, by: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    program = "flotilla_reading.inspector.transcript_command"
    command = [*by, *inspector_command(program, "--run", str(run), *what, "--to", str(to))]
    environ = {"PYTHONPATH": f"{ROOT}:{ROOT / 'gen'}", "PATH": "/usr/bin:/bin"}
    return subprocess.run(command, capture_output=True, text=True, env=environ, check=False)


def sample_of(log: "EvalLog", key: AttemptKey) -> "EvalSample":
    place = sample_place(key)
    (found,) = [each for each in log.samples or [] if (each.id, each.epoch) == place]
    return found


@pytest.fixture(scope="module")
def log(made_run: MadeRun, tmp_path_factory: pytest.TempPathFactory) -> Generator["EvalLog"]:
    path = tmp_path_factory.mktemp("transcripts") / "step.eval"
    done = write_transcript(made_run.folder, path, "--step", "3")
    assert done.returncode == 0, done.stderr
    written = json.loads(done.stdout)
    found = read_log(path)
    assert (written["task"], written["eval_id"]) == (found.eval.task, found.eval.eval_id)
    assert written["samples"] == len(found.samples or [])
    yield found


def test_every_attempt_of_a_step_is_a_sample(log: "EvalLog", made_run: MadeRun) -> None:
    of_step = [key for key in made_run.trajectories if "g000010" <= key.group_id < "g000014"]
    samples = {(each.id, each.epoch) for each in log.samples or []}
    assert {sample_place(key) for key in of_step} <= samples
    assert log.status == "success"
    assert log.eval.task == "step 3"


def test_a_sample_has_messages_calls_rewards_and_checks(log: "EvalLog", made_run: MadeRun) -> None:
    key = AttemptKey("g000011r0", 1, 0)
    sample = sample_of(log, key)
    roles = [message.role for message in sample.messages]
    assert roles == ["system", "user", "assistant", "tool", "assistant"]
    call_turn = sample.messages[2]
    assert call_turn.role == "assistant" and call_turn.tool_calls
    assert call_turn.tool_calls[0].function == "find_hotels"
    assert call_turn.tool_calls[0].arguments == {"city": "Rome", "nights": 2}
    answer = sample.messages[3]
    assert answer.role == "tool" and answer.tool_call_id == call_turn.tool_calls[0].id
    assert answer.text == '[{"hotel": "Aurora", "price": 80}]'
    scores = sample.scores or {}
    assert scores["reward"].value == 0.0
    assert scores["advantage"].value == pytest.approx(-0.5)
    assert sample.metadata["checks_failed"] == ["no hotel is booked", "no price is named"]
    assert sample.metadata["policy"] == "1:2"
    assert (sample.metadata["group"], sample.metadata["attempt"]) == (key.group_id, 1)


def test_logprobs_and_what_the_trainer_made_of_a_turn_are_those_of_the_run(
    log: "EvalLog", made_run: MadeRun
) -> None:
    key = AttemptKey("g000011r0", 1, 0)
    sequence = made_run.trajectories[key].sequences[0]
    turns = sample_of(log, key).metadata["turns"]
    texts, logprobs = zip(*(pair for turn in turns for pair in turn["logprobs"]), strict=True)
    assert np.array(logprobs, np.float32).tolist() == sequence.logprobs.tolist()
    ids = sequence.token_ids[policy_mask(sequence.spans)].tolist()
    text = made_run.tokenizer.decode(ids, skip_special_tokens=False)
    assert "".join(texts) == text
    assert [turn["turn"] for turn in turns] == [1, 2]
    assert all(turn["advantages"] == -0.5 for turn in turns)


def test_what_was_dropped_and_what_failed_show_why(log: "EvalLog") -> None:
    stale = sample_of(log, AttemptKey("g000013r0", 0, 0))
    assert stale.metadata["dropped"] == "stale"
    assert "advantage" not in (stale.scores or {})
    lost = sample_of(log, AttemptKey("g000011r0", 4, 0))
    assert lost.scores == {}
    assert lost.error is not None and lost.error.message == "env_lost"


def test_an_evaluation_is_included_too(made_run: MadeRun, tmp_path: Path) -> None:
    path = tmp_path / "e.eval"
    assert write_here(made_run.folder, path, "--eval", "after-1-3") == 0
    found = read_log(path)
    rewards = [(each.scores or {})["reward"].as_float() for each in found.samples or []]
    assert sorted(rewards) == [0.0, 1.0]


def test_a_step_that_is_not_there_is_refused_with_its_name(
    made_run: MadeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert write_here(made_run.folder, tmp_path / "x.eval", "--step", "99") == 1
    message = "error: Step 99 has no plan in the journal: it has not begun.\n"
    assert capsys.readouterr().err == message
    assert list(tmp_path.iterdir()) == []


def test_hostile_and_endless_texts_are_text_and_cut(tmp_path: Path) -> None:
    async def make() -> MadeRun:
        run = open_run(tmp_path / "runs")
        long = "x" * 50_000
        parts = conversation(2, answer=HOSTILE + long)
        parts += [(Author.POLICY, HOSTILE + "<tool_call>\n{no json")]
        bad = MadeAttempt(parts, 0.0, failed=(HOSTILE,))
        good = MadeAttempt(conversation(2), 1.0)
        await run.plan_step(1, [await run.add_group([bad, good], version=0)])
        await run.journal.close()
        return run

    run = run_apart(make())
    assert write_here(run.folder, tmp_path / "x.eval", "--step", "1") == 0
    sample = sample_of(read_log(tmp_path / "x.eval"), AttemptKey("g000000r0", 0, 0))
    answer = next(m.text for m in sample.messages if m.role == "tool")
    assert answer.startswith("<script>alert(1)</script>\u241b[31m\ufffd")
    assert answer.endswith("more characters are left out here]")
    assert len(answer) < 21_000
    assert not any(mark in sample.model_dump_json() for mark in ("\x1b", "\\u001b", "\u202e"))


def test_of_very_many_attempts_the_first_are_included_and_the_rest_noted(made_run: MadeRun) -> None:
    with read_journal(made_run.folder) as db:
        whole = read_attempts(db, TranscriptSubject(3))
        part = read_attempts(db, TranscriptSubject(3), most=4)
    assert (len(whole.tries), whole.note) == (15, "")
    assert part.tries == whole.tries[:4]
    assert part.note == "Only the first 4 attempts of step 3 are shown here."


@pytest.mark.slow
def test_a_step_of_96_attempts_of_20_turns_takes_bounded_work(tmp_path: Path) -> None:
    async def make() -> MadeRun:
        run = open_run(tmp_path / "runs")
        parts = conversation(20, words=20, answer="hotel " * 200)
        groups: list[str] = []
        for _ in range(12):
            attempts = [MadeAttempt(parts, float(i % 2)) for i in range(8)]
            groups.append(await run.add_group(attempts, version=0))
        await run.plan_step(1, groups)
        await run.journal.close()
        return run

    run = run_apart(make())
    path = tmp_path / "x.eval"
    measure = (sys.executable, "-c", MEASURE)
    done = write_transcript(run.folder, path, "--step", "1", by=measure)
    code, seconds, kilobytes = map(float, done.stdout.split())
    assert code == 0, done.stderr
    # 9 s, 0.3 GB and 3 MB on the machine that this was written on.
    assert seconds < 90
    assert kilobytes < 2 << 20
    assert path.stat().st_size < 16 << 20
    samples = read_log(path).samples or []
    assert len(samples) == 96
    assert [turn["turn"] for turn in samples[0].metadata["turns"]] == list(range(1, 21))
    # Of 213,000 sampled tokens the log holds 200,000 logprobs; the other samples note it.
    lacking = [each for each in samples if each.metadata.get("left_out")]
    assert 0 < len(lacking) < 12

"""`flotilla show` on journals that the learner's own code has written."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from flotilla_common.domain.attempts import AttemptKey, FailureKind, Purpose, StopReason
from flotilla_common.domain.messages import ChatCall, ChatMessage, TokenText, encode_messages
from flotilla_common.domain.policy import PolicyId
from flotilla_common.domain.token_authors import Author, Span
from flotilla_common.domain.trajectory import (
    Counts,
    Facts,
    Media,
    Trajectory,
    TurnTiming,
    content_digest,
)
from flotilla_common.domain.trajectory import Sequence as Tokens
from flotilla_learner.group_types import GroupSpec, Lease
from flotilla_learner.journal.schema import CheckpointRow, Plan
from flotilla_learner.journal.store import Journal, open_journal
from flotilla_learner.sampling.tasks import Task
from flotilla_rollout.episodes.observation_cut import keep_whole
from tests.support.launcher import run_cli_here

WORDS = ("book", "a", "room", "well", "enough", "find_room", "room7", "<done>")
POLICY = PolicyId(1, 4, b"f" * 32)
RUN = "solo"


def _group(number: int, env_key: str) -> GroupSpec:
    row = {"key": f"{env_key}-{number}", "env_key": env_key, "prompt": f"Book room {number}."}
    task = Task(row["key"], env_key, json.dumps(row))
    return GroupSpec(f"g{number:06d}r0", number, task, Purpose.TRAIN, 2, 1.0)


def _tokens(words: Sequence[str], spans: Sequence[Span]) -> Tokens:
    ids = np.array([WORDS.index(word) for word in words], np.int32)
    sampled = sum(span.length for span in spans if span.policy)
    return Tokens(ids, tuple(spans), np.full(sampled, -0.25, np.float32))


def _played(group: GroupSpec, index: int, reward: float) -> Trajectory:
    spans = (
        Span(Author.PROMPT, 3),
        Span(Author.POLICY, 1, POLICY, 1.0),
        Span(Author.FORCED, 1),
        Span(Author.POLICY, 1, POLICY, 1.0),
        Span(Author.ENVIRONMENT, 1),
        Span(Author.POLICY, 1, POLICY, 1.0),
    )
    answered = tuple(
        keep_whole(text, 6, room) for text, room in (("room7 and\nmore", 99), ("y", 0))
    )
    # Those of the first group recorded their messages.
    messages = _messages(answered) if group.sequence_number == 0 else b""
    sequences = (replace(_tokens(WORDS, spans), media=answered, messages=messages),)
    passed, failed = ("[C] booked",), ("[X] not booked",)
    return Trajectory(
        key=AttemptKey(group.group_id, index, 0),
        lease_id="lease",
        sequences=sequences,
        content_digest=content_digest(sequences),
        reward=reward,
        stop_reason=StopReason.DONE,
        checks_passed=passed if reward else (),
        checks_failed=() if reward else failed,
        suspicion="" if reward else "JUDGE ERROR: x\nApp a: 1",
        turns=(TurnTiming(0.5, 0.25, 3, 3, 0.75, thinking_tokens=2), TurnTiming(0.5, 0.0, 7, 1)),
        counts=Counts(turns=2, tool_calls=1),
        facts=Facts(env_key=group.task.env_key, worker_id="rollout-1"),
    )


def _messages(answered: Sequence[Media]) -> bytes:
    call = ChatCall("call_1_0", "find_room", '{"floor": 7}')
    return encode_messages(
        [
            ChatMessage("user", 3, TokenText(0, 3)),
            ChatMessage("assistant", 6, "", TokenText(3, 5), calls=(call,)),
            ChatMessage(
                *("tool", 7, TokenText(6, 7), "", (), call.id, call.name, "tool_error"),
                media=tuple(item.sha256 for item in answered),
            ),
            ChatMessage("assistant", 8, TokenText(7, 8)),
            ChatMessage("tool", 8, "never seen", outcome="ok"),
        ]
    )


def _lost(group: GroupSpec) -> Trajectory:
    return Trajectory(
        key=AttemptKey(group.group_id, 0, 0),
        lease_id="lease",
        sequences=(),
        content_digest=content_digest(()),
        failure=FailureKind.ENV_LOST,
        detail="the server went away",
    )


async def _fill(journal: Journal) -> None:
    """Step 1 trained on two groups of the shop; one attempt in booking was lost."""
    shop, other, booking = _group(0, "shop"), _group(1, "shop"), _group(2, "booking")
    for group in (shop, other, booking):
        lease = Lease(f"of-{group.group_id}", group, ((0, 0),), POLICY, "rollout-1", 1.0)
        await journal.add_lease(lease, "incarnation", f"request-{group.group_id}", 1)
    played = [_played(group, n, float(n)) for group in (shop, other) for n in (0, 1)]
    for trajectory in (*played, _lost(booking)):
        await journal.add_trajectory(trajectory)
    plan = Plan(1, tuple(trajectory.key for trajectory in played))
    await journal.commit_plan(plan, 1, [shop.group_id, other.group_id], [])


@pytest.fixture
async def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    journal = open_journal(folder / RUN)
    await _fill(journal)
    await journal.close()
    tokenizer = Tokenizer(WordLevel({word: n for n, word in enumerate(WORDS)}, WORDS[0]))
    tokenizer.pre_tokenizer = Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / RUN / "spec.json").write_text(json.dumps({"policy": {"model": str(folder)}}))
    return folder


async def show(runs: Path, *arguments: str) -> tuple[int, str]:
    return await run_cli_here("show", RUN, "--runs", str(runs), *arguments)


async def test_show_prints_prompt_turns_observation_reward_and_checks_in_plain_text(
    runs: Path,
) -> None:
    code, output = await show(runs, "--passed", "--group", "g000001r0")
    assert code == 0, output
    lines = [line.split() for line in output.splitlines()]
    assert lines[0] == ["PASS", "step", "1", "g000001r0", "attempt", "1", "shop-1"]
    assert ["task", "Book", "room", "1."] in lines
    # Their messages were not recorded.
    assert ["user", "book", "a", "room"] in lines
    assert ["assistant", "well", "enough", "find_room"] in lines
    assert ["tool", "room7"] in lines
    assert ["assistant", "<done>"] in lines
    assert "turn 1       policy 1:4, 2 tokens, mean logprob -0.250" in output
    assert "thinking 2 tokens, acting 1, generate 0.50 s" in output
    assert output.count("thinking") == 1, "the second turn has none"
    assert output.count("1 forced tokens") == 1, "the policy has not sampled it"
    assert output.count("tools 0.25 s, reward of the step 0.75\n") == 1
    assert output.count("reward of the step") == 1, "the second turn got none"
    assert "reward 1, stop reason done" in output
    assert "worker rollout-1" in output
    assert "[C] booked" in output
    assert "1 of 1 attempts" in output
    assert "\x1b" not in output, "no colours in a pipe"


async def test_show_prints_the_messages_that_the_rollout_recorded(runs: Path) -> None:
    code, output = await show(runs, "--passed", "--group", "g000000r0", "--whole")
    assert code == 0, output
    fields = [
        line[2:].split(maxsplit=1)
        for line in output.partition("worker rollout-1\n")[2].splitlines()
        if line[2:3].strip()
    ]
    told = [(label, text) for label, text in fields if label != "turn"]
    assert told[:7] == [
        ("user", "book a room"),
        ("thinking", "well enough"),
        ("call", 'find_room {"floor": 7}'),
        ("tool", "tool_error: room7"),
        ("whole", "answer room7 and"),
        ("whole", "answer 1 bytes, not kept"),
        ("assistant", "<done>"),
    ]
    assert told[7] == ("tool", "never seen")
    assert output.count("1 forced tokens") == 1


async def test_an_answer_that_was_cut_is_named_and_shown_on_request(runs: Path) -> None:
    requests = ("--passed", "--group", "g000001r0")
    _, output = await show(runs, *requests)
    assert (
        "  whole answer 14 bytes, shown with --whole\n  whole answer 1 bytes, not kept\n" in output
    )
    assert "and" not in output.split()
    _, whole = await show(runs, *requests, "--whole")
    indent = " " * 15
    assert f"  tool         room7\n  whole answer room7 and\n{indent}more\n" in whole


async def test_filters_choose_attempts_and_the_last_line_counts_all(runs: Path) -> None:
    assert "2 of 4 attempts; -n shows more" in (await show(runs, "--step", "1", "-n", "2"))[1]
    _, failed = await show(runs, "--failed")
    assert "3 of 3 attempts" in failed
    assert "[C] booked" not in failed
    assert "suspect      JUDGE ERROR: x\n" in failed
    _, lost = await show(runs, "--env", "booking")
    assert "NO REWARD" in lost
    assert "stop reason env_lost" in lost
    assert "the server went away" in lost


async def test_text_that_a_checkpoint_pruned_is_shown_as_pruned(runs: Path) -> None:
    journal = open_journal(runs / RUN)
    await journal.commit_checkpoint(CheckpointRow(1, "step-000001", {}), keep=1)
    await journal.close()
    _, kept = await show(runs, "--group", "g000000r0", "--passed")
    assert "find_room" in kept
    code, pruned = await show(runs, "--group", "g000001r0", "--passed")
    assert code == 0
    assert "pruned with a checkpoint" in pruned
    assert "[C] booked" in pruned


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--step", "7"), f"no attempts of step 7; run {RUN} has steps: 1 to 1"),
        pytest.param(
            ("--env", "bank"),
            f"no environment 'bank'; run {RUN} has: booking, shop",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("--group", "g9"),
            "no group 'g9'; groups have ids like g000012r0",
            marks=pytest.mark.slow,
        ),
        (("--env", "booking", "--passed"), f"none of the 5 attempts of run {RUN} matches"),
        (("--policy", "/nowhere"), "policy.model '/nowhere' has no tokenizer.json"),
    ],
)
async def test_what_is_not_there_is_named(
    runs: Path, arguments: tuple[str, ...], message: str
) -> None:
    code, output = await show(runs, *arguments)
    assert (code, message in output) == (1, True), output


async def test_an_unknown_run_and_one_without_attempts_differ(
    tmp_path: Path,
) -> None:
    code, output = await show(tmp_path)
    assert (code, f"there are no runs in {tmp_path}" in output) == (1, True), output
    await open_journal(tmp_path / RUN).close()
    code, output = await show(tmp_path)
    assert (code, f"run {RUN} has no attempts yet" in output) == (1, True), output
    (tmp_path / RUN / "journal.sqlite").write_bytes(b"not a database at all" * 100)
    code, output = await show(tmp_path)
    assert (code, "cannot be read as a journal" in output) == (1, True), output

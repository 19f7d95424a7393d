"""A limit that ends an attempt is its stop reason; it is graded, and nothing is added or lost."""

import hashlib
import json
from typing import Any

import pytest

from flotilla_common.domain.attempts import StopReason, ToolOutcome
from flotilla_common.domain.messages import decode_messages
from flotilla_common.domain.token_authors import Author, policy_mask
from flotilla_common.domain.trajectory import Trajectory
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.config import parse_config
from flotilla_common.spec.spec import PolicyConfig, SharedConfig, VisionConfig
from flotilla_rollout.config.rollout import RolloutConfig
from flotilla_rollout.types import ToolResult
from tests.support.rollout import FakeEnvironment, attempt, runner, tokenizer

LOOK = '<tool_call>{"name": "look", "arguments": {"at": "it"}}</tool_call>'
BAD = "<tool_call>{oops</tool_call>"
LONG = "word and " * 400 + "the end"
TURN = len(tokenizer().encode(LOOK)) + 1


async def play(
    texts: list[str], environment: FakeEnvironment | None = None, **limits: Any
) -> Trajectory:
    trajectory = await runner(environment or FakeEnvironment(), texts, **limits).run_attempt(
        attempt()
    )
    assert trajectory.is_graded
    return trajectory


def text_of(trajectory: Trajectory) -> str:
    return tokenizer().decode(trajectory.sequences[0].token_ids.tolist())


def written(trajectory: Trajectory) -> str:
    """Return the policy's text, and check that it alone carries logprobs."""
    sequence = trajectory.sequences[0]
    ids = sequence.token_ids[policy_mask(sequence.spans)]
    assert len(ids) == len(sequence.logprobs)
    return tokenizer().decode(ids.tolist())


async def test_the_tokens_of_a_whole_attempt_are_bounded() -> None:
    trajectory = await play([LOOK], sampled_tokens=2 * TURN + 3)
    assert trajectory.stop_reason is StopReason.MAX_SAMPLED_TOKENS
    assert trajectory.policy_tokens == 2 * TURN + 3
    exact = await play([LOOK], sampled_tokens=2 * TURN)
    assert exact.stop_reason is StopReason.MAX_SAMPLED_TOKENS
    assert (exact.counts.turns, exact.spans[-1].author) == (2, Author.POLICY)
    done = await play([LOOK, "<done>"], sampled_tokens=9_999)
    assert done.stop_reason is StopReason.DONE


async def test_one_call_more_than_allowed_is_not_made_and_ends_the_attempt() -> None:
    environment = FakeEnvironment()
    trajectory = await play([LOOK + LOOK], environment, calls=3)
    assert trajectory.stop_reason is StopReason.MAX_CALLS
    assert len(environment.episodes[0].calls) == trajectory.counts.tool_calls == 3
    answered = await play([LOOK + LOOK, "<done>"], calls=2)
    assert answered.stop_reason is StopReason.DONE


@pytest.mark.parametrize(("allowed", "turns"), [(0, 1), (1, 2)])
async def test_malformed_calls_are_reported_so_often_and_one_more_is_the_end(
    allowed: int, turns: int
) -> None:
    environment = FakeEnvironment()
    trajectory = await play([BAD + LOOK], environment, parse_errors=allowed)
    assert trajectory.stop_reason is StopReason.MAX_PARSE_ERRORS
    assert (trajectory.counts.turns, trajectory.counts.parse_errors) == (turns, allowed + 1)
    assert len(environment.episodes[0].calls) == turns - 1, "what stands after it is not executed"


@pytest.mark.parametrize(
    ("side", "starts", "ends"),
    [("tail", True, False), ("head", False, True), ("middle", True, True)],
)
async def test_a_long_answer_is_cut_and_states_by_how_much(
    side: str, starts: bool, ends: bool
) -> None:
    environment = FakeEnvironment(lambda *_: ToolResult(ToolOutcome.OK, (LONG,)))
    trajectory = await play(
        [LOOK, "<done>"], environment, observation_tokens=40, observation_side=side
    )
    reported = len(tokenizer().encode(LONG)) - 40
    assert reported > 1000
    shown = text_of(trajectory).partition("<tool_response>\n")[2].partition("\n</tool_resp")[0]
    mark = f"[... {reported:,} tokens left out ...]"
    assert mark in shown
    kept = "".join(shown.split(mark))
    assert 38 <= len(tokenizer().encode(kept)) <= 44
    assert (shown.startswith("word and "), shown.endswith("the end")) == (starts, ends)
    _, transcript = environment.episodes[0].grades[0]
    (whole,) = [
        message["content"]
        for message in map(json.loads, transcript.decode().splitlines())
        if message["role"] == "tool"
    ]
    assert whole == LONG


async def test_an_answer_that_is_cut_is_kept_whole_where_the_policy_read_its_part() -> None:
    environment = FakeEnvironment(lambda *_: ToolResult(ToolOutcome.OK, (LONG,)))
    trajectory = await play([LOOK + LOOK, "<done>"], environment, observation_tokens=40)
    (sequence,) = trajectory.sequences
    prompt, policy = (span.length for span in sequence.spans[:2])
    assert sequence.spans[2].author is Author.ENVIRONMENT
    # Two equal answers are kept once.
    [kept] = sequence.media
    assert (kept.content.decode(), kept.token_offset) == (LONG, prompt + policy)
    assert (kept.sha256, kept.size_bytes) == (hashlib.sha256(LONG.encode()).hexdigest(), len(LONG))
    messages = decode_messages(sequence.messages)
    assert [each.media for each in messages if each.role == "tool"] == [(kept.sha256,)] * 2
    short = await play([LOOK, "<done>"], observation_tokens=400)
    assert not short.sequences[0].media


async def test_no_more_is_kept_of_an_attempt_than_the_learner_takes() -> None:
    """Media without room are named by size and digest; a smaller one that comes later is kept."""
    answers = iter(["x" * 300_000, "y" * 300_000, "z" * 1000, "end"])
    environment = FakeEnvironment(lambda *_: ToolResult(ToolOutcome.OK, (next(answers),)))
    trajectory = await play([LOOK + LOOK + LOOK, "<done>"], environment, observation_tokens=40)
    media = trajectory.sequences[0].media
    assert [one.size_bytes for one in media] == [300_000, 300_000, 1000]
    assert [len(one.content) for one in media] == [300_000, 0, 1000]


async def test_an_answer_within_the_limit_is_shown_as_it_is() -> None:
    answer = "word " * 20
    environment = FakeEnvironment(lambda *_: ToolResult(ToolOutcome.OK, (answer,)))
    tokens = len(tokenizer().encode(answer))
    trajectory = await play([LOOK, "<done>"], environment, observation_tokens=tokens)
    assert f"<tool_response>\n{answer}\n" in text_of(trajectory)


@pytest.mark.parametrize("answer", ["<|im_end|>" * 500, "\U0001f600\u4e2d" * 300, "<done>" * 300])
async def test_no_answer_takes_more_than_its_tokens(answer: str) -> None:
    environment = FakeEnvironment(lambda *_: ToolResult(ToolOutcome.OK, (answer,)))
    trajectory = await play([LOOK, "<done>"], environment, observation_tokens=100)
    around = (
        "\n<|im_start|>user\n<tool_response>\n</tool_response><|im_end|>\n<|im_start|>assistant"
    )
    frame = len(tokenizer().encode(f"{around}\n[... 12,345 tokens left out ...]\n"))
    (length,) = [s.length for s in trajectory.spans if s.author is Author.ENVIRONMENT]
    assert length <= 100 + frame + 5
    assert "\ufffd" not in text_of(trajectory)


async def test_a_cut_turn_continues_without_a_token_between_and_is_read_whole() -> None:
    environment = FakeEnvironment()
    trajectory = await play(
        [LOOK, "It is 1. <done>"], environment, max_generate_length=7, continue_turns=True
    )
    assert trajectory.stop_reason is StopReason.DONE
    assert environment.episodes[0].calls == [("look", '{"at": "it"}')]
    assert f"assistant\n{LOOK}<|im_end|>\n<|im_start|>user\n" in text_of(trajectory)
    assert written(trajectory) == f"{LOOK}<|im_end|>It is 1. <done><|im_end|>"
    assert (trajectory.counts.turns, trajectory.counts.parse_errors) == (2, 0)
    assert sum(turn.generated_tokens for turn in trajectory.turns) == trajectory.policy_tokens
    assert len(trajectory.turns) == 2
    answer, transcript = environment.episodes[0].grades[0]
    assert answer == "It is 1."
    roles = [json.loads(line)["role"] for line in transcript.decode().splitlines()]
    assert roles == ["user", "assistant", "tool", "assistant"]


async def test_a_turn_that_continues_for_ever_ends_with_its_tokens() -> None:
    limits: dict[str, Any] = {"max_generate_length": 7, "continue_turns": True}
    sampled = await play([LONG], None, sampled_tokens=28, **limits)
    assert (sampled.stop_reason, sampled.policy_tokens) == (StopReason.MAX_SAMPLED_TOKENS, 28)
    turn = await play([LONG], None, turn_tokens=17, **limits)
    assert (turn.stop_reason, turn.policy_tokens) == (StopReason.GENERATION_LENGTH, 17)
    whole = await play([LONG], None, turn_tokens=21, **limits)
    assert (whole.stop_reason, whole.policy_tokens) == (StopReason.GENERATION_LENGTH, 21)
    room = await play([LONG], None, max_input_length=100, max_model_len=200, **limits)
    assert room.stop_reason is StopReason.CONTEXT_OVERFLOW
    assert len(room.sequences[0].token_ids) == 200


async def test_every_turn_has_its_own_tokens() -> None:
    tokens = max(len(tokenizer().encode(text)) for text in (LOOK, "It is 1. <done>")) + 1
    trajectory = await play(
        [LOOK, LOOK, "It is 1. <done>"],
        FakeEnvironment(),
        turn_tokens=tokens,
        max_generate_length=7,
        continue_turns=True,
    )
    assert (trajectory.stop_reason, trajectory.counts.turns) == (StopReason.DONE, 3)


async def test_a_turn_is_given_no_more_than_the_room_that_is_left() -> None:
    prompt = len((await play(["<done>"])).sequences[0].token_ids) - 2
    room = prompt + 11
    cut = await play([LOOK], max_input_length=room - 1, max_model_len=room)
    assert cut.stop_reason is StopReason.CONTEXT_OVERFLOW
    assert (len(cut.sequences[0].token_ids), cut.counts.turns) == (room, 1)
    full = await play([LOOK], max_input_length=prompt, max_model_len=prompt)
    assert (full.stop_reason, full.counts.turns) == (StopReason.CONTEXT_OVERFLOW, 0)


def test_the_longest_input_leaves_room_for_a_turn() -> None:
    shared = parse_config(
        SharedConfig, {"name": "x", "policy": {"model": "m", "max_model_len": 64}}, where="test"
    )
    values = {"max_generate_length": 60}
    parse_config(RolloutConfig, {**values, "max_input_length": 63}, where="test").check(shared)
    full = parse_config(RolloutConfig, {**values, "max_input_length": 64}, where="test")
    with pytest.raises(ConfigError, match=r"max_model_len: 64 is less than .* 64 \+ 1"):
        full.check(shared)


def test_every_limit_of_the_config_reaches_the_attempt() -> None:
    table = {
        "turn_tokens": 8,
        "sampled_tokens": 5,
        "thinking_tokens": 4,
        "calls": 6,
        "parse_errors": 0,
        "observation_tokens": 7,
        "observation_side": "head",
        "on_cut": "continue",
    }
    values = {"max_input_length": 1, "max_generate_length": 2, "limits": table}
    policy = PolicyConfig(model="m", max_model_len=9, vision=VisionConfig(max_images=3))
    limits = parse_config(RolloutConfig, values, where="test").attempt_limits(policy)
    assert limits.continue_turns and limits.max_model_len == 9
    assert limits.max_images == 3
    assert {key: getattr(limits, key) for key in table if key != "on_cut"} == {
        key: value for key, value in table.items() if key != "on_cut"
    }

"""The loop: token in, token out, and exactly one ending for everything that can happen."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flotilla_common.domain.attempts import (
    FailureKind,
    Grade,
    NoGradeReason,
    StopReason,
    ToolOutcome,
)
from flotilla_common.domain.token_authors import Author
from flotilla_common.domain.trajectory import Trajectory
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.config import parse_config
from flotilla_rollout.adapters.dialect_choice import choose_dialect
from flotilla_rollout.adapters.fake import FakeEngine
from flotilla_rollout.api.codec import lease_from_pb
from flotilla_rollout.config.rollout import DialectConfig, RolloutConfig
from flotilla_rollout.episodes.attempt_record import make_submission
from flotilla_rollout.episodes.episode import AttemptRunner
from flotilla_rollout.episodes.transcript import PrefixBroken, Transcript
from flotilla_rollout.ports import EngineDead, EngineError, RequestAborted
from flotilla_rollout.types import OUT_OF_TIME, Completion, ToolResult
from tests.support.fake_peers import lease
from tests.support.rollout import (
    OK,
    POLICY,
    TOOL,
    FakeEnvironment,
    FakeEpisode,
    attempt,
    dialect,
    engine,
    limits,
    runner,
    tokenizer,
    turns,
)

STRICT = replace(TOOL, parameters={**TOOL.parameters, "required": ["at"]})
LOOK = '<tool_call>{"name": "look", "arguments": {"at": "it"}}</tool_call>'
OTHER = '<tool_call>{"name": "look", "arguments": {"at": "user"}}</tool_call>'


def text(trajectory: Trajectory) -> str:
    return tokenizer().decode(trajectory.sequences[0].token_ids.tolist())


async def test_an_episode_that_is_done_is_graded_and_closed() -> None:
    environment = FakeEnvironment()
    trajectory = await runner(environment, [LOOK, "It is 1. <done>"]).run_attempt(attempt())
    assert trajectory.stop_reason is StopReason.DONE
    assert trajectory.is_graded
    (episode,) = environment.episodes
    assert episode.calls == [("look", '{"at": "it"}')]
    answer, transcript = episode.grades[0]
    assert answer == "It is 1."
    roles = [json.loads(line)["role"] for line in transcript.decode().splitlines()]
    assert roles == ["user", "assistant", "tool", "assistant"]
    assert episode.closed


class UnreadEpisode(FakeEpisode):
    """One whose verifier reads no transcript."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.info = replace(self.info, transcript_bytes=0)


async def test_a_transcript_that_the_verifier_does_not_read_is_not_sent() -> None:
    environment = FakeEnvironment(episode=UnreadEpisode)
    await runner(environment, [LOOK, "It is 1. <done>"]).run_attempt(attempt())
    assert environment.episodes[0].grades == [("It is 1.", b"")]


async def test_tokens_are_those_that_were_sampled_between_template_text() -> None:
    trajectory = await runner(FakeEnvironment(), [LOOK, "<done>"]).run_attempt(attempt())
    assert text(trajectory) == (
        "<|im_start|>system\nTools:\nlook(at)<|im_end|>\n<|im_start|>user\nFind it.<|im_end|>\n"
        f"<|im_start|>assistant\n{LOOK}<|im_end|>\n<|im_start|>user\n<tool_response>\n"
        '{"found": 1}\n</tool_response><|im_end|>\n<|im_start|>assistant\n<done><|im_end|>'
    )
    authors = [span.author for span in trajectory.spans]
    assert authors == [Author.PROMPT, Author.POLICY, Author.ENVIRONMENT, Author.POLICY]
    assert sum(span.length for span in trajectory.spans) == len(trajectory.sequences[0].token_ids)
    written = [span for span in trajectory.spans if span.author is Author.POLICY]
    assert sum(span.length for span in written) == len(trajectory.sequences[0].logprobs)
    assert {(span.policy, span.temperature) for span in written} == {(POLICY, 1.0)}


async def test_several_calls_of_a_turn_are_executed_in_order() -> None:
    environment = FakeEnvironment()
    trajectory = await runner(environment, [LOOK + OTHER, "<done>"]).run_attempt(attempt())
    assert [json.loads(a)["at"] for _, a in environment.episodes[0].calls] == ["it", "user"]
    assert text(trajectory).count("<tool_response>") == 2


async def test_what_the_prompt_promises_of_several_calls_is_what_happens() -> None:
    environment = FakeEnvironment()
    full = runner(environment, [LOOK + OTHER, "<done>"], name="full")
    trajectory = await full.run_attempt(attempt())
    assert "Several calls in one response are executed in order." in text(trajectory)
    assert len(environment.episodes[0].calls) == 2
    assert text(trajectory).count("Tool result:") == 2


def test_no_key_ends_a_turn_before_the_policy_does() -> None:
    """A stop at `</tool_call>` cut thinking that names it, and let no second call be made."""
    values = {"max_input_length": 1, "max_generate_length": 1}
    with pytest.raises(ConfigError, match="stop_at_tool_call"):
        parse_config(RolloutConfig, {**values, "stop_at_tool_call": True}, where="test")


async def test_calls_beside_done_are_executed_before_the_end() -> None:
    environment = FakeEnvironment()
    trajectory = await runner(environment, [LOOK + "<done>"]).run_attempt(attempt())
    assert trajectory.stop_reason is StopReason.DONE
    assert len(environment.episodes[0].calls) == 1


async def test_malformed_calls_and_tool_errors_are_shown_and_counted() -> None:
    environment = FakeEnvironment(lambda *_: ToolResult(ToolOutcome.TOOL_ERROR, ("not found",)))
    texts = ["<tool_call>{oops</tool_call>" + LOOK, LOOK, "<done>"]
    trajectory = await runner(environment, texts).run_attempt(attempt())
    counts = trajectory.counts
    assert (counts.turns, counts.tool_calls, counts.parse_errors, counts.repeats) == (3, 2, 1, 1)
    assert counts.tool_errors == {"tool_error": 2}
    assert '{"error": "not found"}' in text(trajectory)
    assert "not valid JSON" in text(trajectory)
    assert (counts.tools, counts.malformed_turns) == (len(environment.episodes[0].info.tools), 1)
    ((message, count),) = counts.parse_messages.items()
    assert "not valid JSON" in message and count == 1


async def test_tools_that_there_are_not_are_counted_by_name_in_bounds() -> None:
    environment = FakeEnvironment(lambda *_: ToolResult(ToolOutcome.BAD_TOOL, ("unknown tool",)))
    names = ["a", "a", *"bcdefghijk"]
    calls = [f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>' for name in names]
    texts = [*calls, "<done>"]
    playing = runner(environment, texts, max_turns=20, max_input_length=9_999)
    trajectory = await playing.run_attempt(attempt())
    assert trajectory.counts.tool_errors == {"bad_tool": len(names)}
    assert trajectory.counts.unknown_tools == {"a": 2, **dict.fromkeys("bcdefgh", 1)}


async def test_the_policy_reads_that_its_arguments_stand_under_another_key() -> None:
    environment = FakeEnvironment()
    llama = '<tool_call>{"name": "look", "parameters": {"at": "it"}}</tool_call>'
    trajectory = await runner(environment, [llama, "<done>"]).run_attempt(attempt())
    assert environment.episodes[0].calls == []
    assert trajectory.counts.parse_errors == 1
    assert 'needs its arguments under \\"arguments\\", found \\"parameters\\"' in text(trajectory)


async def test_a_call_without_arguments_is_executed_when_its_tool_requires_none() -> None:
    bare = '<tool_call>{"name": "look"}</tool_call>'
    free, strict = FakeEnvironment(), FakeEnvironment(tools=(STRICT,))
    await runner(free, [bare, "<done>"]).run_attempt(attempt())
    assert free.episodes[0].calls == [("look", "{}")]
    trajectory = await runner(strict, [bare, "<done>"]).run_attempt(attempt())
    assert strict.episodes[0].calls == []
    assert 'tool call of \\"look\\" needs \\"arguments\\" with \\"at\\"' in text(trajectory)


async def test_a_turn_without_a_call_is_the_answer() -> None:
    environment = FakeEnvironment()
    trajectory = await runner(environment, ["Hello.", LOOK]).run_attempt(attempt())
    assert trajectory.stop_reason is StopReason.DONE
    assert trajectory.counts.turns == 1
    assert environment.episodes[0].grades[0][0] == "Hello."


async def test_with_finish_done_a_turn_without_a_call_is_reported() -> None:
    chosen = choose_dialect("", tokenizer(), DialectConfig(name="template", finish="done"))
    fake = engine(turns("Hello.", "It is 4.<done>"))
    environment = FakeEnvironment()
    played = AttemptRunner(fake, environment, tokenizer(), chosen, limits())
    trajectory = await played.run_attempt(attempt())
    assert '{"error": "no tool call found"}' in text(trajectory)
    assert (trajectory.stop_reason, trajectory.counts.turns) == (StopReason.DONE, 2)
    assert environment.episodes[0].grades[0][0] == "It is 4."


async def test_a_policy_that_knows_how_to_end_is_notified_of_a_turn_without_a_call() -> None:
    full = await runner(FakeEnvironment(), ["Hello.", "<done>"], name="full").run_attempt(attempt())
    assert "No tool call found. Use <tool_call>" in text(full)


async def test_the_last_turn_ends_with_the_policy_when_turns_run_out() -> None:
    environment = FakeEnvironment()
    trajectory = await runner(environment, [LOOK], max_turns=2).run_attempt(attempt())
    assert trajectory.stop_reason is StopReason.MAX_TURNS
    assert len(environment.episodes[0].calls) == 2
    assert trajectory.spans[-1].author is Author.POLICY
    assert trajectory.is_graded


async def test_the_length_is_checked_before_each_turn() -> None:
    short = await runner(FakeEnvironment(), [LOOK], max_input_length=10).run_attempt(attempt())
    assert short.stop_reason is StopReason.CONTEXT_OVERFLOW
    assert short.counts.turns == 0
    assert short.is_graded
    later = await runner(FakeEnvironment(), [LOOK], max_input_length=60).run_attempt(attempt())
    assert later.stop_reason is StopReason.CONTEXT_OVERFLOW
    assert later.counts.turns == 1


@pytest.mark.parametrize("most", [None, 5_000])
async def test_an_observation_that_reaches_the_window_is_cut_there_and_graded(
    most: int | None,
) -> None:
    long = ToolResult(ToolOutcome.OK, ("found it " * 2_000,))
    environment, window = FakeEnvironment(lambda *_: long), 512
    lengths: dict[str, Any] = {"max_model_len": window, "max_input_length": 400}
    played = runner(environment, [LOOK], observation_tokens=most, **lengths)
    trajectory = await played.run_attempt(attempt())
    assert (trajectory.stop_reason, trajectory.is_graded) == (StopReason.CONTEXT_OVERFLOW, True)
    assert (trajectory.counts.turns, trajectory.spans[-1].author) == (1, Author.ENVIRONMENT)
    assert len(trajectory.sequences[0].token_ids) == window
    assert sum(span.length for span in trajectory.spans) == window
    assert long.text.encode() in environment.episodes[0].grades[0][1], "the verifier reads all"


async def test_a_prompt_that_reaches_the_window_is_cut_there_and_graded() -> None:
    short = runner(FakeEnvironment(), [LOOK], max_model_len=20, max_input_length=10)
    trajectory = await short.run_attempt(attempt())
    assert (trajectory.stop_reason, trajectory.is_graded) == (StopReason.CONTEXT_OVERFLOW, True)
    assert len(trajectory.sequences[0].token_ids) == 20
    assert [span.author for span in trajectory.spans] == [Author.PROMPT]


async def test_a_turn_cut_without_a_complete_call_ends_the_episode() -> None:
    environment = FakeEnvironment()
    trajectory = await runner(environment, [LOOK], max_generate_length=5).run_attempt(attempt())
    assert trajectory.stop_reason is StopReason.GENERATION_LENGTH
    assert environment.episodes[0].grades
    assert len(trajectory.sequences[0].logprobs) == 5


async def test_a_turn_cut_behind_a_complete_call_continues() -> None:
    length = len(tokenizer().encode(LOOK))
    trajectory = await runner(
        FakeEnvironment(), [LOOK + " and more", "<done>"], max_generate_length=length
    ).run_attempt(attempt())
    assert trajectory.stop_reason is StopReason.DONE
    assert f"{LOOK}<|im_end|>\n<|im_start|>user" in text(trajectory)


async def test_time_that_runs_out_in_a_turn_is_graded() -> None:
    environment = FakeEnvironment()
    slow = runner(environment, [LOOK], seconds=0.1, attempt_timeout_s=0.25)
    trajectory = await slow.run_attempt(attempt())
    assert trajectory.stop_reason is StopReason.TIMEOUT
    assert trajectory.is_graded
    assert environment.episodes[0].closed


async def test_the_turn_that_time_cuts_is_kept_as_far_as_it_was_sampled() -> None:
    environment = FakeEnvironment()
    long = LOOK + "look at it " * 40
    slow = runner(environment, [LOOK, long], seconds=0.5, attempt_timeout_s=0.9)
    trajectory = await slow.run_attempt(attempt())
    assert (trajectory.stop_reason, trajectory.is_graded) == (StopReason.TIMEOUT, True)
    authors = [span.author for span in trajectory.spans]
    assert authors == [Author.PROMPT, Author.POLICY, Author.ENVIRONMENT, Author.POLICY]
    cut = trajectory.spans[-1]
    whole = len(tokenizer().encode(long))
    assert (cut.policy, cut.temperature) == (POLICY, 1.0)
    assert len(tokenizer().encode(LOOK)) < cut.length < whole
    assert len(trajectory.sequences[0].logprobs) == trajectory.spans[1].length + cut.length
    assert (trajectory.counts.turns, len(trajectory.turns)) == (2, 2)
    (episode,) = environment.episodes
    assert len(episode.calls) == 1, "there is no time for the call that the cut turn made"
    assert b"look at it" in episode.grades[0][1]


@pytest.mark.parametrize("waited_s", [0.001, 5.0])
async def test_time_that_runs_out_after_a_wait_for_the_service_is_no_evidence(
    waited_s: float,
) -> None:
    class Waits(FakeEngine):
        async def generate(self, *given: Any, **named: Any) -> Completion:
            return replace(await super().generate(*given, **named), waited_s=waited_s)

    environment = FakeEnvironment()
    fake = Waits(tokenizer(), dialect().stop_ids[0], turns(LOOK), seconds=0.3, policy=POLICY)
    bounds = limits(attempt_timeout_s=0.9)
    played = AttemptRunner(fake, environment, tokenizer(), dialect(), bounds)
    trajectory = await played.run_attempt(attempt())
    assert environment.episodes[0].closed
    if waited_s > 1:
        assert (trajectory.failure, trajectory.reward) == (FailureKind.ABORTED, None)
        assert "the service that samples answered nobody for" in trajectory.detail
        assert not environment.episodes[0].grades
    else:
        assert (trajectory.stop_reason, trajectory.is_graded) == (StopReason.TIMEOUT, True)


async def test_a_turn_that_time_cuts_before_its_first_token_adds_nothing() -> None:
    class HasTimeForOne(FakeEngine):
        async def generate(self, *given: Any, **named: Any) -> Completion:
            if self.called:
                return OUT_OF_TIME
            self.called = True
            return await super().generate(*given, **named)

        called = False

    short = HasTimeForOne(tokenizer(), dialect().stop_ids[0], turns(LOOK), policy=POLICY)
    run = AttemptRunner(short, FakeEnvironment(), tokenizer(), dialect(), limits())
    trajectory = await run.run_attempt(attempt())
    assert trajectory.stop_reason is StopReason.TIMEOUT
    assert [span.author for span in trajectory.spans][-1] is Author.ENVIRONMENT
    assert (trajectory.counts.turns, len(trajectory.turns)) == (1, 1)


async def test_an_engine_that_does_not_keep_time_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flotilla_rollout.episodes.turn_sampling.ENGINE_GRACE_S", 0.05)

    class Hangs(FakeEngine):
        async def generate(self, *_: Any, **__: Any) -> Completion:
            await asyncio.Event().wait()
            raise AssertionError

    hangs = Hangs(tokenizer(), dialect().stop_ids[0], policy=POLICY)
    run = AttemptRunner(
        hangs, FakeEnvironment(), tokenizer(), dialect(), limits(attempt_timeout_s=0.1)
    )
    trajectory = await asyncio.wait_for(run.run_attempt(attempt()), 2)
    assert trajectory.failure is FailureKind.ABORTED


async def test_time_that_runs_out_in_a_call_ends_it() -> None:
    class SlowEpisode(FakeEpisode):
        async def call_tool(self, name: str, arguments_json: str, timeout_s: float) -> ToolResult:
            await asyncio.sleep(9)
            raise AssertionError

    environment = FakeEnvironment(episode=SlowEpisode)
    run = runner(environment, [LOOK], attempt_timeout_s=0.2)
    trajectory = await asyncio.wait_for(run.run_attempt(attempt()), 2)
    assert trajectory.stop_reason is StopReason.TIMEOUT
    assert trajectory.spans[-1].author is Author.POLICY


async def test_an_attempt_in_which_the_policy_wrote_nothing_does_not_count() -> None:
    environment = FakeEnvironment()
    stuck = runner(environment, [LOOK], seconds=9.0, attempt_timeout_s=0.05)
    trajectory = await stuck.run_attempt(attempt())
    assert (trajectory.failure, trajectory.reward) == (FailureKind.ABORTED, None)
    assert environment.episodes[0].closed


async def test_an_attempt_that_its_group_cuts_short_does_not_count() -> None:
    late = runner(FakeEnvironment(), [LOOK], seconds=0.05, attempt_timeout_s=5.0)
    trajectory = await late.run_attempt(attempt(budget_s=0.7))
    assert (trajectory.failure, trajectory.reward) == (FailureKind.ABORTED, None)
    assert "left of 5 s" in trajectory.detail


async def test_a_slow_opening_takes_nothing_from_the_policys_time() -> None:
    environment = FakeEnvironment(open_seconds=0.3)
    trajectory = await runner(environment, ["<done>"], attempt_timeout_s=0.2).run_attempt(attempt())
    assert trajectory.stop_reason is StopReason.DONE


async def test_the_environment_can_end_the_episode() -> None:
    environment = FakeEnvironment(lambda *_: ToolResult(ToolOutcome.OK, ("x",), done=True))
    trajectory = await runner(environment, [LOOK + OTHER]).run_attempt(attempt())
    assert trajectory.stop_reason is StopReason.DONE
    assert trajectory.counts.tool_calls == 1


async def test_rewards_of_the_steps_reach_the_trajectory_summed_by_turn() -> None:
    given = iter([0.25, 0.5, None, -1.0])
    environment = FakeEnvironment(lambda *_: ToolResult(ToolOutcome.OK, ("x",), reward=next(given)))
    texts = [LOOK + OTHER, LOOK, LOOK, "<done>"]
    trajectory = await runner(environment, texts).run_attempt(attempt())
    assert [turn.reward for turn in trajectory.turns] == [0.75, None, -1.0, None]
    assert trajectory.reward == 1.0, "the reward of an attempt is its grade"


@pytest.mark.parametrize("outcome", [ToolOutcome.SESSION_LOST, ToolOutcome.OUTCOME_UNKNOWN])
async def test_a_lost_session_is_a_failure_and_is_closed(outcome: ToolOutcome) -> None:
    environment = FakeEnvironment(lambda *_: ToolResult(outcome, ("gone",)))
    trajectory = await runner(environment, [LOOK]).run_attempt(attempt())
    assert trajectory.failure is FailureKind.ENV_LOST
    assert trajectory.reward is None and not trajectory.no_grade
    assert trajectory.sequences == ()
    assert environment.episodes[0].closed


async def test_an_environment_that_does_not_open_is_a_failure() -> None:
    trajectory = await runner(FakeEnvironment(lost="no room"), [LOOK]).run_attempt(attempt())
    assert trajectory.failure is FailureKind.ENV_LOST
    assert trajectory.detail == "no room"


async def test_what_a_verifier_returned_by_name_is_in_the_trajectory() -> None:
    environment = FakeEnvironment(grade=Grade(1.0, named_rewards={"style": 0.5}))
    trajectory = await runner(environment, ["<done>"]).run_attempt(attempt())
    assert (trajectory.reward, trajectory.named_rewards) == (1.0, {"style": 0.5})


async def test_an_attempt_to_be_judged_is_submitted_with_all_its_tokens() -> None:
    environment = FakeEnvironment(grade=Grade(to_be_judged=True))
    trajectory = await runner(environment, ["<done>"]).run_attempt(attempt())
    assert trajectory.awaits_verdict
    assert (trajectory.failure, trajectory.no_grade) == (None, "")
    sent = make_submission(trajectory, lease_from_pb(lease()), "w")
    assert sent.policy_tokens == trajectory.policy_tokens > 0


async def test_a_grade_that_is_not_known_is_no_reward() -> None:
    environment = FakeEnvironment(grade=Grade(reason=NoGradeReason.EXECUTION_FAILED, detail="boom"))
    trajectory = await runner(environment, ["<done>"]).run_attempt(attempt())
    assert not trajectory.is_graded
    assert trajectory.stop_reason is StopReason.DONE
    assert trajectory.detail == "boom"


@pytest.mark.parametrize(
    ("error", "kind"),
    [(EngineError("bad"), FailureKind.ENGINE_ERROR), (RequestAborted("a"), FailureKind.ABORTED)],
)
async def test_engine_errors_fail_the_attempt_alone(error: Exception, kind: FailureKind) -> None:
    def write(shown: str) -> str:
        if "found" in shown:
            raise error
        return LOOK

    environment = FakeEnvironment()
    broken = AttemptRunner(engine(write), environment, tokenizer(), dialect(), limits())
    fine = runner(environment, [LOOK, "<done>"])
    failed, done = await asyncio.gather(
        broken.run_attempt(attempt(0)), fine.run_attempt(attempt(1))
    )
    assert failed.failure is kind
    assert done.is_graded
    assert all(episode.closed for episode in environment.episodes)


async def test_a_dead_engine_is_no_fault_of_the_attempt() -> None:
    fake = engine(turns(LOOK))
    fake.death.set_result("killed")
    environment = FakeEnvironment()
    with pytest.raises(EngineDead, match="killed"):
        await AttemptRunner(fake, environment, tokenizer(), dialect(), limits()).run_attempt(
            attempt()
        )
    assert environment.episodes[0].closed


async def test_cancelling_closes_the_episode() -> None:
    environment = FakeEnvironment()
    task = asyncio.create_task(runner(environment, [LOOK], seconds=9.0).run_attempt(attempt()))
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert environment.episodes[0].closed


async def test_the_observer_sees_the_turns() -> None:
    seen: list[tuple[str, str]] = []

    def observe(*event: Any) -> None:
        seen.append(event)

    await runner(FakeEnvironment(), [LOOK, "<done>"]).run_attempt(attempt(), observe)
    assert [kind for kind, _ in seen] == ["prompt", "completion", "observation", "completion"]
    assert seen[2][1] == OK.parts[0]


def test_a_changed_prefix_is_refused() -> None:
    transcript = Transcript([1, 2, 3])
    completion_ids = np.array([4, 5], np.int32)
    from flotilla_rollout.types import Completion, PolicySpan

    spans = (PolicySpan(POLICY, 2),)
    transcript.add_completion(
        Completion(completion_ids, np.zeros(2, np.float32), spans, cut=False), 1.0
    )
    transcript.token_ids[1] = 9
    with pytest.raises(PrefixBroken):
        transcript.for_engine()

"""One attempt at one task, from the open episode to the reward."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from flotilla_common.domain.attempts import (
    AttemptKey,
    FailureKind,
    Grade,
    NoGradeReason,
    StopReason,
)
from flotilla_common.domain.messages import MessageText
from flotilla_common.domain.trajectory import Trajectory, TurnTiming
from flotilla_common.domain.transcripts import encode_transcript
from flotilla_common.images.picture import ShownPicture
from flotilla_common.images.placeholders import collapse_pictures
from flotilla_common.images.vision_family import VisionFamily
from flotilla_common.telemetry.watchdog import Watchdog
from flotilla_common.text.parsing import run_aside
from flotilla_rollout.dialects.turns import NO_CALL, Reply, Turn
from flotilla_rollout.episodes.attempt_limits import AttemptLimits, TurnBudget
from flotilla_rollout.episodes.attempt_record import (
    AttemptState,
    make_failed_trajectory,
    make_finished_trajectory,
)
from flotilla_rollout.episodes.call_execution import TurnOutcome, execute_calls
from flotilla_rollout.episodes.conversation import Conversation, MessageReader, place_text
from flotilla_rollout.episodes.observation_cut import ObservationCutter
from flotilla_rollout.episodes.prompt_cache import PromptCache
from flotilla_rollout.episodes.shown_pictures import move_text, place_pictures
from flotilla_rollout.episodes.transcript import Transcript
from flotilla_rollout.episodes.turn_sampling import OutOfTime, TurnSampler
from flotilla_rollout.ports import (
    Dialect,
    Engine,
    EngineDead,
    EngineError,
    Environment,
    EnvironmentLost,
    Episode,
    RequestAborted,
)
from flotilla_rollout.tokenizer_port import TemplateError, Tokenizer
from flotilla_rollout.types import Completion, OpenRequest, Sampling

# Called with `prompt`, `completion` or `observation` and a text, as they happen.
Observer = Callable[[str, str], None]

# Longer text is tokenised and parsed in a thread: a megabyte would take a second.
ASIDE_CHARACTERS = 2**13
# An attempt that had less than this share of its time, because its group or episode ended sooner,
# is no evidence about the policy.
MIN_TIME_SHARE = 0.5
# Nor is one that had to wait for the engine's service for more than this share.
MAX_WAIT_SHARE = 0.05


class CutShort(Exception):
    """Time ran out, but not because of the policy: such an attempt must not count."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt to run. The gateway admits `opening` attempts together."""

    key: AttemptKey
    task_json: str
    sampling: Sampling
    opening: int
    budget_s: float


@dataclass(frozen=True, slots=True)
class _Shown:
    """An observation: its replies as the policy reads them, all tokens, the pictures in these, and
    the texts of the replies."""

    replies: Sequence[Reply]
    ids: NDArray[np.int32]
    pictures: Sequence[ShownPicture]
    texts: Sequence[MessageText]


class AttemptRunner:
    """Runner of any number of concurrent attempts; they share only engine and environment."""

    def __init__(
        self,
        engine: Engine,
        environment: Environment,
        tokenizer: Tokenizer,
        dialect: Dialect,
        limits: AttemptLimits,
        watchdog: Watchdog | None = None,
        family: VisionFamily | None = None,
    ) -> None:
        """Build a runner; the model of a `family` is shown pictures."""
        self._sampler = TurnSampler(engine, dialect, limits, watchdog or Watchdog())
        self._environment = environment
        self._tokenizer = tokenizer
        self._dialect = dialect
        self._limits = limits
        self._messages = MessageReader(tokenizer, dialect)
        self._prompts = PromptCache(dialect, self._messages, family)
        self._cutter = ObservationCutter(tokenizer, limits)
        self._family = family

    async def run_attempt(self, attempt: Attempt, observe: Observer | None = None) -> Trajectory:
        """Play the attempt to its end; an error becomes the trajectory's failure kind.

        An attempt with a stop reason is graded. A failed one is only closed: it is retried, and its
        grade would not be used. Raises EngineDead, which is not the attempt's fault and does not
        use up a try.
        """
        state = AttemptState(time.monotonic())
        request = OpenRequest(attempt.key, attempt.task_json, attempt.opening, attempt.budget_s)
        try:
            async with self._environment.open_episode(request) as episode:
                state.info = episode.info
                state.counts.open_s = time.monotonic() - state.started
                stop = await self._play_episode(attempt, episode, state, observe)
                grade = await self._grade_attempt(episode, state)
        except EnvironmentLost as error:
            kind = FailureKind.NO_GRADE if error.no_grade else FailureKind.ENV_LOST
            trajectory = make_failed_trajectory(attempt.key, state, kind, str(error))
            return replace(trajectory, no_grade=error.no_grade or "")
        except (RequestAborted, CutShort) as error:
            return make_failed_trajectory(attempt.key, state, FailureKind.ABORTED, str(error))
        except TemplateError as error:
            return make_failed_trajectory(
                attempt.key, state, FailureKind.TEMPLATE_ERROR, str(error)
            )
        except EngineDead:
            raise
        except EngineError as error:
            return make_failed_trajectory(attempt.key, state, FailureKind.ENGINE_ERROR, str(error))
        return make_finished_trajectory(attempt.key, state, stop, grade)

    async def _play_episode(
        self, attempt: Attempt, episode: Episode, state: AttemptState, observe: Observer | None
    ) -> StopReason:
        """Play all turns, within the budget that is left after reserving time for grading.

        The time to open the environment does not count against the policy, nor does a wait for the
        engine's service. Raises CutShort."""
        whole = self._limits.attempt_timeout_s
        left = attempt.budget_s - (time.monotonic() - state.started)
        allowed = min(whole, min(left, episode.info.deadline_s) - self._limits.grade_timeout_s)
        state.ends = time.monotonic() + allowed
        try:
            stop = await self._play_turns(attempt, episode, state, observe)
        except OutOfTime:
            stop = StopReason.TIMEOUT
        if stop is not StopReason.TIMEOUT:
            return stop
        if state.waited_s > MAX_WAIT_SHARE * whole:
            raise CutShort(f"the service that samples answered nobody for {state.waited_s:.0f} s")
        if state.counts.turns and allowed >= MIN_TIME_SHARE * whole:
            return stop
        raise CutShort(
            f"{state.counts.turns} turns in the {max(allowed, 0.0):.1f} s that were left of "
            f"{whole:.0f} s; opening took {state.counts.open_s:.1f} s"
        )

    async def _play_turns(
        self, attempt: Attempt, episode: Episode, state: AttemptState, observe: Observer | None
    ) -> StopReason:
        await self._show_prompt(episode, state, observe)
        report = observe or _ignore_event
        while True:
            transcript = state.transcript
            stop = self._limits.refuses_turn(len(transcript), transcript.sampled)
            if transcript.is_cut:
                stop = StopReason.CONTEXT_OVERFLOW
            stop = stop or await self._play_turn(attempt.sampling, episode, state, report)
            if stop is not None:
                return stop

    async def _show_prompt(
        self, episode: Episode, state: AttemptState, observe: Observer | None
    ) -> None:
        prompt = await self._prompts.get_prompt(episode.info)
        seen = zip(episode.info.facts.pictures, prompt.places, strict=True)
        state.info = replace(episode.info, tools=prompt.tools)
        state.transcript = Transcript(
            prompt.token_ids,
            self._limits.max_model_len,
            [ShownPicture(picture, place) for picture, place in seen],
            family=self._family,
            most_pictures=self._limits.max_images,
        )
        state.digests = {
            "tool_schema_digest": prompt.tool_schema_digest,
            "prompt_digest": prompt.prompt_digest,
        }
        state.conversation = Conversation(list(prompt.messages))
        state.tools = prompt.tools_json
        state.counts.tools = len(prompt.tools)
        state.messages.append({"role": "user", "content": state.info.facts.task})
        if observe is not None:
            ids = prompt.token_ids
            if self._family is not None:
                ids = collapse_pictures(ids, prompt.places, self._family)
            observe("prompt", await asyncio.to_thread(self._tokenizer.decode, ids.tolist()))

    async def _play_turn(
        self, sampling: Sampling, episode: Episode, state: AttemptState, observe: Observer
    ) -> StopReason | None:
        """Play one policy turn and its tool calls; return None if there is a next turn."""
        began = time.monotonic()
        shown = len(state.transcript)
        completion, budget = await self._sampler.sample_turn(state, sampling)
        if completion.timed_out and not len(completion.token_ids):
            return StopReason.TIMEOUT
        state.counts.turns += 1
        sampled = time.monotonic()
        turn = await self._read_turn(completion, shown, episode, state, observe)
        # There is no time left for the calls of a cut turn.
        calls = () if state.is_single_turn or completion.timed_out else turn.items
        async with self._sampler.within_time(state):
            outcome = await execute_calls(calls, episode, state, self._limits)
        state.turns.append(
            TurnTiming(
                sampled - began,
                time.monotonic() - sampled,
                shown,
                len(completion.token_ids),
                outcome.reward,
                turn.thinking_tokens,
            )
        )
        stop = self._stop_reason(turn, completion, budget, outcome, state)
        if stop is not None:
            # The policy does not read them any more.
            for reply in outcome.replies:
                self._add_reply(
                    state, reply, self._dialect.reply_text(reply), state.conversation.end
                )
            return stop
        await self._show_replies(outcome.replies, completion, state, observe)
        return None

    async def _show_replies(
        self,
        replies: Sequence[Reply],
        completion: Completion,
        state: AttemptState,
        observe: Observer,
    ) -> None:
        """Append the text that the policy reads after its latest turn."""
        replies = replies or [Reply(None, NO_CALL, ())]
        tools = state.info.tools if state.info else ()
        written = completion.token_ids.tolist()
        before = state.transcript.token_ids[: len(state.transcript) - len(written)]
        texts = [self._dialect.reply_text(reply) for reply in replies]

        def show() -> _Shown:
            cut = [self._cutter.cut_reply(reply) for reply in replies]
            rendered = self._dialect.bridge_ids(before, written, cut, tools)
            found = self._messages.find_replies(rendered, before, written, cut, tools)
            pictures = [picture for reply in cut for picture in reply.pictures]
            ids, placed, starts = place_pictures(rendered, pictures, self._family)
            return _Shown(cut, ids, placed, [move_text(text, starts) for text in found])

        seen = await run_aside(sum(map(len, texts)), show, ASIDE_CHARACTERS)
        start = len(state.transcript)
        state.transcript.add_observation(seen.ids, seen.pictures)
        for text, reply, shown, content in zip(
            texts, replies, seen.replies, seen.texts, strict=True
        ):
            whole = (state.transcript.keep_text(text, start),) if shown is not reply else ()
            pictures = [picture.sha256 for picture in reply.pictures]
            self._add_reply(state, reply, content, start, (*whole, *pictures))
        # The verifier reads the tools' whole answers, even if the policy saw only a part.
        state.messages += [{"role": "tool", "content": text} for text in texts]
        for reply in seen.replies:
            observe("observation", self._dialect.reply_text(reply))

    def _add_reply(
        self,
        state: AttemptState,
        reply: Reply,
        found: MessageText,
        start: int,
        shown: Sequence[str] = (),
    ) -> None:
        """Add a reply to the conversation; `found` is its text in the tokens from `start` on, and
        `shown` are the hashes of its pictures and of what it is a part of."""
        content, media = place_text(found, start, state.transcript.keep_text)
        as_user = not self._dialect.template_shows_tools
        state.conversation.add_reply(reply, content, (*shown, *media), as_user=as_user)

    async def _read_turn(
        self,
        completion: Completion,
        shown: int,
        episode: Episode,
        state: AttemptState,
        observe: Observer,
    ) -> Turn:
        ids, before = completion.token_ids.tolist(), state.transcript.token_ids[:shown]
        ended = bool(ids) and ids[-1] in self._dialect.stop_ids
        text = self._tokenizer.decode(ids[:-1] if ended else ids)
        state.messages.append({"role": "assistant", "content": text})
        observe("completion", text)
        tools = state.info.tools if state.info else ()

        def read() -> Turn:
            turn = self._dialect.parse_turn(before, ids, tools)
            message = self._messages.read_turn(ids, turn, shown, state.transcript.keep_text)
            state.conversation.add_turn(message, turn.items)
            return turn

        turn = await run_aside(len(text), read, ASIDE_CHARACTERS)
        if turn.done or state.is_single_turn:
            state.answer = turn.answer
        return turn

    def _stop_reason(
        self,
        turn: Turn,
        completion: Completion,
        budget: TurnBudget,
        outcome: TurnOutcome,
        state: AttemptState,
    ) -> StopReason | None:
        if turn.done or outcome.stop is not None:
            return outcome.stop or StopReason.DONE
        if completion.timed_out:
            return StopReason.TIMEOUT
        if completion.cut and (state.is_single_turn or not turn.has_call):
            return budget.reason
        if state.is_single_turn:
            return StopReason.DONE
        return self._limits.ends_attempt(state.counts, state.transcript.sampled)

    async def _grade_attempt(self, episode: Episode, state: AttemptState) -> Grade:
        """Return the grade of an attempt that ended on its own or by a limit."""
        began = time.monotonic()
        transcript = await _encode_messages(state.messages, episode.info.transcript_bytes)
        try:
            return await episode.request_grade(
                state.answer, transcript, self._limits.grade_timeout_s
            )
        except EnvironmentLost as error:
            return Grade(reason=NoGradeReason.INSTANCE_LOST, detail=str(error))
        finally:
            state.counts.grade_s = time.monotonic() - began


async def _encode_messages(messages: Sequence[Mapping[str, str]], most_bytes: int) -> bytes:
    """Encode the transcript, off the event loop if it is long."""
    size = sum(len(message["content"]) for message in messages)
    return await run_aside(size, lambda: encode_transcript(messages, most_bytes), ASIDE_CHARACTERS)


def _ignore_event(kind: str, text: str) -> None:
    """Default observer, which drops all events."""

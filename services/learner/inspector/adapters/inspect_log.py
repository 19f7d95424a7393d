"""Episodes as a log of Inspect AI for its viewer: a sample for each attempt, with its messages, an
event for each turn, call and score, and the trainer's values.

A log is bounded: long texts, attempts with very many turns and logs with very much text are cut,
with a note at the place."""

import base64
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from inspect_ai.event import Event, InfoEvent, ModelEvent, ScoreEvent, ToolEvent
from inspect_ai.log import (
    EvalConfig,
    EvalDataset,
    EvalError,
    EvalLog,
    EvalMetric,
    EvalResults,
    EvalSample,
    EvalScore,
    EvalSpec,
    EvalStats,
    write_eval_log,
)
from inspect_ai.model import (
    ChatCompletionChoice,
    ChatMessage,
    ChatMessageAssistant,
    ChatMessageSystem,
    ChatMessageTool,
    ChatMessageUser,
    Content,
    ContentImage,
    ContentReasoning,
    ContentText,
    GenerateConfig,
    Logprob,
    Logprobs,
    ModelOutput,
    ModelUsage,
)
from inspect_ai.scorer import Score
from inspect_ai.tool import ToolCall
from numpy.typing import NDArray

from services.common.printable_text import make_visible
from services.learner.dumps.assistant_text import EpisodeCall
from services.learner.dumps.episode_text import EpisodeMessage, EpisodeTurn, SequenceText
from services.learner.inspector.pages.book import image_type
from services.learner.inspector.pages.visible_text import cut
from services.learner.inspector.queries.episodes import Episode
from services.learner.inspector.queries.token_tracks import TRAINED, TokenTrack
from services.learner.inspector.queries.transcript_attempts import sample_place

# Per attempt: most turns with events, tokens with logprobs, images, and bytes of one image.
_MOST_TURNS, _MOST_LOGPROBS, _MOST_IMAGES, _MOST_IMAGE = 200, 4_096, 20, 1 << 20
# Per log: most characters, counted where they first appear, and most tokens with logprobs.
_MOST_TEXT, _MOST_LOG_LOGPROBS = 32 << 20, 200_000
TextsOf = Callable[[Sequence[int]], list[str]]


@dataclass(frozen=True, slots=True)
class LogHead:
    """Facts about a whole log. `title` names the step or evaluation; `note` lists omissions."""

    run: str
    title: str
    model: str
    note: str


@dataclass(slots=True)
class _Budget:
    """Remaining space of a log."""

    characters: int = _MOST_TEXT
    logprobs: int = _MOST_LOG_LOGPROBS

    def text(self, text: str) -> str:
        """Return a text as a log may hold it: cut, and with control characters made visible."""
        kept, left_out = cut(text)
        if len(kept) > self.characters:
            kept, left_out = kept[: self.characters], len(text) - self.characters
        self.characters -= len(kept)
        shown = make_visible(kept)
        return f"{shown}\n[{left_out:,} more characters are left out here]" if left_out else shown


def write_log(
    path: Path, head: LogHead, episodes: Iterable[Episode], texts_of: TextsOf
) -> dict[str, Any]:
    """Write a log at `path`, which ends in .eval; return its line in the viewer's listing."""
    budget = _Budget()
    samples = [_SampleMaker(each, head.model, texts_of, budget).make() for each in episodes]
    log = _log_of(head, samples)
    write_eval_log(log, str(path), format="eval")
    spec = log.eval
    return {
        "eval_id": spec.eval_id,
        "run_id": spec.run_id,
        "task": spec.task,
        "task_id": spec.task_id,
        "task_version": 0,
        "version": log.version,
        "status": log.status,
        "model": spec.model,
        "started_at": log.stats.started_at,
        "completed_at": log.stats.completed_at,
    }


def _log_of(head: LogHead, samples: list[EvalSample]) -> EvalLog:
    times = sorted(event.timestamp for each in samples for event in each.events)
    start = (times[0] if times else datetime.now(UTC)).isoformat()
    end = (times[-1] if times else datetime.now(UTC)).isoformat()
    name = make_visible(head.title, lines=False)
    metadata = {"run": head.run} | ({"left_out": head.note} if head.note else {})
    return EvalLog(
        status="success",
        eval=EvalSpec(
            created=start,
            task=name,
            task_id=name,
            run_id=head.run,
            eval_id=f"{head.run} {name}",
            dataset=EvalDataset(name=head.run, samples=len(samples)),
            model=head.model,
            config=EvalConfig(),
            metadata=metadata,
        ),
        results=EvalResults(
            total_samples=len(samples),
            completed_samples=sum(each.error is None for each in samples),
            scores=list(_mean_scores(samples)),
        ),
        stats=EvalStats(started_at=start, completed_at=end),
        samples=samples,
    )


def _mean_scores(samples: Iterable[EvalSample]) -> Iterator[EvalScore]:
    scores = [(each.scores or {}).get("reward") for each in samples]
    rewards = [score.as_float() for score in scores if score]
    if rewards:
        mean = EvalMetric(name="mean", value=float(np.mean(rewards)))
        yield EvalScore(name="reward", scorer="reward", metrics={"mean": mean})


@dataclass(slots=True)
class _SampleMaker:
    """Makes the sample of one attempt."""

    episode: Episode
    model: str
    texts_of: TextsOf
    budget: _Budget
    _events: list[Event] = field(default_factory=list[Event])
    _notes: list[str] = field(default_factory=list[str])
    _logprobs: int = _MOST_LOGPROBS
    _images: int = _MOST_IMAGES
    _clock: float = 0.0
    _begun: float = 0.0
    _played: int = 0

    def make(self) -> EvalSample:
        episode = self.episode
        row, group, trajectory = episode.row, episode.group, episode.trajectory
        seconds = trajectory.counts.open_s + row.seconds + trajectory.counts.grade_s
        self._begun = row.received - seconds
        self._clock = self._begun + trajectory.counts.open_s
        messages: list[ChatMessage] = []
        for number in range(len(episode.sequences)):
            messages = self._add_sequence(number)
        if episode.pruned:
            self._notes.append("The journal no longer keeps the messages of this attempt.")
        scores = self._scores()
        self._add_scores(scores)
        sample_id, epoch = sample_place(row.key)
        return EvalSample(
            id=sample_id,
            epoch=epoch,
            input=self.budget.text(group.prompt),
            target="",
            messages=messages,
            output=self._output(messages),
            events=self._events,
            scores=scores,
            metadata=self._metadata(),
            error=self._error(),
            started_at=_moment(self._begun).isoformat(),
            completed_at=_moment(row.received).isoformat(),
            total_time=seconds,
            working_time=seconds,
        )

    def _add_sequence(self, number: int) -> list[ChatMessage]:
        """Add the events of a sequence's turns; return its messages."""
        text = self.episode.sequences[number]
        messages = [self._message(number, i, each) for i, each in enumerate(text.messages)]
        if not text.turns:
            return messages
        token_ids = self.episode.trajectory.sequences[number].token_ids
        pieces = self.texts_of(token_ids.tolist()) if self._may_show_logprobs() else []
        for turn in text.turns:
            if self._played == _MOST_TURNS:
                self._notes.append(f"Only the first {_MOST_TURNS} turns have events.")
            self._played += 1
            if self._played <= _MOST_TURNS:
                self._add_turn(number, text, turn, messages, pieces)
        return messages

    def _add_turn(
        self,
        number: int,
        text: SequenceText,
        turn: EpisodeTurn,
        messages: list[ChatMessage],
        pieces: list[str],
    ) -> None:
        reply, track, run = messages[turn.message], self.episode.tracks[number], text.runs[turn.run]
        assert isinstance(reply, ChatMessageAssistant)
        timing = turn.timing
        generate_s, tools_s = (timing.generate_s, timing.tools_s) if timing else (0.0, 0.0)
        choice = ChatCompletionChoice(
            message=reply,
            stop_reason="tool_calls" if reply.tool_calls else "stop",
            logprobs=self._logprobs_of(track, pieces, run.start, run.end),
        )
        length = run.end - run.start
        usage = ModelUsage(
            input_tokens=run.start, output_tokens=length, total_tokens=run.start + length
        )
        output = ModelOutput(model=self.model, choices=[choice], usage=usage, time=generate_s)
        temperature = float(track.temperatures[run.start]) if length else math.nan
        event = ModelEvent(
            **self._when(generate_s),
            model=self.model,
            input=messages[: turn.message],
            tools=[],
            tool_choice="auto",
            config=GenerateConfig(temperature=None if math.isnan(temperature) else temperature),
            output=output,
        )
        self._events.append(event)
        facts = _turn_facts(turn.number, track, run.start, run.end)
        self._events.append(InfoEvent(**self._when(), source="trainer", data=facts))
        self._add_calls(reply.tool_calls or [], messages[turn.message + 1 :], tools_s)

    def _add_calls(
        self, calls: Sequence[ToolCall], after: Sequence[ChatMessage], tools_s: float
    ) -> None:
        results: dict[str | None, ChatMessageTool] = {}
        for message in after:
            if not isinstance(message, ChatMessageTool):
                break
            results[message.tool_call_id] = message
        for call in calls:
            answer = results.get(call.id)
            event = ToolEvent(
                **self._when(tools_s / len(calls)),
                id=call.id,
                function=call.function,
                arguments=call.arguments,
                result=answer.text if answer else "",
            )
            self._events.append(event)

    def _message(self, number: int, index: int, message: EpisodeMessage) -> ChatMessage:
        # Our own ids, because those of Inspect AI are random and slow to make.
        name = f"{number}-{index}"
        content: str | list[Content] = self.budget.text(message.content)
        images = [image for place in message.media if (image := self._image(number, place))]
        if images:
            content = [ContentText(text=content), *images]
        if message.role == "system":
            return ChatMessageSystem(id=name, content=content)
        if message.role == "user":
            return ChatMessageUser(id=name, content=content)
        if message.role == "tool":
            function = make_visible(message.name[:200], lines=False) or None
            call_id = make_visible(message.call_id[:200], lines=False) or None
            return ChatMessageTool(
                id=name, content=content, tool_call_id=call_id, function=function
            )
        if message.thinking:
            thinking = ContentReasoning(reasoning=self.budget.text(message.thinking))
            parts = [ContentText(text=content)] if isinstance(content, str) else content
            content = [thinking, *parts]
        calls = [self._call(each) for each in message.calls] or None
        return ChatMessageAssistant(
            id=name, content=content, tool_calls=calls, model=self.model, source="generate"
        )

    def _call(self, call: EpisodeCall) -> ToolCall:
        if call.arguments is None:
            arguments = {"(not a JSON object)": self.budget.text(call.arguments_text)}
        else:
            arguments = {self.budget.text(k): self._value(v) for k, v in call.arguments.items()}
        return ToolCall(
            id=make_visible(call.call_id[:200], lines=False),
            function=make_visible(call.name[:200], lines=False),
            arguments=arguments,
        )

    def _value(self, value: Any) -> Any:
        """Return a value of a call's arguments with its texts cut and made visible."""
        if isinstance(value, str):
            return self.budget.text(value)
        if isinstance(value, dict):
            return {self.budget.text(str(k)): self._value(v) for k, v in value.items()}
        if isinstance(value, list):
            return [self._value(each) for each in value]
        return value if not isinstance(value, float) or math.isfinite(value) else str(value)

    def _image(self, number: int, place: int) -> ContentImage | None:
        item = self.episode.trajectory.sequences[number].media[place]
        mime = image_type(item.content)
        if not mime or not self._images or len(item.content) > _MOST_IMAGE:
            self._notes.append(f"Screenshot or answer {place} is only on the attempt's page.")
            return None
        data = base64.b64encode(item.content).decode()
        if len(data) > self.budget.characters:
            self._notes.append(f"Screenshot {place} is only on the attempt's page.")
            return None
        self._images -= 1
        self.budget.characters -= len(data)
        return ContentImage(image=f"data:{mime};base64,{data}")

    def _may_show_logprobs(self) -> bool:
        return self._logprobs > 0 and self.budget.logprobs > 0

    def _logprobs_of(
        self, track: TokenTrack, pieces: list[str], start: int, end: int
    ) -> Logprobs | None:
        sampled = [i for i in range(start, end) if not math.isnan(track.logprobs[i])]
        if not pieces or len(sampled) > min(self._logprobs, self.budget.logprobs):
            self._logprobs = 0
            note = "Later turns have no logprobs here; the token view has them all."
            if note not in self._notes:
                self._notes.append(note)
            return None
        self._logprobs -= len(sampled)
        self.budget.logprobs -= len(sampled)
        return Logprobs(
            content=[
                Logprob(token=make_visible(pieces[i]), logprob=float(track.logprobs[i]))
                for i in sampled
            ]
        )

    def _scores(self) -> dict[str, Score]:
        """Return the known scores: an unknown reward is absent."""
        trajectory, scores = self.episode.trajectory, dict[str, Score]()
        checks = [f"failed: {check}" for check in trajectory.checks_failed]
        checks += [f"passed: {check}" for check in trajectory.checks_passed]
        if trajectory.reward is not None:
            explanation = self.budget.text("\n".join(checks)) or None
            scores["reward"] = Score(value=trajectory.reward, explanation=explanation)
        tracks = self.episode.tracks
        advantage = _mean(np.concatenate([t.advantages for t in tracks])) if tracks else None
        if advantage is not None:
            scores["advantage"] = Score(value=advantage)
        return scores

    def _add_scores(self, scores: dict[str, Score]) -> None:
        grade_s = self.episode.trajectory.counts.grade_s
        for score in scores.values():
            self._events.append(ScoreEvent(**self._when(grade_s), score=score))
            grade_s = 0.0

    def _output(self, messages: Sequence[ChatMessage]) -> ModelOutput:
        last = messages[-1] if messages else None
        if not isinstance(last, ChatMessageAssistant):
            return ModelOutput(model=self.model)
        return ModelOutput(model=self.model, choices=[ChatCompletionChoice(message=last)])

    def _error(self) -> EvalError | None:
        trajectory = self.episode.trajectory
        if trajectory.failure is None:
            return None
        why = ": ".join(filter(None, (trajectory.failure, trajectory.no_grade, trajectory.detail)))
        return EvalError(message=self.budget.text(why), traceback="", traceback_ansi="")

    def _metadata(self) -> dict[str, Any]:
        episode = self.episode
        row, group, trajectory = episode.row, episode.group, episode.trajectory
        policies = dict.fromkeys(f"{p.run_epoch}:{p.version}" for p in trajectory.policies)
        found: dict[str, Any] = {
            "group": row.group_id,
            "attempt": row.index,
            "try": row.attempt_try,
            "task": group.task_key,
            "environment": group.env_key,
            "step": group.step,
            "state": group.state,
            "policy_versions": list(policies),
            "ended": row.ended,
            "dropped": row.unused or group.reason,
            "no_numbers_of_the_trainer": next((t.note for t in episode.tracks if t.note), ""),
            "group_rewards": list(group.rewards),
            "partial_reward": trajectory.partial_reward,
            "checks_passed": list(trajectory.checks_passed),
            "checks_failed": list(trajectory.checks_failed),
            "suspicion": trajectory.suspicion,
            "turns": row.turns,
            "tool_calls": row.tool_calls,
            "tokens": row.tokens,
            "policy_tokens": row.policy_tokens,
            "worker": trajectory.facts.worker_id,
            "left_out": self._notes,
        }
        known = {name: value for name, value in found.items() if value not in (None, "", [])}
        return {name: self._value(value) for name, value in known.items()}

    def _when(self, seconds: float = 0.0) -> dict[str, Any]:
        """Return the times of the next event, which takes so long."""
        times = {"timestamp": _moment(self._clock), "working_start": self._clock - self._begun}
        self._clock += seconds
        return times


def _turn_facts(number: int, track: TokenTrack, start: int, end: int) -> dict[str, Any]:
    """Return the engine's and the trainer's values for a turn's tokens, as JSON types."""
    ours = slice(start, end)
    versions = dict.fromkeys(
        f"{epoch}:{version}"
        for epoch, version in zip(track.epochs[ours], track.versions[ours], strict=True)
        if version >= 0
    )
    found: dict[str, Any] = {
        "turn": number,
        "tokens": end - start,
        "trained_tokens": int((track.mask[ours] == TRAINED).sum()),
        "policy_versions": list(versions),
        "mean_logprob": _mean(track.logprobs[ours]),
        "mean_trainer_logprob": _mean(track.trainer_logprobs[ours]),
        "mean_difference": _mean(track.trainer_logprobs[ours] - track.logprobs[ours]),
        "advantage": _mean(track.advantages[ours]),
        "mean_entropy": _mean(track.entropy[ours]),
    }
    return {name: value for name, value in found.items() if value is not None}


def _mean(values: NDArray[np.floating]) -> float | None:
    known = values[np.isfinite(values)]
    return float(known.mean(dtype=np.float64)) if len(known) else None


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(max(0.0, seconds), UTC)

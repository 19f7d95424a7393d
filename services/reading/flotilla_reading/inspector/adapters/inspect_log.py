"""Writer of logs of Inspect AI: a sample for each attempt, with its messages and scores, and with
the values of each turn as metadata. A log is bounded, and notes what it leaves out."""

import base64
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from inspect_ai.log import EvalLog, write_eval_log
from numpy.typing import NDArray

from flotilla_common.episodes.episode_text import EpisodeMessage, EpisodeTurn
from flotilla_common.text.printable_text import make_visible
from flotilla_reading.inspector.pages.messages import attempt_facts, image_type, turn_facts
from flotilla_reading.inspector.pages.visible_text import cut
from flotilla_reading.inspector.queries.episodes import Episode
from flotilla_reading.inspector.queries.token_tracks import TRAINED
from flotilla_reading.inspector.queries.transcript_attempts import sample_place

_Json = dict[str, Any]


@dataclass(slots=True)
class _Budget:
    """Remaining space of a log."""

    characters: int = 32 << 20
    logprobs: int = 200_000

    def fit(self, value: Any) -> Any:
        """Return a JSON value as a log may hold it: texts cut, with visible control characters."""
        if isinstance(value, dict):
            return {self.fit(str(k)): self.fit(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.fit(each) for each in value]
        if not isinstance(value, str):
            return str(value) if isinstance(value, float) and not math.isfinite(value) else value
        kept = cut(value)[0][: self.characters]
        self.characters -= len(kept)
        left_out = len(value) - len(kept)
        note = f"\n[{left_out:,} more characters are left out here]" if left_out else ""
        return make_visible(kept) + note


def write_log(path: Path, title: str, head: _Json, episodes: Iterable[Episode]) -> _Json:
    """Write a log at `path`, which ends in .eval; return its task, its id and its size. `head` has
    the `run`, the `model`, and what is `left_out` of the whole."""
    budget, run, name = _Budget(), head["run"], make_visible(title, lines=False)
    samples = [_SampleMaker(each, budget).make() for each in episodes]
    spec = {"created": datetime.now(UTC).isoformat(), "task": name, "run_id": run, "config": {}}
    spec |= {"eval_id": f"{run} {name}", "dataset": {"name": run, "samples": len(samples)}}
    spec |= {"model": head["model"], "metadata": head}
    log = EvalLog.model_validate({"status": "success", "eval": spec, "samples": samples})
    write_eval_log(log, str(path), format="eval")
    return {"task": name, "eval_id": spec["eval_id"], "samples": len(samples)}


@dataclass(slots=True)
class _SampleMaker:
    """Makes the sample of one attempt."""

    episode: Episode
    budget: _Budget
    _notes: list[str] = field(default_factory=list[str])

    def make(self) -> _Json:
        row, tried, fit = self.episode.row, self.episode.trajectory, self.budget.fit
        # The last sequence has the whole conversation.
        messages = [m for text in self.episode.sequences[-1:] for m in text.messages]
        advantages = [track.advantages for track in self.episode.tracks]
        # An unknown value is absent.
        values = {"reward": tried.reward, "advantage": _mean(*advantages)}
        whys = (tried.failure, tried.no_grade, tried.detail) if tried.failure else ()
        why = fit(": ".join(filter(None, whys)))
        sample_id, epoch = sample_place(row.key)
        return {
            "id": sample_id,
            "epoch": epoch,
            "input": fit(self.episode.group.prompt),
            "target": "",
            "messages": [self._message(*each) for each in enumerate(messages)],
            "scores": {name: {"value": v} for name, v in values.items() if v is not None},
            "metadata": self._metadata(),
            "error": {"message": why, "traceback": "", "traceback_ansi": ""} if why else None,
            "completed_at": datetime.fromtimestamp(row.received, UTC).isoformat(),
        }

    def _message(self, index: int, message: EpisodeMessage) -> _Json:
        fit = self.budget.fit
        content: list[_Json] = [{"type": "text", "text": fit(message.content)}]
        if message.thinking:
            content.insert(0, {"type": "reasoning", "reasoning": fit(message.thinking)})
        content += (image for place in message.media for image in self._images(place))
        # Our own ids, because those of Inspect AI are random and slow to make.
        role = "system" if message.role == "developer" else message.role
        shown: _Json = {"id": f"{index}", "role": role, "content": content}
        if message.role == "tool":
            shown |= {"tool_call_id": fit(message.call_id), "function": fit(message.name)}
        for call in message.calls:
            given = call.arguments
            arguments = {"(not a JSON object)": given} if isinstance(given, str) else given
            named = {"id": call.call_id, "function": call.name, "arguments": arguments}
            shown.setdefault("tool_calls", []).append(fit(named))
        return shown

    def _images(self, place: int) -> Iterator[_Json]:
        content = self.episode.trajectory.sequences[-1].media[place].content
        data = base64.b64encode(content).decode()
        if (mime := image_type(content)) and len(data) <= min(1 << 20, self.budget.characters):
            self.budget.characters -= len(data)
            yield {"type": "image", "image": f"data:{mime};base64,{data}"}
        else:
            self._notes.append(f"Screenshot or answer {place} is only on the attempt's page.")

    def _metadata(self) -> _Json:
        row, group, tried = self.episode.row, self.episode.group, self.episode.trajectory
        found: _Json = dict(attempt_facts(self.episode))
        found |= {"group": row.group_id, "attempt": row.index, "try": row.attempt_try}
        found |= {"task": group.task_key, "step": group.step, "state": group.state}
        found |= {"checks_passed": tried.checks_passed, "checks_failed": tried.checks_failed}
        found |= {"dropped": row.unused or group.reason, "suspicion": tried.suspicion}
        texts = enumerate(self.episode.sequences)
        found["turns"] = [self._turn(number, turn) for number, text in texts for turn in text.turns]
        found["no_trainer"] = [track.note for track in self.episode.tracks if track.note]
        found |= {"pruned": self.episode.pruned or None, "left_out": [*dict.fromkeys(self._notes)]}
        return self.budget.fit({k: v for k, v in found.items() if v not in (None, "", [], ())})

    def _turn(self, number: int, turn: EpisodeTurn) -> _Json:
        """Return the values of a turn: means, and the logprob of each of its sampled tokens."""
        track, run = self.episode.tracks[number], self.episode.sequences[number].runs[turn.run]
        tokens = slice(run.start, run.end)
        facts: _Json = dict(turn_facts(track, run.start, run.end, turn.timing))
        facts |= {"turn": turn.number, "trained": int((track.mask[tokens] == TRAINED).sum())}
        for name in ("advantages", "trainer_logprobs", "entropy", "temperatures"):
            facts[name] = _mean(getattr(track, name)[tokens])
        ours = [i for i in range(run.start, run.end) if not math.isnan(track.logprobs[i])]
        if len(ours) > self.budget.logprobs:
            self._notes.append("Later turns have no logprobs here; the token view has them all.")
            return facts
        self.budget.logprobs -= len(ours)
        texts = self.episode.texts_of(number, run.start, run.end)
        facts["logprobs"] = [[texts[i - run.start], float(track.logprobs[i])] for i in ours]
        return facts


def _mean(*values: NDArray[Any]) -> float | None:
    known = [v for each in values for v in each.tolist() if math.isfinite(v)]
    return math.fsum(known) / len(known) if known else None

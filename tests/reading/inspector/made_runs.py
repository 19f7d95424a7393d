"""Runs that the journal's own writer makes: steps, evaluations, and the text of their agents."""

import asyncio
import hashlib
import json
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from flotilla_common.domain.attempts import AttemptKey, FailureKind, Purpose, StopReason
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
from flotilla_common.domain.trajectory import Sequence as TokenSequence
from flotilla_common.run_folder.token_stats import (
    SequenceStats,
    StepStats,
    encode_stats,
    stats_path,
)
from flotilla_learner.group_types import EndedGroup, GroupSpec, Lease
from flotilla_learner.journal.schema import Plan
from flotilla_learner.journal.store import Journal, open_journal
from flotilla_learner.sampling.tasks import Task
from tests.reading.inspector.chat_messages import record_messages

T = TypeVar("T")
RUN = "booking-20260101-120000"
Parts = Sequence[tuple[Author, str]]
_MARKS = (
    *("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"),
    *("<|vision_start|>", "<|image_pad|>", "<|vision_end|>"),
)
# One token of 288 characters: with it a text of 10 MB has not millions of them.
LONG_WORD = "<i>x</i> " * 32
_CORPUS = (
    "book a hotel in Rome for two nights find hotels search flights the cheapest one is booked",
    '{"name": "find_hotels", "arguments": {"city": "Rome", "nights": 2}} result error price',
)


def run_apart(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a thread of its own: a driven browser keeps a loop running in this one."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()


def make_tokenizer(folder: Path) -> Tokenizer:
    """Write a byte-level tokenizer, as a model folder has it."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=480, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(_CORPUS * 4, trainer)
    bpe.add_special_tokens([AddedToken(mark, special=True) for mark in _MARKS])
    bpe.add_tokens([AddedToken(LONG_WORD, normalized=False)])
    folder.mkdir(parents=True, exist_ok=True)
    bpe.save(str(folder / "tokenizer.json"))
    return bpe


@dataclass(frozen=True, slots=True)
class MadeAttempt:
    """One attempt to make: its text and its outcome."""

    parts: Parts
    reward: float | None
    failed: tuple[str, ...] = ()
    passed: tuple[str, ...] = ()
    failure: FailureKind | None = None
    media: tuple[Media, ...] = ()
    # Files of the media that are pictures.
    files: tuple[bytes, ...] = ()
    # The tools that the chat template was given, as JSON.
    tools: bytes = b""
    stop: StopReason = StopReason.DONE
    tool_errors: int = 0


@dataclass(slots=True)
class MadeRun:
    """A run in the making; `trajectories` are those in the journal."""

    folder: Path
    tokenizer: Tokenizer
    journal: Journal
    trajectories: dict[AttemptKey, Trajectory] = field(default_factory=dict[AttemptKey, Trajectory])
    stats: dict[int, StepStats] = field(default_factory=dict[int, StepStats])
    _groups: int = 0

    async def add_group(
        self,
        attempts: Iterable[MadeAttempt],
        *,
        task: Task | None = None,
        eval_id: str = "",
        version: int = 3,
        size: int | None = None,
    ) -> str:
        """Journal a group with its lease and attempts; return its id."""
        number, attempts = self._groups, list(attempts)
        self._groups += 1
        group_id = f"{eval_id}-heldout-{number:05d}" if eval_id else f"g{number:06d}r0"
        spec = GroupSpec(
            group_id=group_id,
            sequence_number=-1 if eval_id else number,
            task=task or make_task(number),
            purpose=Purpose.EVAL if eval_id else Purpose.TRAIN,
            size=size or len(attempts),
            temperature=1.0,
            eval_id=eval_id,
        )
        policy = PolicyId(1, version, b"f" * 8)
        lease = Lease(f"lease-{number}", spec, (), policy, f"worker-{number % 2}", 0.0)
        await self.journal.add_lease(lease, "first", f"request-{number}", 1)
        for index, each in enumerate(attempts):
            key = AttemptKey(group_id, index, 0)
            trajectory = self._trajectory(key, lease.lease_id, each, policy, number)
            await self.journal.add_trajectory(trajectory)
            self.trajectories[key] = trajectory
        return group_id

    async def plan_step(
        self, step: int, groups: Sequence[str], filtered: Sequence[str] = ()
    ) -> None:
        """Commit a step of these groups, with statistics of their tokens."""
        keys = [
            key
            for key, each in self.trajectories.items()
            if key.group_id in groups and each.is_graded
        ]
        await self.journal.commit_plan(Plan(step, tuple(keys)), 1, groups, filtered)
        self.stats[step] = StepStats(step, step - 1, dict(self._stats_of(keys)))
        path = stats_path(self.folder, step)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(encode_stats(self.stats[step]))

    async def drop(self, group_id: str, reason: str) -> None:
        """End a group that is not used."""
        spec = GroupSpec(group_id, 0, make_task(0), Purpose.TRAIN, 2, 1.0)
        await self.journal.end_groups([EndedGroup(spec, (), 0, reason)])

    def log(self, step: int, **metrics: float) -> None:
        """Log a point, `__` in names for `/`."""
        named = {name.replace("__", "/"): value for name, value in metrics.items()}
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "time": 1.8e9 + step, **named}) + "\n")

    def write(self, name: str, value: Mapping[str, Any]) -> None:
        (self.folder / name).write_text(json.dumps(value))

    def _trajectory(
        self, key: AttemptKey, lease_id: str, made: MadeAttempt, policy: PolicyId, seed: int
    ) -> Trajectory:
        chooser = np.random.default_rng([seed, key.attempt_index])
        runs = [(who, self.tokenizer.encode(text).ids) for who, text in made.parts]
        spans = tuple(
            Span(who, len(ids), policy, 1.0) if who is Author.POLICY else Span(who, len(ids))
            for who, ids in runs
        )
        sampled = sum(len(ids) for who, ids in runs if who is Author.POLICY)
        sequence = TokenSequence(
            np.concatenate([np.array(ids, np.int32) for _, ids in runs]),
            spans,
            -chooser.exponential(0.6, sampled).astype(np.float32),
            made.media,
            messages=record_messages(made.parts, self.tokenizer.encode, made.media),
        )
        turns = [ids for who, ids in runs if who is Author.POLICY]
        return Trajectory(
            key=key,
            lease_id=lease_id,
            sequences=(sequence,),
            content_digest=content_digest([sequence]),
            reward=made.reward,
            failure=made.failure,
            stop_reason=None if made.failure else made.stop,
            checks_failed=made.failed,
            checks_passed=made.passed,
            turns=tuple(TurnTiming(0.8, 0.2, 100, len(ids)) for ids in turns),
            counts=Counts(
                turns=len(turns),
                tool_calls=max(0, len(turns) - 1),
                tool_errors={"tool_error": made.tool_errors} if made.tool_errors else {},
                open_s=0.1,
            ),
            facts=Facts(
                env_key="booking",
                worker_id="worker-0",
                instance_id="i-7",
                tool_schema_digest=hashlib.sha256(made.tools).hexdigest() if made.tools else "",
            ),
            tools=made.tools,
            pictures={hashlib.sha256(data).hexdigest(): data for data in made.files},
        )

    def _stats_of(self, keys: Sequence[AttemptKey]) -> Iterable[tuple[Any, SequenceStats]]:
        for key in keys:
            trajectory = self.trajectories[key]
            group = [t for k, t in self.trajectories.items() if k.group_id == key.group_id]
            mean = float(np.mean([t.reward for t in group if t.reward is not None]))
            for number, sequence in enumerate(trajectory.sequences):
                chooser = np.random.default_rng([key.attempt_index, 7])
                count = len(sequence.logprobs)
                drift = chooser.normal(0, 0.08, count).astype(np.float32)
                yield (
                    (key, number),
                    SequenceStats(
                        trained=True,
                        why_not="",
                        advantages=np.full(count, (trajectory.reward or 0) - mean, np.float32),
                        logprobs=sequence.logprobs + drift,
                        entropy=chooser.exponential(0.5, count).astype(np.float16),
                        # The first of each was masked by a correction, as some are.
                        weights=np.minimum(np.arange(count) / 4, 1).astype(np.float32),
                    ),
                )


def open_run(runs: Path, run_id: str = RUN) -> MadeRun:
    """Begin a run, with a tokenizer beside the folder of runs."""
    folder = runs / run_id
    folder.mkdir(parents=True)
    tokenizer = make_tokenizer(runs.parent / "model")
    run = MadeRun(folder, tokenizer, open_journal(folder))
    policy = {"model": str(runs.parent / "model"), "dtype": "float32"}
    run.write("spec.json", {"name": "booking", "policy": policy, "learner": {"steps": 3}})
    return run


def make_task(number: int, prompt: str = "", env: str = "booking") -> Task:
    prompt = prompt or f"Book the cheapest hotel in Rome for {number + 2} nights."
    key = f"booking-{number:03d}"
    return Task(key, env, json.dumps({"key": key, "prompt": prompt, "env_id": env}))


def conversation(turns: int = 2, answer: str = "", words: int = 0) -> list[tuple[Author, str]]:
    """Return the text of an episode with so many turns of a policy."""
    parts = [
        (
            Author.PROMPT,
            "<|im_start|>system\nYou book hotels.\n\nTools:\nfind_hotels(city, nights)<|im_end|>\n"
            "<|im_start|>user\nBook the cheapest hotel in Rome.<|im_end|>\n<|im_start|>assistant\n",
        )
    ]
    filler = " find hotels in Rome" * words
    call = '{"name": "find_hotels", "arguments": {"city": "Rome", "nights": 2}}'
    for turn in range(turns - 1):
        turn_text = f"I look for hotels.{filler}\n<tool_call>\n{call}\n</tool_call><|im_end|>"
        given = answer or f'[{{"hotel": "Aurora", "price": {80 + turn}}}]'
        parts.append((Author.POLICY, turn_text))
        parts.append(
            (
                Author.ENVIRONMENT,
                f"\n<|im_start|>user\n<tool_response>\n{given}\n</tool_response><|im_end|>\n"
                "<|im_start|>assistant\n",
            )
        )
    parts.append((Author.POLICY, "The Aurora is booked.<|im_end|>"))
    return parts

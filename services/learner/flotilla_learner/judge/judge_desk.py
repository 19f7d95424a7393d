"""Groups that wait for a verdict: each is asked about beside the run's loop, and its verdict is
journaled before it counts.

A judge that is down delays a run. One whose answers name no scores costs its group: none of its
attempts has a grade then, which is not 0. A learner that was killed asks again about groups whose
verdict was not journaled, and about no other."""

import asyncio
import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from flotilla_common.aio.concurrency import raise_failure, running_tasks
from flotilla_common.domain.attempts import AttemptKey
from flotilla_common.rpc.deadlines import loop_time
from flotilla_common.telemetry.log import get_logger
from flotilla_learner.alarms.event_rules import (
    judge_budget_verdict,
    judge_down_verdict,
    judge_failing_verdict,
)
from flotilla_learner.alarms.types import AlarmVerdict
from flotilla_learner.config.judge import JudgeConfig
from flotilla_learner.group_types import EndedGroup, GroupVerdict
from flotilla_learner.groups.group_endings import GroupEndings
from flotilla_learner.journal.store import Journal
from flotilla_learner.judge.group_judge import GroupJudge
from flotilla_learner.judge.question import Message, Question, ask_again, read_scores
from flotilla_learner.ports import (
    JudgeAnswer,
    JudgeDownError,
    JudgeRefusedError,
    UnusableAnswerError,
)

_log = get_logger(__name__)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
# Groups without a verdict, one after the other, that raise an alarm.
_FAILING_GROUPS = 3
# Share of its budget from which the judge has an alarm.
_NEAR = 0.9


@dataclass(slots=True)
class _Asking:
    """A group that is being asked about: what the answers cost so far."""

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    answer: str = ""

    def note_answer(self, answer: JudgeAnswer) -> None:
        self.calls += 1
        self.prompt_tokens += answer.prompt_tokens
        self.completion_tokens += answer.completion_tokens
        self.answer = answer.text


@dataclass(slots=True)
class JudgeCounts:
    """Sums since `take_metrics`."""

    verdicts: list[GroupVerdict] = field(default_factory=list[GroupVerdict])
    cut: int = 0
    retries: int = 0


class JudgeDesk:
    """Judges groups, several at once."""

    def __init__(
        self,
        judge: GroupJudge,
        config: JudgeConfig,
        journal: Journal,
        endings: GroupEndings,
        *,
        calls_before: int = 0,
        apply_verdict: Callable[[AlarmVerdict], None] = lambda verdict: None,
    ) -> None:
        """`calls_before` are the answers of earlier starts. `apply_verdict` is called when the
        judge seems to be down or of no use, and when it no longer does."""
        self._judge = judge
        self._config = config
        self._journal = journal
        self._endings = endings
        self._calls = calls_before
        self._apply_verdict = apply_verdict
        self._counts = JudgeCounts()
        self._failures = 0
        # Since when nothing is answered; None: the last question was.
        self._silent_since: float | None = None

    async def judge_groups(self) -> None:
        """Judge groups as they come in, until cancelled. Raises JudgeRefusedError."""
        work = (self._keep_judging() for _ in range(self._config.concurrency))
        async with running_tasks(*work) as running:
            await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
            raise_failure(running)

    def take_metrics(self) -> dict[str, float]:
        """Return figures since the last call.

        - judge/verdicts, judge/failed: groups with scores, and without
        - judge/calls, judge/prompt_tokens, judge/completion_tokens: what the answers cost
        - judge/retries: questions that were asked again because no answer came
        - judge/cut_attempts: attempts of which the judge saw only a part
        - judge/seconds: mean of a verdict's, waiting for the judge included
        - judge/budget_used: answers of the whole run / max_calls"""
        taken, self._counts = self._counts, JudgeCounts()
        found = taken.verdicts
        failed = sum(each.scores is None for each in found)
        return {
            "judge/verdicts": float(len(found) - failed),
            "judge/failed": float(failed),
            "judge/calls": float(sum(each.calls for each in found)),
            "judge/prompt_tokens": float(sum(each.prompt_tokens for each in found)),
            "judge/completion_tokens": float(sum(each.completion_tokens for each in found)),
            "judge/retries": float(taken.retries),
            "judge/cut_attempts": float(taken.cut),
            "judge/seconds": sum(each.seconds for each in found) / max(1, len(found)),
            "judge/budget_used": self._calls / self._config.max_calls,
        }

    async def _keep_judging(self) -> None:
        while True:
            await self._judge_group(await self._endings.unjudged.get())

    async def _judge_group(self, ended: EndedGroup) -> None:
        attempts = await self._journal.load_intact(ended.graded)
        if not attempts:
            await self._endings.forget_damaged(ended)
            return
        question = await asyncio.to_thread(self._judge.make_question, ended.group, attempts)
        verdict = await self._ask_until_settled(ended.graded, question)
        await self._journal.add_verdict(verdict, ended.graded)
        self._note_verdict(verdict, question)
        await self._endings.settle_verdict(ended, verdict)

    async def _ask_until_settled(
        self, keys: Sequence[AttemptKey], question: Question
    ) -> GroupVerdict:
        """Ask until the answer names scores, or as often as allowed."""
        began, asking, messages, why = loop_time(), _Asking(), question.messages, ""
        scores: dict[int, float] | None = None
        while scores is None and asking.calls < self._config.tries:
            try:
                answer = await self._ask(messages, question.seed, asking)
                scores = _read_verdict(answer, question, keys)
            except UnusableAnswerError as error:
                asking.answer, why = error.answer or asking.answer, str(error)
                if error.final:
                    break
                messages = ask_again(question, asking.answer, why) if asking.answer else messages
        failure = "" if scores is not None else why
        request = json.dumps(question.messages).encode()
        return GroupVerdict(
            group_id=keys[0].group_id,
            scores=scores,
            failure=failure,
            model=self._config.model,
            request_digest=hashlib.sha256(request).digest(),
            answer=asking.answer,
            calls=asking.calls,
            prompt_tokens=asking.prompt_tokens,
            completion_tokens=asking.completion_tokens,
            seconds=loop_time() - began,
        )

    async def _ask(self, messages: Sequence[Message], seed: int, asking: _Asking) -> JudgeAnswer:
        """Return an answer, however long the judge is down. Raises UnusableAnswerError, and
        JudgeRefusedError if the run may cost no more."""
        pause_s = _FIRST_PAUSE_S
        while True:
            if self._calls >= self._config.max_calls:
                raise JudgeRefusedError(
                    f"learner.judge.max_calls: the run's {self._config.max_calls} answers are used"
                    " up, and groups wait for a verdict: raise it and resume the run with --update"
                )
            self._calls += 1
            try:
                answer = await self._judge.judge.ask(messages, seed)
            except JudgeDownError as error:
                self._calls -= 1
                await self._wait_after(error, pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                continue
            except UnusableAnswerError:
                asking.calls += 1
                self._note_answered()
                raise
            asking.note_answer(answer)
            self._note_answered()
            return answer

    def _note_answered(self) -> None:
        most = self._config.max_calls
        self._silent_since = None
        self._apply_verdict(judge_down_verdict(bad=False))
        near = self._calls >= _NEAR * most
        self._apply_verdict(judge_budget_verdict(bad=near, used=self._calls, most=most))

    async def _wait_after(self, error: JudgeDownError, pause_s: float) -> None:
        """Wait before the next try, and say why."""
        self._counts.retries += 1
        if self._silent_since is None:
            self._silent_since = loop_time()
        # A little longer by chance: requests that failed together should not come back together.
        silent_s = loop_time() - self._silent_since
        wait_s = max(error.wait_s, pause_s * random.uniform(1.0, 1.2))
        _log.warning("the judge gives no answer", error=str(error), retry_in_s=round(wait_s, 1))
        if silent_s >= self._config.patience_s:
            self._apply_verdict(judge_down_verdict(bad=True, cause=str(error), seconds=silent_s))
        await asyncio.sleep(wait_s)

    def _note_verdict(self, verdict: GroupVerdict, question: Question) -> None:
        self._counts.verdicts.append(verdict)
        self._counts.cut += question.cut
        if verdict.scores is not None:
            self._failures = 0
            self._apply_verdict(judge_failing_verdict(bad=False))
            return
        self._failures += 1
        _log.warning("a group has no verdict", group=verdict.group_id, why=verdict.failure)
        if self._failures >= _FAILING_GROUPS:
            self._apply_verdict(
                judge_failing_verdict(bad=True, cause=verdict.failure, groups=self._failures)
            )


def _read_verdict(
    answer: JudgeAnswer, question: Question, keys: Sequence[AttemptKey]
) -> dict[int, float]:
    """Return the scores that an answer names, by attempt. Raises UnusableAnswerError."""
    try:
        named = read_scores(answer.text, tuple(question.places))
    except ValueError as error:
        raise UnusableAnswerError(str(error), answer.text) from error
    return {keys[question.places[name]].attempt_index: score for name, score in named.items()}

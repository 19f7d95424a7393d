"""Measures of one attempt: the numbers that an analysis adds up, without its texts."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flotilla_common.domain.attempts import AttemptKey
from flotilla_common.domain.eval_groups import eval_set_of
from flotilla_common.domain.pass_rates import PASS_REWARD
from flotilla_reading.analysis.attempt_facts import AttemptFacts, Row, read_facts
from flotilla_reading.analysis.failure_classes import RULES, FailureRule, classify_facts

# The policy's words about what judges it.
_GRADER_WORDS = re.compile(
    r"\b(validate_task|verifier|def verify|checks_(passed|failed)|reward)\b", re.IGNORECASE
)
# Characters of the task that the policy's last words repeat to the letter.
_COPIED = 120


@dataclass(frozen=True, slots=True)
class AttemptMeasures:
    """One attempt. `classes` are why it failed, the main one first, which a model said if `judged`;
    `signs` are reasons to look at it although it passed. `context_tokens` are the most tokens that
    it held."""

    env_key: str
    task_key: str
    eval_set: str
    group_id: str
    attempt_index: int
    attempt_try: int
    reward: float | None
    classes: tuple[str, ...]
    signs: tuple[str, ...]
    turns: int
    calls: int
    repeats: int
    tool_errors: int
    policy_tokens: int
    thinking_tokens: int
    context_tokens: int
    judged: bool = False

    @property
    def key(self) -> AttemptKey:
        return AttemptKey(self.group_id, self.attempt_index, self.attempt_try)

    @property
    def passed(self) -> bool:
        return self.reward is not None and self.reward >= PASS_REWARD


def measure_attempt(row: Row, rules: Sequence[FailureRule] = RULES) -> AttemptMeasures:
    """Measure the attempt of a row."""
    facts, counts, turns = read_facts(row), row["counts"], row["turns"]
    return AttemptMeasures(
        env_key=row["env_key"],
        task_key=row["task_key"],
        eval_set=eval_set_of(row["group_id"], row["eval_id"]),
        group_id=row["group_id"],
        attempt_index=row["attempt_index"],
        attempt_try=row["attempt_try"],
        reward=row["reward"],
        classes=classify_facts(facts, rules),
        signs=tuple(_find_signs(facts)) if facts.passed else (),
        turns=counts["turns"],
        calls=counts["tool_calls"],
        repeats=counts["repeats"],
        tool_errors=sum(counts["tool_errors"].values()),
        policy_tokens=sum(turn["generated_tokens"] for turn in turns),
        thinking_tokens=sum(turn["thinking_tokens"] for turn in turns),
        context_tokens=max(
            (turn["prompt_tokens"] + turn["generated_tokens"] for turn in turns), default=0
        ),
    )


def _find_signs(facts: AttemptFacts) -> Iterator[str]:
    """Yield what is odd about a passed attempt, seen without the others."""
    row = facts.row
    if row["suspicion"]:
        yield "wrote_like_the_grader"
    if row["checks_failed"]:
        yield "passed_with_failed_checks"
    if facts.had_tools and not facts.calls:
        yield "passed_without_a_call"
    said = [each for each in row["messages"] if each["role"] == "assistant"]
    if any(_GRADER_WORDS.search(each["content"]) for each in said):
        yield "speaks_of_its_grader"
    task = next((each["content"] for each in row["messages"] if each["role"] == "user"), "")
    if len(task) >= _COPIED and task[:_COPIED] in facts.last_words:
        yield "repeats_its_task"

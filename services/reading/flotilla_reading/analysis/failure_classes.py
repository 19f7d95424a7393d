"""Why an attempt failed: one table of rules, which a user's own rules may precede.

    classes = classify(json.loads(line))     # of rollouts/step_N.jsonl or evals/step_N/ENV.jsonl
    classes[0]                               # why it failed; there is none if it passed

The order is that of precedence: faults of others before the policy's, a false claim before what
went wrong earlier, and a cause before the symptom that it ended with."""

import re
import runpy
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from flotilla_common.domain.attempts import FailureKind, StopReason
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.old_names import explain_old_import
from flotilla_reading.analysis.attempt_facts import (
    AttemptFacts,
    ErrorKind,
    Row,
    kind_of_error,
    read_facts,
)

OTHER = "other"
_ENVIRONMENT_FAILURES = (FailureKind.ENV_LOST, FailureKind.NO_GRADE)


@dataclass(frozen=True, slots=True)
class FailureRule:
    """A class of failures: `description` is for people, and `matches` tells whether an attempt that
    did not pass belongs to it."""

    name: str
    description: str
    matches: Callable[[AttemptFacts], bool]


def _lacks_answer(facts: AttemptFacts) -> bool:
    lost, detail = facts.failure == FailureKind.ENV_LOST, facts.row["detail"]
    silent = lost and (not detail or kind_of_error(detail) is ErrorKind.NO_ANSWER)
    return silent or ErrorKind.NO_ANSWER in facts.open_errors


def _claims_falsely(facts: AttemptFacts) -> bool:
    if not facts.said_done or facts.gives_up:
        return False
    tried = bool(facts.calls) or not facts.had_tools
    return facts.claims_success or (tried and not facts.open_errors)


RULES = (
    FailureRule(
        "system_fault",
        "The engine, the template or the run ended it, so it has no reward.",
        lambda facts: bool(facts.failure) and facts.failure not in _ENVIRONMENT_FAILURES,
    ),
    FailureRule(
        "no_environment_answer",
        "A tool's last call was not answered in time, or the environment was lost without a word.",
        _lacks_answer,
    ),
    FailureRule(
        "environment_fault",
        "The environment or the verifier failed: no grade, or a tool's last answer was an internal "
        "error.",
        lambda facts: (
            facts.failure in _ENVIRONMENT_FAILURES or ErrorKind.SERVER in facts.open_errors
        ),
    ),
    FailureRule(
        "context_overflow",
        "The context window was full before the policy said that it was done.",
        lambda facts: facts.stop_reason == StopReason.CONTEXT_OVERFLOW,
    ),
    FailureRule(
        "false_completion",
        "It claims to be done, or ends as if it were after calls that went well; the verifier "
        "disagrees.",
        _claims_falsely,
    ),
    FailureRule(
        "authorization",
        "A tool's last call was refused for lack of rights, and the policy never got past that.",
        lambda facts: ErrorKind.AUTHORIZATION in facts.open_errors,
    ),
    FailureRule(
        "tool_arguments",
        "A tool's last call had wrong arguments, was unreadable, or was of a tool that does not "
        "exist.",
        lambda facts: (
            ErrorKind.ARGUMENTS in facts.open_errors
            or facts.stop_reason == StopReason.MAX_PARSE_ERRORS
        ),
    ),
    FailureRule(
        "not_found",
        "A tool's last call named or searched for something that was not found.",
        lambda facts: ErrorKind.NOT_FOUND in facts.open_errors,
    ),
    FailureRule(
        "gave_up",
        "It says that it cannot, asks the user instead, or ends without a single call.",
        lambda facts: facts.gives_up or (facts.said_done and facts.had_tools and not facts.calls),
    ),
    FailureRule(
        "never_done",
        "A limit ended it: turns, calls, time, or tokens of a turn or of the attempt.",
        lambda facts: facts.stop_reason not in ("", StopReason.DONE, StopReason.CONTEXT_OVERFLOW),
    ),
)


def classify(row: Row, rules: Sequence[FailureRule] = RULES) -> tuple[str, ...]:
    """Return the classes of a row that did not pass, the main one first: that of the first rule
    that matches. It is `other` if none does, and a passed attempt has none."""
    return classify_facts(read_facts(row), rules)


def classify_facts(facts: AttemptFacts, rules: Sequence[FailureRule] = RULES) -> tuple[str, ...]:
    """Return the classes of an attempt whose facts are read (see `classify`)."""
    if facts.passed:
        return ()
    # A user's rule may add to a class of ours.
    found = dict.fromkeys(rule.name for rule in rules if rule.matches(facts))
    return tuple(found) or (OTHER,)


def load_rules(path: Path) -> tuple[FailureRule, ...]:
    """Return the rules of a user's file, its `RULES`, followed by ours. Raises ConfigError, as does
    a rule of the file that fails at an attempt."""
    try:
        found = runpy.run_path(str(path)).get("RULES")
    except (Exception, SystemExit) as error:
        # A user's module may raise anything.
        moved = explain_old_import("".join(traceback.format_exception(error)))
        told = "; ".join(filter(None, [repr(error), moved]))
        raise ConfigError(f"--rules: {path} cannot be run: {told}") from error
    if not isinstance(found, (list, tuple)) or not all(map(_is_rule, found)):
        raise ConfigError(
            f"--rules: {path} has no list RULES of {FailureRule.__name__}, each with a name that is"
            " one word, a description and a function, as in docs/evaluation.md"
        )
    return (*(_guard(rule, path) for rule in found), *RULES)


def _is_rule(rule: object) -> bool:
    if not isinstance(rule, FailureRule):
        return False
    texts = cast("list[object]", [rule.name, rule.description])
    # A judge names a class by one word.
    is_named = all(isinstance(text, str) for text in texts) and re.fullmatch(r"\w+", rule.name)
    return bool(is_named) and callable(rule.matches)


def _guard(rule: FailureRule, path: Path) -> FailureRule:
    """Return a user's rule whose errors name it."""

    def matches(facts: AttemptFacts) -> bool:
        try:
            return bool(rule.matches(facts))
        except (Exception, SystemExit) as error:
            # A user's function may raise anything.
            attempt = f"attempt {facts.row['group_id']}/{facts.row['attempt_index']}"
            message = f"--rules: {path}: the rule {rule.name} fails at {attempt}: {error!r}"
            raise ConfigError(message) from error

    return replace(rule, matches=matches)

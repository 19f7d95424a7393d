"""Messages for events of a run, pure."""

from dataclasses import dataclass
from enum import StrEnum

from flotilla_launcher.control.budget import WARN_SHARE
from flotilla_launcher.run_progress import Alarm
from flotilla_launcher.state import Cleanup, Outcome, Run

_TEXT_CHARACTERS = 1_500
_LOG_CHARACTERS = 2_500


class MessageKind(StrEnum):
    """Kind of a message."""

    STARTED = "started"
    RESUMED = "resumed"
    COMPLETED = "completed"
    FAILED = "failed"
    STOPPED = "stopped"
    BUDGET = "budget"
    ALARM = "alarm"
    NOTICE = "notice"
    LEAK_SUSPECTED = "leak_suspected"


@dataclass(frozen=True, slots=True)
class Message:
    """One message for people. `facts` are pairs of a label and a value."""

    kind: MessageKind
    title: str
    facts: tuple[tuple[str, str], ...] = ()
    text: str = ""
    # The end of a log, as it was written.
    log: str = ""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """A run and what else messages report about it; amounts are US dollars."""

    run: Run
    # Price of one hour as the run was planned; None if unknown.
    estimate: float | None = None
    max_cost: float | None = None
    max_tokens: int | None = None
    max_hours: float | None = None
    hours: float = 0.0
    # The run's page at its tracker, and the page of all runs there.
    tracker: str = ""
    tracker_project: str = ""
    # Page of whatever submitted the run.
    link: str = ""
    # Where its logs are: HOST:FOLDER.
    logs: str = ""
    # Where the page of its newest analysis is: HOST:FILE.
    analysis: str = ""
    # What is trained, its steps, and the tasks as the spec selects them.
    model: str = ""
    steps: str = ""
    tasks: str = ""
    # Share of held-out tasks that passed, in the first evaluation and in the newest.
    before: float | None = None
    after: float | None = None
    log: str = ""


def spending_messages(facts: RunFacts) -> dict[str, Message]:
    """Return a message for each limit that is near or exceeded, by a key that is the same each
    time."""
    found: dict[str, Message] = {}
    tokens = facts.run.cost.tokens
    limits = (
        ("cost", facts.run.cost.accrued, facts.max_cost, "${:,.2f}", "launcher.max_cost"),
        ("tokens", tokens.total, facts.max_tokens, "{:,.0f}", "launcher.max_tokens"),
        ("hours", facts.hours, facts.max_hours, "{:.1f} h", "launcher.max_hours"),
    )
    for what, used, limit, form, key in limits:
        if limit is None or used < WARN_SHARE * limit:
            continue
        over = used >= limit
        level = "reached" if over else f"{WARN_SHARE:.0%}"
        title = f"Limit of {what} reached" if over else f"{used / limit:.0%} of the {what} are used"
        text = "The run drains and stops; its work is saved." if over else ""
        amounts = f"{form.format(used)} of {form.format(limit)} ({key})"
        pairs = (("Run", facts.run.run_id), ("Used", amounts), *_spent_facts(facts))
        found[f"{what}-{level}-{limit:g}"] = Message(MessageKind.BUDGET, title, pairs, text)
    return found


def alarm_message(run_id: str, alarm: Alarm) -> Message:
    """Return the message about an alarm or a notice of a service."""
    kind = MessageKind.NOTICE if alarm.severity == "notice" else MessageKind.ALARM
    name = alarm.rule.replace("_", " ")
    title = f"{kind.capitalize()}: {name}"
    title = title if alarm.scope == "all" else f"{title} of {alarm.scope}"
    text = ". ".join(part for part in (alarm.cause, alarm.fix) if part)
    pairs = (("Run", run_id), ("Step", str(alarm.step)))
    return Message(kind, title, pairs, text[:_TEXT_CHARACTERS])


def started_message(facts: RunFacts, *, resumed: bool) -> Message:
    services = ", ".join(
        f"{count} {service}" for service, count in sorted(facts.run.wanted.items())
    )
    pairs = [
        ("Run", facts.run.run_id),
        ("Spec", facts.run.name),
        ("Mode", facts.run.mode.value.replace("_", " ")),
        ("Backend", facts.run.backend),
        ("Services", services),
        ("Model", facts.model),
        ("Steps", facts.steps),
        ("Tasks", facts.tasks),
        ("Cost", _estimate_text(facts)),
        ("Tracker", facts.tracker or facts.tracker_project),
        ("Submitted by", facts.link),
    ]
    kind, title = (
        (MessageKind.RESUMED, "Run resumed") if resumed else (MessageKind.STARTED, "Run started")
    )
    return Message(kind, title, tuple(pair for pair in pairs if pair[1]))


def _estimate_text(facts: RunFacts) -> str:
    if facts.estimate is None:
        return ""
    text = f"${facts.estimate:,.2f} an hour"
    if facts.max_hours is not None:
        total = facts.estimate * facts.max_hours
        text = f"{text}, ${total:,.2f} in {facts.max_hours:g} h"
    if facts.max_cost is not None:
        text = f"{text}; stops at ${facts.max_cost:,.2f}"
    return text


def failed_message(facts: RunFacts) -> Message:
    log = facts.log[-_LOG_CHARACTERS:]
    text = _without_lines_of(log, facts.run.error)[:_TEXT_CHARACTERS]
    return Message(MessageKind.FAILED, "Run failed", ending_facts(facts), text, log)


def _without_lines_of(log: str, error: str) -> str:
    """Return an error without the log's lines that it quotes."""
    known = set(log.splitlines())
    head, *quoted = error.splitlines() or [""]
    return "\n".join([head, *(line for line in quoted if line not in known)])


def stopped_message(facts: RunFacts) -> Message:
    title = {
        Outcome.BUDGET: "Run stopped: its budget is spent",
        Outcome.DEADLINE: "Run stopped: its time is up",
        Outcome.CAPACITY: "Run stopped: no such machines are available",
    }.get(facts.run.outcome, "Run cancelled")
    return Message(
        MessageKind.STOPPED, title, ending_facts(facts), facts.run.error[:_TEXT_CHARACTERS]
    )


def leak_messages(facts: RunFacts) -> list[Message]:
    if facts.run.cleanup is not Cleanup.LEAK_SUSPECTED:
        return []
    pairs = (
        ("Run", facts.run.run_id),
        ("Found", facts.run.cleanup_detail or "the backend was unreachable"),
    )
    text = "The run may still cost money: check the provider's own list of machines, and reap."
    return [Message(MessageKind.LEAK_SUSPECTED, "Machines may be left running", pairs, text)]


def ending_facts(facts: RunFacts) -> tuple[tuple[str, str], ...]:
    pairs = [
        ("Run", facts.run.run_id),
        ("Outcome", facts.run.outcome.value),
        ("Held-out pass@1", _before_after_text(facts)),
        ("Machines", facts.run.cleanup.value.replace("_", " ")),
        *_spent_facts(facts),
        ("Tracker", facts.tracker),
        ("Submitted by", facts.link),
        ("Logs", facts.logs),
        ("Analysis", facts.analysis),
    ]
    return tuple(pair for pair in pairs if pair[1])


def _spent_facts(facts: RunFacts) -> list[tuple[str, str]]:
    cost = facts.run.cost
    spent = [("Spent", f"${cost.accrued:,.2f}")] if cost.accrued else []
    return [*spent, ("Tokens", f"{cost.tokens.total:,}")] if cost.tokens.total else spent


def _before_after_text(facts: RunFacts) -> str:
    if facts.after is None:
        return ""
    after = f"{facts.after:.1%}"
    return after if facts.before is None else f"{facts.before:.1%} → {after}"

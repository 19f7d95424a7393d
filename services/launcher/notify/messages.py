"""Messages for events of a run, pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from services.launcher.control.budget import WARN_SHARE
from services.launcher.run_progress import Alarm
from services.launcher.state import Cleanup, Cost, Outcome, RunMode, RunState

_TEXT_CHARACTERS = 1_500
_LOG_CHARACTERS = 2_500


class MessageKind(StrEnum):
    """Subject of a message."""

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
    """Facts of a run that messages report; amounts are US dollars."""

    run_id: str
    name: str
    backend: str
    mode: RunMode = RunMode.TRAIN
    wanted: Mapping[str, int] = field(default_factory=dict[str, int])
    # Of one hour as the run was planned; None where nobody knows a price.
    estimate: float | None = None
    cost: Cost = field(default_factory=Cost)
    max_cost: float | None = None
    max_hours: float | None = None
    hours: float = 0.0
    error: str = ""
    outcome: Outcome = Outcome.NONE
    cleanup: Cleanup = Cleanup.PENDING
    cleanup_detail: str = ""
    tracker: str = ""
    # Which tasks it is about, as the spec selects them.
    tasks: str = ""
    # Share of held-out tasks that passed, in the first evaluation and in the newest.
    before: float | None = None
    after: float | None = None
    log: str = ""


def state_messages(state: RunState, facts: RunFacts, *, resumed: bool = False) -> list[Message]:
    """Return the messages about a change of state; most changes have none."""
    match state:
        case RunState.PREFLIGHT:
            return [_started_message(facts, resumed=resumed)]
        case RunState.COMPLETED:
            return [_completed_message(facts), *_leak_messages(facts)]
        case RunState.FAILED:
            return [_failed_message(facts), *_leak_messages(facts)]
        case RunState.STOPPED:
            return [_stopped_message(facts), *_leak_messages(facts)]
        case _:
            return []


def spending_messages(facts: RunFacts) -> dict[str, Message]:
    """Return a message for each limit that is near or exceeded, by a key that is the same each
    time."""
    told: dict[str, Message] = {}
    limits = (
        ("cost", facts.cost.accrued, facts.max_cost, "${:,.2f}", "launcher.max_cost"),
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
        pairs = (("Run", facts.run_id), ("Used", amounts), *_spent_facts(facts))
        told[f"{what}-{level}-{limit:g}"] = Message(MessageKind.BUDGET, title, pairs, text)
    return told


def alarm_message(run_id: str, alarm: Alarm) -> Message:
    """Return the message about a service's alarm, or about good news."""
    kind = MessageKind.NOTICE if alarm.severity == "notice" else MessageKind.ALARM
    name = alarm.rule.replace("_", " ")
    title = f"{kind.capitalize()}: {name}"
    title = title if alarm.scope == "all" else f"{title} of {alarm.scope}"
    text = ". ".join(part for part in (alarm.cause, alarm.fix) if part)
    pairs = (("Run", run_id), ("Step", str(alarm.step)))
    return Message(kind, title, pairs, text[:_TEXT_CHARACTERS])


def _started_message(facts: RunFacts, *, resumed: bool) -> Message:
    services = ", ".join(f"{count} {service}" for service, count in sorted(facts.wanted.items()))
    pairs = [
        ("Run", facts.run_id),
        ("Spec", facts.name),
        ("Mode", facts.mode.value.replace("_", " ")),
        ("Backend", facts.backend),
        ("Services", services),
        ("Tasks", facts.tasks),
        ("Cost", _estimate_text(facts)),
        ("Tracker", facts.tracker),
    ]
    kind, title = (
        (MessageKind.RESUMED, "Run resumed") if resumed else (MessageKind.STARTED, "Run started")
    )
    return Message(kind, title, tuple(pair for pair in pairs if pair[1]))


def _estimate_text(facts: RunFacts) -> str:
    if facts.estimate is None:
        return ""
    told = f"${facts.estimate:,.2f} an hour"
    if facts.max_hours is not None:
        total = facts.estimate * facts.max_hours
        told = f"{told}, ${total:,.2f} in {facts.max_hours:g} h"
    if facts.max_cost is not None:
        told = f"{told}; stops at ${facts.max_cost:,.2f}"
    return told


def _completed_message(facts: RunFacts) -> Message:
    return Message(MessageKind.COMPLETED, "Run completed", _ending_facts(facts))


def _failed_message(facts: RunFacts) -> Message:
    text = facts.error[:_TEXT_CHARACTERS]
    log = facts.log[-_LOG_CHARACTERS:]
    return Message(MessageKind.FAILED, "Run failed", _ending_facts(facts), text, log)


def _stopped_message(facts: RunFacts) -> Message:
    title = {
        Outcome.BUDGET: "Run stopped: its budget is spent",
        Outcome.DEADLINE: "Run stopped: its time is up",
        Outcome.CAPACITY: "Run stopped: nobody has such machines",
    }.get(facts.outcome, "Run cancelled")
    return Message(MessageKind.STOPPED, title, _ending_facts(facts), facts.error[:_TEXT_CHARACTERS])


def _leak_messages(facts: RunFacts) -> list[Message]:
    if facts.cleanup is not Cleanup.LEAK_SUSPECTED:
        return []
    pairs = (("Run", facts.run_id), ("Found", facts.cleanup_detail or "nobody could be asked"))
    text = "Something of the run may still cost money: look at the provider's own list, and reap."
    return [Message(MessageKind.LEAK_SUSPECTED, "Machines may be left running", pairs, text)]


def _ending_facts(facts: RunFacts) -> tuple[tuple[str, str], ...]:
    pairs = [
        ("Run", facts.run_id),
        ("Outcome", facts.outcome.value),
        ("Held-out pass@1", _before_after_text(facts)),
        ("Machines", facts.cleanup.value.replace("_", " ")),
        *_spent_facts(facts),
        ("Tracker", facts.tracker),
    ]
    return tuple(pair for pair in pairs if pair[1])


def _spent_facts(facts: RunFacts) -> list[tuple[str, str]]:
    return [("Spent", f"${facts.cost.accrued:,.2f}")] if facts.cost.accrued else []


def _before_after_text(facts: RunFacts) -> str:
    if facts.after is None:
        return ""
    after = f"{facts.after:.1%}"
    return after if facts.before is None else f"{facts.before:.1%} → {after}"

"""Selection of the messages about a run, from its events; most events have none."""

import time
from pathlib import Path
from typing import Any

from flotilla_launcher.config.launcher import LauncherConfig
from flotilla_launcher.notify import messages, run_facts
from flotilla_launcher.notify.messages import Message, MessageKind, RunFacts
from flotilla_launcher.notify.outbox import Outbox
from flotilla_launcher.run_progress import Alarm
from flotilla_launcher.state import RunState
from flotilla_launcher.store.ledger import RunEvent, StoredRun

EVENT_KINDS = ("state", "cost", "alarm")
# Alarm of a failing learner; the launcher's own message is more precise.
_RUN_FAILED = "run_failed"


def select_messages(
    stored: StoredRun,
    spec: dict[str, Any],
    config: LauncherConfig,
    event: RunEvent,
    runs: Path,
    outbox: Outbox,
) -> dict[str, Message]:
    """Return the messages about an event of a run, by keys that are the same each time."""
    if event.kind == "alarm":
        return _alarm_messages(stored, event)
    run_id, key = stored.run.run_id, f"state/{event.number}"
    state = RunState(event.body["state"]) if event.kind == "state" else None
    known = run_facts.gather_facts(
        stored,
        spec,
        config,
        runs,
        before=outbox.get_first_evaluation(run_id),
        now=time.time(),
        with_log=state is RunState.FAILED,
    )
    # Each start of a run warns of its limits again.
    limit = f"limit/{stored.begun:.0f}"
    found_messages = {
        f"{limit}/{name}": message for name, message in messages.spending_messages(known).items()
    }
    if state is not None:
        resumed = outbox.has_begun_before(run_id, key)
        for number, message in enumerate(state_messages(state, known, resumed=resumed)):
            found_messages[f"{key}/{number}"] = message
    return found_messages


def state_messages(state: RunState, facts: RunFacts, *, resumed: bool = False) -> list[Message]:
    """Return the messages about a change of state; most changes have none."""
    match state:
        case RunState.PREFLIGHT:
            return [messages.started_message(facts, resumed=resumed)]
        case RunState.COMPLETED:
            done = Message(MessageKind.COMPLETED, "Run completed", messages.ending_facts(facts))
            return [done, *messages.leak_messages(facts)]
        case RunState.FAILED:
            return [messages.failed_message(facts), *messages.leak_messages(facts)]
        case RunState.STOPPED:
            return [messages.stopped_message(facts), *messages.leak_messages(facts)]
        case _:
            return []


def _alarm_messages(stored: StoredRun, event: RunEvent) -> dict[str, Message]:
    body = dict(event.body)
    if body.pop("change") == "cleared" or body["rule"] == _RUN_FAILED:
        return {}
    message = messages.alarm_message(stored.run.run_id, Alarm(**body))
    return {f"alarm/{event.number}": message}

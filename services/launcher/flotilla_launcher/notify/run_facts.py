"""Facts of a run for messages: from the ledger, its spec, and its local files."""

import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flotilla_common.run_folder.dump_files import ANALYSES
from flotilla_launcher.config.launcher import LauncherConfig
from flotilla_launcher.control import budget
from flotilla_launcher.notify.messages import RunFacts
from flotilla_launcher.state import LEARNER
from flotilla_launcher.store import logs
from flotilla_launcher.store.ledger import StoredRun

FIRST_LAST = "eval/all/pass_at_1"
_REPLICA = re.compile(r"(env_gateway|learner|rollout)-\d+\b")


def gather_facts(
    stored: StoredRun,
    spec: Mapping[str, Any],
    config: LauncherConfig,
    runs: Path,
    *,
    before: float | None,
    now: float,
    with_log: bool,
) -> RunFacts:
    """Gather the facts of a run with this spec. `before` is the result of the first evaluation."""
    run, prices = stored.run, stored.prices
    learner: dict[str, Any] = spec.get(LEARNER, {})
    known = any(prices.values())
    log = log_tail(runs / run.run_id, run.error, config.notify.tail_lines) if with_log else ""
    analysis = runs / run.run_id / ANALYSES / "newest.html"
    return RunFacts(
        run,
        estimate=budget.hourly_cost(prices, run.wanted) if known else None,
        max_cost=config.max_cost,
        max_tokens=config.max_tokens,
        max_hours=config.max_hours,
        hours=max(0.0, (stored.ended or now) - stored.begun) / 3600,
        tracker=run.tracker_url,
        tracker_project=tracker_project(learner),
        link=config.notify.link or "",
        logs=f"{socket.gethostname()}:{runs / run.run_id / 'logs'}",
        analysis=f"{socket.gethostname()}:{analysis}" if analysis.exists() else "",
        model=describe_model(spec),
        steps=describe_steps(learner),
        tasks=selected_tasks(spec),
        before=before,
        after=stored.metrics.get(FIRST_LAST),
        log=log,
    )


def log_tail(run_dir: Path, error: str, lines: int) -> str:
    """Return the end of the log of the replica named in the error, else of the learner's."""
    named = _REPLICA.match(error)
    name = named.group(0) if named else "learner-0"
    return logs.read_last_lines(run_dir / "logs" / f"{name}.log", lines)


def tracker_project(learner: dict[str, Any]) -> str:
    """Return the URL of the run's project at wandb; empty unless the spec names the entity."""
    tracking: Any = learner.get("tracking", {})
    if "wandb" not in tracking.get("backends", ()) or not tracking.get("entity"):
        return ""
    project = tracking.get("project", "fleet-task-grpo")
    return f"https://wandb.ai/{tracking['entity']}/{project}"


def describe_model(spec: Mapping[str, Any]) -> str:
    """Describe the policy that is trained, and where: `Qwen/Qwen3-8B at a Tinker service`."""
    model = str(spec.get("policy", {}).get("model", ""))
    hosted = spec.get(LEARNER, {}).get("engine") == "tinker"
    return f"{model} at a Tinker service" if hosted else model


def describe_steps(learner: Mapping[str, Any]) -> str:
    """Describe the steps of a run: `50 of 8 tasks, 4 attempts at each`; after a warm start with
    `20 of imitation, ` before it."""
    parts = [learner.get(key) for key in ("steps", "groups_per_step", "group_size")]
    warm = (learner.get("warm_start") or {}).get("steps")
    before = "" if warm is None else f"{warm} of imitation, "
    return "" if None in parts else before + "{} of {} tasks, {} attempts at each".format(*parts)


def selected_tasks(spec: Mapping[str, Any]) -> str:
    """Describe the task file and the selection from it:
    `all.json; modality tool_use; max_tasks 100`. Of tasks that are prepared for the run, it is
    their source, and the options with which they are."""
    learner: dict[str, Any] = spec.get(LEARNER, {})
    parts = [learner["tasks"]] if "tasks" in learner else []
    for made in spec.get("prepare", ()):
        if parts and parts[0].startswith(f"{made['creates']}/"):
            options = (word[2:].replace("=", " ", 1) for word in made["command"] if "=" in word)
            parts = [made["command"][-1], *options]
    for key, value in learner.get("select", {}).items():
        if value not in (None, []):
            values = value if isinstance(value, list) else [value]
            parts.append(f"{key} {', '.join(map(str, values))}")
    return "; ".join(parts)

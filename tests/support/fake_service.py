"""Services that only register, send heartbeats and end as their spec section states."""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

from flotilla_common.files.durable_files import replace_file
from flotilla_common.process.run_membership import RaisedAlarm, ReplicaStatus
from flotilla_common.process.service_main import Runtime, run_service_process
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.config import ConfigModel
from flotilla_common.wire.registry import load_registry

ALARM = RaisedAlarm("late_heartbeats", "fleet", "error", 0, "3 of 9 were not heard of", "wait")


class FakeConfig(ConfigModel):
    """The behaviour of a fake. Steps are kept in a file, so that a restart continues."""

    steps: int = 3
    step_s: float = 0.05
    mode: str = "train"
    # `always` or `once`: exit with code 1 right after serving. `refuse`: with 2, before that.
    crash: str = ""
    deaf: bool = False
    # Start a process in a session of its own and leave it behind.
    litter: bool = False
    message: str = "hello"
    # While this file exists, an alarm is raised.
    alarmed_by: str = ""
    # While this file exists, no step is taken.
    held_by: str = ""
    # Variables whose values are in the message of the crash, as vendors' libraries have them.
    repeats: tuple[str, ...] = ()
    # Who trains or samples, as in a real spec.
    engine: Any = None
    # Tokens that a rollout uses of each kind from one heartbeat to the next, and a learner a step.
    tokens: int = 0


def run(service: str) -> None:
    run_service_process(service, FakeConfig, lambda: serve, doc="A fake.", registry=load_registry)


async def serve(runtime: Runtime[FakeConfig]) -> None:
    config = runtime.config
    print(f"{config.message} from {runtime.worker_id}", file=sys.stderr, flush=True)
    if config.crash == "refuse":
        raise ConfigError("learner.tasks: it is not there")
    if config.litter:
        await asyncio.create_subprocess_exec("sleep", "300", start_new_session=True)
    if config.deaf:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    status = ReplicaStatus("serving", serving=True)

    def reports() -> ReplicaStatus:
        alarmed = bool(config.alarmed_by) and Path(config.alarmed_by).exists()
        status.alarms = [ALARM] if alarmed else []
        status.metrics = _used_tokens(runtime.service, config, status)
        return status

    runtime.report_status(reports)
    await runtime.announce("127.0.0.1:9")
    _crash(runtime)
    if runtime.service == "learner":
        await _learn(runtime, status)
    else:
        await (asyncio.Event() if config.deaf else runtime.drain).wait()


def _used_tokens(service: str, config: FakeConfig, status: ReplicaStatus) -> dict[str, float]:
    """Return the metrics with the totals of tokens, if there are any."""
    metrics = {**status.metrics}
    if config.tokens and service == "learner":
        metrics["tokens/trained_total"] = float(status.step * config.tokens)
    if config.tokens and service == "rollout":
        for name in ("tokens/prompt_total", "tokens/sampled_total"):
            metrics[name] = metrics.get(name, 0.0) + config.tokens
    return metrics


def _crash(runtime: Runtime[FakeConfig]) -> None:
    marker = runtime.run_dir / f"crashed-{runtime.worker_id}"
    if runtime.config.crash == "always" or (runtime.config.crash == "once" and not marker.exists()):
        marker.touch()
        if runtime.config.repeats:
            reports = [os.environ.get(name) for name in runtime.config.repeats]
            runtime.log.warning(
                "a vendor answered", answer=reports, header=f"Bearer {runtime.token}"
            )
            raise ValueError(f"401 Unauthorized: {reports}, {runtime.token}")
        print("last words: out of luck", file=sys.stderr, flush=True)
        os._exit(1)


def _held(config: FakeConfig) -> bool:
    return bool(config.held_by) and Path(config.held_by).exists()


async def _learn(runtime: Runtime[FakeConfig], status: ReplicaStatus) -> None:
    config, path = runtime.config, runtime.run_dir / "steps"
    step = int(path.read_text()) if path.exists() else 0
    total = step if config.mode == "eval" else config.steps
    figures = {"reward/avg_pass_at_1": 0.5, "reward/booking/pass_at_1": 0.25}
    while step < total and not runtime.drain.is_set():
        await asyncio.sleep(config.step_s)
        if _held(config):
            continue
        step += 1
        # Whole, also if it is killed meanwhile.
        replace_file(path, str(step).encode())
        status.phase, status.step, status.total_steps = "training", step, total
        status.metrics = figures
    if step >= total:
        status.phase, status.step, status.total_steps = "done", step, total

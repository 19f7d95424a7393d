"""Probe of the policy's model: whether it can be trained; of one on the hub, access, commit and
size."""

import asyncio
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from flotilla_common.models.multimodal_models import check_trainable_folder
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.spec import PolicyConfig
from flotilla_launcher.doctor.findings import Finding, NotApplicableError, fail, ok, warn
from flotilla_launcher.doctor.machine_sizes import list_capacities
from flotilla_launcher.doctor.memory_estimate import format_gib
from flotilla_launcher.doctor.policy_files import (
    HubModel,
    NoPolicyError,
    fetch_policy_folder,
    is_policy_cached,
    look_up_policy,
)
from flotilla_launcher.doctor.run_context import RunContext, is_made_later, make_run_context
from flotilla_launcher.run_spec import RunSpec
from flotilla_launcher.state import LEARNER, ROLLOUT

COMMIT = re.compile(r"[0-9a-f]{40}")
RESOLVE_LIMIT_S = 60.0


async def probe_model(context: RunContext) -> list[Finding]:
    policy = context.shared.policy
    for service in context.policy_services:
        # Other implementations may not use a policy.
        context.get_section(service)
    if is_made_later(context, policy.model):
        raise NotApplicableError(f"[[prepare]] makes {policy.model}")
    local = await asyncio.to_thread(Path(policy.model).is_dir)
    found = None if local else await look_up_policy(context)
    folder = await fetch_policy_folder(context)
    at_tinker = context.plan.uses_tinker
    try:
        if not at_tinker:
            check_trainable_folder(folder)
    except ConfigError as error:
        return [fail(str(error), "docs/models.md lists what is trained")]
    if found is None:
        raise NotApplicableError(f"{policy.model} is a folder")
    if at_tinker:
        return [ok(f"of {policy.model}, only its tokenizer: at commit {found.commit[:12]}")]
    return [_report_commit(policy, found), *_check_room(context, found)]


def _report_commit(policy: PolicyConfig, found: HubModel) -> Finding:
    revision = policy.revision or "main"
    pinned = "" if revision == found.commit else f" (today's {revision}, which a run keeps)"
    return ok(
        f"{policy.model} takes {format_gib(found.size)}, at commit {found.commit[:12]}{pinned}"
    )


def _check_room(context: RunContext, found: HubModel) -> Iterator[Finding]:
    if context.backend == "local":
        if found.missing > found.free:
            what = (
                f"the model takes {format_gib(found.missing)} more in {found.cache}, and"
                f" {format_gib(found.free)} are free there"
            )
            yield fail(what, "free some, or set HF_HOME to a folder on a larger disk")
        return
    for service in context.policy_services:
        rooms = list(list_capacities(context.plan.config.sky, service, context.sky_home))
        small = [room for room in rooms if room.disk < found.size]
        if small:
            names = ", ".join(f"{room.name} ({format_gib(room.disk)})" for room in small)
            what = f"the model takes {format_gib(found.size)}, more than the disk of {names}"
            judge = fail if len(small) == len(rooms) else warn
            yield judge(what, f"set disk_size in launcher.sky.{service}")


async def resolve_commit(plan: RunSpec, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the hub's present commit of a spec's revision; None if there is none to keep: the
    model is a folder, the revision is a commit, or the hub fails, which the doctor reports. Raises
    ConfigError if this machine's run would have no model."""
    context = make_run_context(plan, Path(), environ)
    policy = context.shared.policy
    replaced = {LEARNER, ROLLOUT} & plan.config.modules.keys()
    pinned = COMMIT.fullmatch(policy.revision or "")
    if replaced or pinned or is_made_later(context, policy.model):
        return None
    if await asyncio.to_thread(Path(policy.model).is_dir):
        return None
    try:
        async with asyncio.timeout(RESOLVE_LIMIT_S):
            return (await look_up_policy(context)).commit
    except TimeoutError:
        return None
    except NoPolicyError as error:
        if context.backend == "local" and not await is_policy_cached(context):
            raise ConfigError(str(error)) from error
        return None

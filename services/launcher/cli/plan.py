"""`flotilla plan`: what a spec would start, where, and for how much; nothing is started."""

import asyncio
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from services.common.config import canonical_json, load_spec
from services.common.errors import ConfigError
from services.common.text import say
from services.launcher.backends.sky import cost_estimate, resources, tasks
from services.launcher.backends.sky.code_bundle import FOLDER
from services.launcher.backends.sky.sdk_prices import prices
from services.launcher.backends.sky.single_machine import REMOTE, whole_run
from services.launcher.config.launcher import LauncherConfig
from services.launcher.control import budget, spec_check
from services.launcher.plan import BadSpecError, Plan, log_path, read_spec
from services.launcher.ports import BackendError, Launch
from services.launcher.state import LEARNER, ROLLOUT, SERVICES, Key

OK, BAD_SPEC = 0, 2
# Stands for the launcher in names: files are the same wherever they are made.
_OWNER = "run"


def plan(
    path: Path, runs: Path, overrides: Sequence[str], out: Path | None, *, one_machine: bool
) -> int:
    """Print the plan; its files go to `out`, or to the terminal too."""
    try:
        spec = load_spec(path, overrides)
        read = read_spec(canonical_json(spec))
        _refuse_wishes(read)
        asyncio.run(spec_check.check(read))
        _print_machine(read) if one_machine else _print_services(read, runs)
        found = files(path, spec, read, runs, overrides, one_machine=one_machine)
    except (ConfigError, BadSpecError, BackendError) as error:
        say(f"error: {error}")
        return BAD_SPEC
    if out is None:
        for name, text in found.items():
            say(f"\n# {name}\n{text}", end="")
        return OK
    head = header(path, overrides, out, one_machine=one_machine)
    out.mkdir(parents=True, exist_ok=True)
    for name, text in found.items():
        (out / name).write_text(f"{head}{text}", encoding="utf-8")
        say(f"wrote {out / name}")
    return OK


def header(path: Path, overrides: Sequence[str], out: Path, *, one_machine: bool) -> str:
    """The comment that a file begins with: the command that makes it again."""
    flag = ("--one-machine",) if one_machine else ()
    words = ("flotilla", "plan", str(path), *overrides, *flag, "--out", str(out))
    # A value may have lines.
    return "".join(f"# {line}\n" for line in f"Made by: {shlex.join(words)}".splitlines())


def files(
    path: Path,
    spec: dict[str, Any],
    read: Plan,
    runs: Path,
    overrides: Sequence[str] = (),
    *,
    one_machine: bool,
) -> dict[str, str]:
    """SkyPilot's task files by name; `spec` and `read` have the overrides. Further replicas of a
    service differ from its first in their number alone."""
    if one_machine:
        task = whole_run(str(path), spec, read.config, overrides)
        return {f"{read.name}.yaml": cost_estimate.dump([task])}
    site = _offerer().site(_launch(read, runs, (SERVICES[0], 0)), runs / read.name / FOLDER)
    members = (ROLLOUT,) if read.config.sky.mode == "group" else SERVICES
    texts = {
        f"{read.name}-{m}.yaml": cost_estimate.dump([tasks.task(site, (m, 0))]) for m in members
    }
    if read.config.sky.mode == "cluster":
        return texts
    group = tasks.group(site, cost_estimate.static_keys(read.config))
    return {f"{read.name}-group.yaml": cost_estimate.dump(group), **texts}


def _refuse_wishes(read: Plan) -> None:
    """At once, and all of them; asking the services takes seconds."""
    problems = [text for s in SERVICES for text in resources.check(read.config.sky, s)]
    if problems:
        raise BadSpecError("\n".join(problems))


def _print_machine(read: Plan) -> None:
    machines = resources.machines_of(read.config.sky, LEARNER)
    price = prices().cheapest(machines)
    shown = ", or ".join(tasks.describe(machine) for machine in machines.candidates)
    say(f"{read.name}: all services on one machine: {shown}; {_dollars(price)}")
    if lost := cost_estimate.unkept(read.spec.get(LEARNER, {}), read.config):
        say(
            f"warning: {lost}; {cost_estimate.KEEP}, or launch with --env {REMOTE}=s3://BUCKET/PREFIX"
        )


def _print_services(read: Plan, runs: Path) -> None:
    """Services, replicas, candidates, prices, warnings."""
    sky = read.config.sky
    kind = "one managed Job Group" if sky.mode == "group" else "a cluster per replica"
    say(f"{read.name}: {kind}; network {sky.network}")
    prices: dict[str, float] = {}
    known = True
    for service, count in read.config.replicas().items():
        launch = _launch(read, runs, (service, 0))
        offer = _offerer().offer(launch, runs / read.name / FOLDER)
        say(f"  {service} x {count}: {offer.resources}; {_dollars(offer.dollars_per_hour)} each")
        prices[service] = offer.dollars_per_hour or 0.0
        known = known and offer.dollars_per_hour is not None
    total = budget.estimate(prices, read.config.replicas())
    beyond = "" if known else ", and what is not known" if total else ""
    say(f"  in total: {_dollars(total if total or known else None)}{beyond}")
    for line in _limits(read.config, prices, total):
        say(f"  {line}")
    for warning in cost_estimate.warnings(read.spec, read.config):
        say(f"warning: {warning}")
    if read.config.backend != "sky":
        say(
            'note: launcher.backend is "local": flotilla train starts this on this machine;'
            " --launcher.backend=sky starts it on those"
        )


def _limits(config: LauncherConfig, prices: Mapping[str, float], total: float) -> Iterator[str]:
    """What the run may come to, where something is known of its price."""
    if not total:
        return
    parts = budget.by_service(prices, config.replicas(), config.max_hours)
    if parts:
        each = ", ".join(f"{service} ${dollars:,.2f}" for service, dollars in parts.items())
        whole = f"${sum(parts.values()):,.2f}"
        yield f"in launcher.max_hours, {config.max_hours:g} h: {whole} ({each})"
    if config.max_cost is not None:
        hours = config.max_cost / total
        yield f"launcher.max_cost, ${config.max_cost:,.2f}, is reached in {hours:.1f} h"


def _offerer() -> cost_estimate.Offerer:
    return cost_estimate.Offerer(_OWNER, prices())


def _launch(read: Plan, runs: Path, key: Key) -> Launch:
    return Launch(
        run_id=read.name,
        key=key,
        command=(),
        secrets={},
        log=log_path(runs / read.name, key),
        spec_json=read.text,
        config=read.config,
    )


def _dollars(price: float | None) -> str:
    return "price not known" if price is None else f"${price:.2f}/h"

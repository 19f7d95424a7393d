"""`flotilla plan`: shows the machines and prices of a spec, without starting it."""

import asyncio
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.config import canonical_json
from flotilla_common.spec.spec_loading import load_spec
from flotilla_common.text.printable_text import print_visible
from flotilla_launcher.backends.ports import BackendError, LaunchSpec
from flotilla_launcher.backends.sky import (
    cost_estimate,
    machine_candidates,
    single_machine,
    task_documents,
)
from flotilla_launcher.backends.sky.code_bundle import CODE_FOLDER
from flotilla_launcher.backends.sky.price_catalog import cheapest_price
from flotilla_launcher.backends.sky.sdk_prices import choose_price_source
from flotilla_launcher.backends.sky.single_machine import REMOTE, whole_run_task
from flotilla_launcher.cli import plan_memory
from flotilla_launcher.cli.command_runner import BAD_SPEC, OK
from flotilla_launcher.config.launcher import LauncherConfig
from flotilla_launcher.control import budget, spec_check
from flotilla_launcher.run_spec import BadSpecError, RunSpec, parse_spec
from flotilla_launcher.state import LEARNER, ReplicaKey
from flotilla_launcher.store.run_files import log_path

# Placeholder for the launcher's name, so that the files do not depend on where they are made.
_OWNER = "run"


def print_plan(
    path: Path,
    runs: Path,
    overrides: Sequence[str],
    out: Path | None,
    *,
    one_machine: bool,
    gpus: tuple[int, ...] = (),
) -> int:
    """Print the plan; write its files to `out`, or print them if it is None."""
    try:
        read = parse_spec(canonical_json(load_spec(path, overrides)))
        _check_resources(read, one_machine=one_machine)
        memory = asyncio.run(_check(read, runs, gpus))
        _print_machine(read) if one_machine else _print_services(read, runs)
        for line in memory:
            print_visible(line)
        found = make_task_files(path, read, runs, overrides, one_machine=one_machine)
    except (ConfigError, BackendError) as error:
        print_visible(f"error: {error}")
        return BAD_SPEC
    if out is None:
        for name, text in found.items():
            print_visible(f"\n# {name}\n{text}", end="")
        return OK
    _write_files(out, format_header(path, overrides, out, one_machine=one_machine), found)
    return OK


async def _check(read: RunSpec, runs: Path, gpus: tuple[int, ...]) -> Sequence[str]:
    """Let the services check the spec; return lines about memory. Raises BadSpecError."""
    await spec_check.check_tables(read)
    _, lines = await asyncio.gather(
        spec_check.check_spec(read), plan_memory.describe_memory(read, runs, gpus)
    )
    return lines


def _write_files(out: Path, head: str, found: Mapping[str, str]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for name, text in found.items():
        (out / name).write_text(f"{head}{text}", encoding="utf-8")
        print_visible(f"wrote {out / name}")


def format_header(path: Path, overrides: Sequence[str], out: Path, *, one_machine: bool) -> str:
    """Format the header comment of a file: the command that generates it."""
    flag = ("--one-machine",) if one_machine else ()
    words = ("flotilla", "plan", str(path), *overrides, *flag, "--out", str(out))
    # An override's value may contain newlines.
    return "".join(f"# {line}\n" for line in f"Made by: {shlex.join(words)}".splitlines())


def make_task_files(
    path: Path,
    read: RunSpec,
    runs: Path,
    overrides: Sequence[str] = (),
    *,
    one_machine: bool,
) -> dict[str, str]:
    """Return SkyPilot's task files by name; `read` includes the overrides. Each service
    has one file: its further replicas differ only in their number."""
    if one_machine:
        task = whole_run_task(str(path), read, overrides)
        return {f"{read.name}.yaml": cost_estimate.dump_yaml([task])}
    site = _make_offerer().make_site(
        _make_launch(read, runs, (LEARNER, 0)), runs / read.name / CODE_FOLDER
    )
    return {
        f"{read.name}-{service}.yaml": cost_estimate.dump_yaml(
            [task_documents.replica_task(site, (service, 0))]
        )
        for service in read.services
    }


def _check_resources(read: RunSpec, *, one_machine: bool) -> None:
    """Check the requested resources of all services, before the slower checks by the services
    themselves. Raises BadSpecError with all problems."""
    sky = read.config.sky
    problems = [
        text
        for service in read.services
        for text in machine_candidates.check_candidates(sky, service)
    ]
    problems += single_machine.check_gpus(read.config) if one_machine else []
    if problems:
        raise BadSpecError("\n".join(problems))


def _print_machine(read: RunSpec) -> None:
    machines = machine_candidates.machines_of(read.config.sky, LEARNER)
    price = cheapest_price(machines, choose_price_source())
    shown = ", or ".join(
        task_documents.describe_machine(machine) for machine in machines.candidates
    )
    print_visible(f"{read.name}: all services on one machine: {shown}; {_format_price(price)}")
    if lost := cost_estimate.describe_unkept(read.tables.get(LEARNER, {}), read.config):
        print_visible(
            f"warning: {lost}; {cost_estimate.KEEP_HINT}, or launch with --env {REMOTE}=s3://BUCKET/PREFIX"
        )


def _print_services(read: RunSpec, runs: Path) -> None:
    sky = read.config.sky
    print_visible(f"{read.name}: a cluster per replica; network {sky.network}")
    prices: dict[str, float] = {}
    known = True
    for service, count in read.replica_counts().items():
        launch = _make_launch(read, runs, (service, 0))
        offer = _make_offerer().make_offer(launch, runs / read.name / CODE_FOLDER)
        print_visible(
            f"  {service} x {count}: {offer.resources};"
            f" {_format_price(offer.dollars_per_hour)} each"
        )
        prices[service] = offer.dollars_per_hour or 0.0
        known = known and offer.dollars_per_hour is not None
    total = budget.hourly_cost(prices, read.replica_counts())
    beyond = "" if known else ", plus unknown prices" if total else ""
    print_visible(f"  in total: {_format_price(total if total or known else None)}{beyond}")
    for line in (*_format_limits(read.config, prices, total), *_format_token_limits(read)):
        print_visible(f"  {line}")
    for warning in cost_estimate.list_warnings(read):
        print_visible(f"warning: {warning}")
    if read.config.backend != "sky":
        print_visible(
            'note: launcher.backend is "local": flotilla train starts the run on this machine;'
            " --launcher.backend=sky starts it on the machines above"
        )


def _format_limits(
    config: LauncherConfig, prices: Mapping[str, float], total: float
) -> Iterator[str]:
    """Yield lines about the run's cost limits, if its price is at least partly known."""
    if not total:
        return
    parts = budget.cost_by_service(prices, config.replica_counts(), config.max_hours)
    if parts:
        each = ", ".join(f"{service} ${dollars:,.2f}" for service, dollars in parts.items())
        whole = f"${sum(parts.values()):,.2f}"
        yield f"in launcher.max_hours, {config.max_hours:g} h: {whole} ({each})"
    if config.max_cost is not None:
        hours = config.max_cost / total
        yield f"launcher.max_cost, ${config.max_cost:,.2f}, is reached in {hours:.1f} h"


def _format_token_limits(read: RunSpec) -> Iterator[str]:
    """Yield lines about what a Tinker service bills to the run, besides its machines."""
    config, prices = read.config, read.config.token_prices
    if not read.uses_tinker:
        return
    if prices is None:
        yield "tokens of the Tinker service: price unknown; launcher.token_prices sets it"
    else:
        yield (
            f"tokens of the Tinker service, a million: ${prices.prompt:g} of prompts,"
            f" ${prices.sample:g} sampled, ${prices.train:g} trained; launcher.max_cost"
            f" {'is not set' if config.max_cost is None else 'includes them'}"
        )
    if config.max_tokens is not None:
        yield f"launcher.max_tokens: {config.max_tokens:,}"


def _make_offerer() -> cost_estimate.OfferMaker:
    return cost_estimate.OfferMaker(_OWNER, choose_price_source())


def _make_launch(read: RunSpec, runs: Path, key: ReplicaKey) -> LaunchSpec:
    return LaunchSpec(
        run_id=read.name,
        key=key,
        command=(),
        secrets={},
        log=log_path(runs / read.name, key),
        spec=read,
    )


def _format_price(price: float | None) -> str:
    return "price unknown" if price is None else f"${price:.2f}/h"

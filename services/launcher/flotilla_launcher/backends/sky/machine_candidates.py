"""Candidate machines of an attempt, and checks for requests that no cloud can fulfil, pure."""

from collections.abc import Callable, Sequence

from flotilla_launcher.backends.sky.status import Place
from flotilla_launcher.config.sky import Machine, Machines, SkyConfig
from flotilla_launcher.run_spec import RunSpec, machines_key, may_span
from flotilla_launcher.state import LEARNER, SERVICES

# Distance from a run's port to the last Ray port of a replica: rollouts have one port each.
_PORTS = 3 + 255
_LAST_PORT = 65535
# Limits of SkyPilot's clouds, as of its version 0.14.
SINGLE_NODE = frozenset(
    {
        *("hyperbolic", "primeintellect", "runpod", "seeweb", "shadeform"),
        *("vast", "verda", "vsphere", "yotta"),
    }
)
NO_SPOT = frozenset(
    {"lambda", "slurm", "ssh", "cudo", "do", "fluidstack", "hyperbolic", "paperspace", "shadeform"}
)
NO_PORTS = frozenset({"slurm", "hyperbolic", "mithril", "verda"})


def machines_of(config: SkyConfig, service: str) -> Machines:
    """Return the machines that a service requests, at the one cloud if the spec names one."""
    requested, cloud = config.machines_for(service), config.cloud
    if cloud is None:
        return requested
    there = [machine for machine in requested.candidates if cloud_of(machine) in ("", cloud)]
    # `check_candidates` has refused a list without any.
    kept = [m if m.infra else m.model_copy(update={"infra": cloud}) for m in there or [Machine()]]
    return requested.model_copy(update={"ordered" if requested.ordered else "any_of": tuple(kept)})


def cloud_of(machine: Machine) -> str:
    """Return `aws` of `aws/us-east-1`; empty where SkyPilot chooses."""
    cloud = (machine.infra or "").partition("/")[0].lower()
    return {"k8s": "kubernetes"}.get(cloud, cloud)


def region_of(machine: Machine) -> str:
    """Return `us-east-1` of `aws/us-east-1`; empty where SkyPilot chooses."""
    return [*(machine.infra or "").split("/"), ""][1].replace("*", "")


def zone_of(machine: Machine) -> str:
    """Return `us-east-1a` of `aws/us-east-1/us-east-1a`; empty where SkyPilot chooses."""
    return [*(machine.infra or "").split("/"), "", ""][2].replace("*", "")


def narrow_to_place(machine: Machine, place: Place) -> Machine | None:
    """Return a candidate narrowed to the machine at this place; None if the machine there
    cannot be of this candidate."""
    wanted = parse_accelerator(machine.accelerators)
    if wanted is not None and wanted != parse_accelerator(place.accelerators):
        return None
    return _move_to_place(machine, place)


def _move_to_place(machine: Machine, place: Place) -> Machine | None:
    """Return a candidate at this place; None if it is for another one."""
    region = region_of(machine)
    if cloud_of(machine) not in ("", place.cloud) or region not in ("", place.region):
        return None
    if place.zone and zone_of(machine) not in ("", place.zone):
        return None
    return machine if region else _at(machine, str(place))


def _at(machine: Machine, infra: str) -> Machine:
    return machine.model_copy(update={"infra": infra})


def parse_accelerator(text: str | None) -> tuple[str, float] | None:
    """Parse h100 and 8 of `H100:8`; the count is one where no number is given."""
    name, _, count = (text or "").lower().partition(":")
    return (name, float(count or 1)) if name else None


def is_on_slurm(config: SkyConfig, service: str) -> bool:
    """Return whether a replica can be nowhere but on Slurm."""
    return {cloud_of(machine) for machine in machines_of(config, service).candidates} == {"slurm"}


def check_candidates(config: SkyConfig, service: str) -> list[str]:
    """List what is wrong with a service's candidates, each with its key and the way out."""
    machines = config.machines_for(service)
    key = "any_of" if machines.any_of else "ordered"
    problems: list[str] = []
    if machines.num_nodes > 1 and (why := _why_one_machine(config, service)):
        problems.append(f"launcher.sky.{service}: num_nodes = {machines.num_nodes}: {why}")
    clouds = {cloud_of(machine) for machine in machines.candidates}
    if config.cloud is not None and not clouds & {"", config.cloud}:
        named = ", ".join(sorted(clouds))
        problems.append(
            f"launcher.sky.cloud: launcher.sky.{service} has no candidate at {config.cloud!r}; its"
            f" candidates are at {named}"
        )
    for index, machine in enumerate(machines.candidates):
        where = f"launcher.sky.{service}"
        if machines.any_of or machines.ordered:
            where += f".{key}.{index}"
        problems += [f"{where}: {text}" for text in _list_refusals(machine, machines, config)]
    return problems


def _list_refusals(machine: Machine, machines: Machines, config: SkyConfig) -> list[str]:
    cloud, found = cloud_of(machine) or config.cloud or "", list[str]()
    if config.cloud not in (None, cloud):
        # A candidate at another cloud is dropped.
        return []
    if machines.num_nodes > 1 and cloud in SINGLE_NODE:
        found.append(
            f"{cloud} has no multi-node clusters; set num_nodes = 1 and take a machine with more"
            " GPUs, or another cloud"
        )
    if machine.use_spot and cloud in NO_SPOT:
        found.append(f"{cloud} has no spot machines; set use_spot = false")
    if config.network == "public" and cloud in NO_PORTS:
        found.append(f'{cloud} opens no ports; set launcher.sky.network = "private"')
    return found


def _why_one_machine(config: SkyConfig, service: str) -> str:
    """Explain why a service cannot have replicas of several machines; empty where it can."""
    if not may_span(service):
        return (
            f"a replica of {service} is one machine, only a learner's ranks and a rollout's engine"
            f" are on several; set num_nodes = 1, and scale by launcher.{service}.replicas"
        )
    if config.network == "public":
        who = "ranks" if service == LEARNER else "workers of an engine"
        return (
            f"{who} of several machines speak gloo or NCCL, which neither encrypt nor authenticate;"
            ' set launcher.sky.network = "private", or num_nodes = 1'
        )
    last = config.port + _PORTS
    if last > _LAST_PORT:
        return (
            f"Ray joins machines at ports from {config.port + 2} to {last}, of which the last is"
            f" {_LAST_PORT}; set launcher.sky.port to {_LAST_PORT - _PORTS} or lower"
        )
    return ""


def check_machines(spec: RunSpec, service: str) -> list[str]:
    """List where the service's part of a spec names another number of machines than it gets."""
    named, machines = spec.machines_of(service), machines_of(spec.config.sky, service).num_nodes
    if named in (1, machines):
        return []
    return [
        f"{machines_key(service)} = {named}, but launcher.sky.{service}.num_nodes = {machines}: a"
        f" replica is as many machines as SkyPilot finds; set num_nodes to {named}, or leave"
        f" {machines_key(service)} out"
    ]


def machines_for_attempt(machines: Machines, attempt: int) -> Machines:
    """Return the candidates of an attempt, counted from 1.

    Within one attempt SkyPilot goes through them by itself. Each further attempt begins one
    candidate later, in the order written: one that has machines may give broken ones."""
    if attempt <= 1 or len(machines.candidates) == 1:
        return machines
    turn = (attempt - 1) % len(machines.candidates)
    turned = machines.candidates[turn:] + machines.candidates[:turn]
    return Machines(ordered=turned, num_nodes=machines.num_nodes)


def with_place_last(
    machines: Machines,
    lost: Place,
    regions_of: Callable[[Machine], Sequence[str]],
    price_of: Callable[[Machine], float | None],
) -> Machines:
    """Return the candidates such that the place where a machine was lost is tried last.

    A candidate without a region is divided into those that `regions_of` lists, the best first.
    Candidates of `any_of` are ordered by price, as SkyPilot would order them."""
    first: list[Machine] = []
    last: list[Machine] = []
    for machine in machines.candidates:
        there = _move_to_place(machine, lost)
        if there is None:
            first.append(machine)
            continue
        known = [] if region_of(machine) else regions_of(_at(machine, lost.cloud))
        elsewhere = [
            _at(machine, f"{lost.cloud}/{region}") for region in known if region != lost.region
        ]
        first += elsewhere
        # One that may be at other clouds, or in regions that are not known, stays as it is.
        last.append(there if elsewhere and cloud_of(machine) else machine)
    if machines.any_of:
        first.sort(key=lambda machine: price_of(machine) or float("inf"))
    return Machines(ordered=(*first, *last), num_nodes=machines.num_nodes)


def check_shared_network(config: SkyConfig) -> list[str]:
    """Explain why services with candidates on different clouds cannot share a private network."""
    if config.network == "public":
        return []
    clouds = {cloud_of(m) for s in SERVICES for m in machines_of(config, s).candidates}
    if len(clouds - {""}) <= 1:
        return []
    return [
        f'launcher.sky.network is "private", but the candidates are on {", ".join(sorted(clouds))}:'
        ' machines of different clouds do not reach each other; set network = "public", or name'
        " one cloud for all services"
    ]

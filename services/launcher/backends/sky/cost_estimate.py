"""What a replica on machines would use and cost, pure but for the catalog."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import yaml

from services.launcher.backends.sky import resources, tasks
from services.launcher.backends.sky.status import Place
from services.launcher.config.launcher import LauncherConfig
from services.launcher.config.sky import Machine, Machines
from services.launcher.ports import BackendError, Launch, Offer
from services.launcher.state import LEARNER, SERVICES, Key

REMOTE = "learner.checkpoint.remote"
KEEP = f"set it to a URL that machines reach, as in --{REMOTE}=s3://BUCKET/PREFIX"
# What stands in plans for what is known only once a run has begun.
REGISTRY_TO_COME = "LAUNCHER:PORT"


class Prices(Protocol):
    """Where prices come from."""

    def cheapest(self, machines: Machines) -> float | None: ...

    def price(self, machine: Machine) -> float | None: ...


@dataclass(frozen=True, slots=True)
class Offerer:
    """Makes offers for one launcher; `owner` marks its names."""

    owner: str
    prices: Prices

    def offer(self, launch: Launch, code: Path) -> Offer:
        """Raises BackendError where `check` does."""
        self.check(launch)
        service = launch.key[0]
        site = self.site(launch, code)
        machines = resources.machines_of(launch.config.sky, service)
        return Offer(
            resources=self._describe(machines),
            task_yaml=dump([tasks.task(site, launch.key)]),
            dollars_per_hour=self.prices.cheapest(machines),
        )

    def price(self, launch: Launch, place: Place) -> float | None:
        """$/h of a replica on the machines that it has got."""
        machines = resources.machines_of(launch.config.sky, launch.key[0])
        taken = [resources.at(machine, place) for machine in machines.candidates]
        found = tuple(machine for machine in taken if machine is not None)
        wish = Machines(ordered=found, num_nodes=machines.num_nodes)
        return self.prices.cheapest(wish) if found else None

    def check(self, launch: Launch) -> None:
        """Raises BackendError with everything that is wrong with the service's candidates."""
        problems = resources.check(launch.config.sky, launch.key[0])
        if problems:
            raise BackendError("\n".join(problems))

    def site(self, launch: Launch, code: Path) -> tasks.Site:
        """What the replicas of a launch's run have in common."""
        registry = launch.registry or REGISTRY_TO_COME
        return tasks.site_of(launch, self.owner, registry, str(code))

    def _describe(self, machines: Machines) -> str:
        each = [self._one(machine) for machine in machines.candidates]
        several = f"{machines.num_nodes} machines, each " if machines.num_nodes > 1 else ""
        if machines.any_of and len(each) > 1:
            return f"{several}the cheapest of: {'; '.join(each)}"
        return several + ", or else ".join(each)

    def _one(self, machine: Machine) -> str:
        price = self.prices.price(machine)
        cost = f" (${price:.2f}/h)" if price is not None else ""
        return f"{tasks.describe(machine)}{cost}"


def warnings(spec: Mapping[str, Any], config: LauncherConfig) -> list[str]:
    """What a person should know before money is spent."""
    found = list(resources.shared_infra(config.sky))
    if lost := unkept(spec.get(LEARNER, {}), config):
        found.append(f"{lost}; {KEEP}")
    if config.max_hours is None:
        found.append(
            "launcher.max_hours is not set: machines end by themselves only after"
            f" {tasks.UNLIMITED_HOURS:g} h, or when the launcher is silent"
        )
    if config.max_cost is None:
        found.append("launcher.max_cost is not set: nothing bounds what the run may cost")
    return found


def unkept(learner: Mapping[str, Any], config: LauncherConfig) -> str:
    """What nobody has any more once the learner's machine is gone; empty where something is kept,
    or nothing is trained. `learner` is its part of the spec, with or without defaults."""
    if LEARNER in config.modules:
        # Whatever it trains, its keys are not these.
        return ""
    trains = learner.get("mode", "train") == "train" and learner.get("steps") != 0
    if not trains or (learner.get("checkpoint") or {}).get("remote") is not None:
        return ""
    how = "go with the learner's machine"
    if resources.on_slurm(config.sky, LEARNER):
        # Homes are on a server there: what is lost with a node is found again, until the end.
        how = "are removed by SkyPilot with the folder of their Slurm job when it has ended"
    return f"{REMOTE} is not set: the trained model and all checkpoints {how}"


def dump(documents: Sequence[dict[str, Any]]) -> str:
    """YAML as people write it; scripts as blocks."""
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=100)


class _Dumper(yaml.SafeDumper):
    pass


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _nothing(dumper: yaml.SafeDumper, _: None) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:null", "")


_Dumper.add_representer(str, _text)
_Dumper.add_representer(type(None), _nothing)


def static_keys(config: LauncherConfig) -> list[Key]:
    """The replicas that a run's group declares."""
    shape = config.replicas()
    return [
        (service, index)
        for service in SERVICES
        for index in range(shape[service])
        if tasks.is_static((service, index))
    ]

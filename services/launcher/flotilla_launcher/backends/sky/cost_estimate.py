"""Estimate of what a replica on machines would use and cost, pure but for the catalog."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from flotilla_launcher.backends.ports import BackendError, LaunchSpec, ResourceOffer
from flotilla_launcher.backends.sky import machine_candidates, task_documents
from flotilla_launcher.backends.sky.price_catalog import cheapest_price
from flotilla_launcher.backends.sky.status import Place
from flotilla_launcher.config import tinker_rules
from flotilla_launcher.config.launcher import LauncherConfig
from flotilla_launcher.config.sky import Machine, Machines
from flotilla_launcher.run_spec import RunSpec
from flotilla_launcher.state import LEARNER, ROLLOUT

REMOTE = "learner.checkpoint.remote"
KEEP_HINT = f"set it to a URL that machines reach, as in --{REMOTE}=s3://BUCKET/PREFIX"
# Placeholder in plans for an address that is known only once a run has begun.
REGISTRY_TO_COME = "LAUNCHER:PORT"


@dataclass(frozen=True, slots=True)
class OfferMaker:
    """Maker of one launcher's offers; `owner` marks its names, `price_of` returns $/h of one
    machine."""

    owner: str
    price_of: Callable[[Machine], float | None]

    def make_offer(self, launch: LaunchSpec, code: Path) -> ResourceOffer:
        """Make the offer for a replica. Raises BackendError where `check_candidates` does."""
        self.check_candidates(launch)
        service = launch.key[0]
        site = self.make_site(launch, code)
        machines = machine_candidates.machines_of(launch.spec.config.sky, service)
        return ResourceOffer(
            resources=self._describe_machines(machines),
            task_yaml=dump_yaml([task_documents.replica_task(site, launch.key)]),
            dollars_per_hour=cheapest_price(machines, self.price_of),
        )

    def price_at_place(self, launch: LaunchSpec, place: Place) -> float | None:
        """Return $/h of a replica on the machines that it has got."""
        machines = machine_candidates.machines_of(launch.spec.config.sky, launch.key[0])
        taken = [
            machine_candidates.narrow_to_place(machine, place) for machine in machines.candidates
        ]
        found = tuple(machine for machine in taken if machine is not None)
        allocated = Machines(ordered=found, num_nodes=machines.num_nodes)
        return cheapest_price(allocated, self.price_of) if found else None

    def check_candidates(self, launch: LaunchSpec) -> None:
        """Check the service's candidates. Raises BackendError with everything that is wrong
        with them."""
        service, spec = launch.key[0], launch.spec
        problems = machine_candidates.check_candidates(spec.config.sky, service)
        problems += machine_candidates.check_machines(spec, service)
        if problems:
            raise BackendError("\n".join(problems))

    def make_site(self, launch: LaunchSpec, code: Path) -> task_documents.RunSite:
        """Return what the replicas of a launch's run have in common."""
        registry = launch.registry or REGISTRY_TO_COME
        return task_documents.site_from_launch(launch, self.owner, registry, str(code))

    def _describe_machines(self, machines: Machines) -> str:
        each = [self._describe_candidate(machine) for machine in machines.candidates]
        several = f"{machines.num_nodes} machines, each " if machines.num_nodes > 1 else ""
        if machines.any_of and len(each) > 1:
            return f"{several}the cheapest of: {'; '.join(each)}"
        return several + ", or else ".join(each)

    def _describe_candidate(self, machine: Machine) -> str:
        price = self.price_of(machine)
        cost = f" (${price:.2f}/h)" if price is not None else ""
        return f"{task_documents.describe_machine(machine)}{cost}"


def list_warnings(spec: RunSpec) -> list[str]:
    """List what a person should know before money is spent."""
    config = spec.config
    found = list(machine_candidates.check_shared_network(config.sky))
    if lost := describe_unkept(spec.tables.get(LEARNER, {}), config):
        found.append(f"{lost}; {KEEP_HINT}")
    found += list_idle_gpus(spec)
    if config.max_hours is None:
        found.append(
            "launcher.max_hours is not set: machines end by themselves only after"
            f" {task_documents.UNLIMITED_HOURS:g} h, or when the launcher is silent"
        )
    if config.max_cost is None:
        found.append("launcher.max_cost is not set: nothing bounds what the run may cost")
    return found


def list_idle_gpus(spec: RunSpec) -> list[str]:
    """List the services that request GPUs which a run at a Tinker service leaves idle."""
    if spec.config.backend != "sky" or not spec.uses_tinker:
        return []
    return [
        f"launcher.sky.{service} requests GPUs, and with {tinker_rules.ENGINE} no process uses one"
        for service in (LEARNER, ROLLOUT)
        if any(m.accelerators for m in spec.config.sky.machines_for(service).candidates)
    ]


def describe_unkept(learner: Mapping[str, Any], config: LauncherConfig) -> str:
    """Describe what is lost with the learner's machine; "" if uploads are kept or nothing is
    trained.

    `learner` is its part of the spec, with or without defaults."""
    if LEARNER in config.modules:
        # A replaced learner has other keys.
        return ""
    trains = learner.get("mode", "train") == "train" and learner.get("steps") != 0
    if not trains or (learner.get("checkpoint") or {}).get("remote") is not None:
        return ""
    how = "go with the learner's machine"
    if machine_candidates.is_on_slurm(config.sky, LEARNER):
        # Slurm's homes are on a server: files survive a lost node, but not the end of the job.
        how = "are removed by SkyPilot with the folder of their Slurm job when it has ended"
    return f"{REMOTE} is not set: the trained model and all checkpoints {how}"


def dump_yaml(documents: Sequence[dict[str, Any]]) -> str:
    """Return YAML as people write it; scripts as blocks."""
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=100)


class _Dumper(yaml.SafeDumper):
    pass


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _represent_none(dumper: yaml.SafeDumper, _: None) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:null", "")


_Dumper.add_representer(str, _represent_text)
_Dumper.add_representer(type(None), _represent_none)

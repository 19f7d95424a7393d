"""SkyPilot's task documents for a run's replicas: plain dictionaries, secrets by name alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flotilla_launcher.backends.ports import LaunchSpec
from flotilla_launcher.backends.sky import names
from flotilla_launcher.backends.sky.machine_candidates import cloud_of, machines_of
from flotilla_launcher.backends.sky.machine_script import WatchedReplica, run_script, weights_port
from flotilla_launcher.config.launcher import LauncherConfig
from flotilla_launcher.config.sky import Machine, Machines
from flotilla_launcher.run_spec import RunSpec, may_span
from flotilla_launcher.security import service_variables
from flotilla_launcher.state import GATEWAY, LEARNER, ReplicaKey, RunMode

Document = dict[str, Any]
# Limit of a machine's work if the spec sets no `max_hours`.
UNLIMITED_HOURS = 168.0
# Time beyond `max_hours` and draining, for finding and setting up machines.
_SLACK_S = 600.0


@dataclass(frozen=True, slots=True)
class RunSite:
    """Everything that all replicas of a run have in common on machines.

    `registry` is the address of the run's registry as the machines reach it, `workdir` the
    folder of code that they get."""

    run_id: str
    owner: str
    registry: str
    workdir: str
    spec: RunSpec
    mode: RunMode = RunMode.TRAIN

    @property
    def config(self) -> LauncherConfig:
        return self.spec.config

    def replica_name(self, key: ReplicaKey) -> str:
        return names.member_name(self.owner, self.run_id, key)


def hard_limit_s(config: LauncherConfig) -> int:
    """Return the seconds after which a machine ends its work in any case."""
    hours = config.max_hours or UNLIMITED_HOURS
    return int(hours * 3600 + config.drain_s + _SLACK_S)


def site_from_launch(launch: LaunchSpec, owner: str, registry: str, workdir: str) -> RunSite:
    """Return the site of the run that a launch belongs to."""
    return RunSite(launch.run_id, owner, registry, workdir, launch.spec, launch.mode)


def replica_task(site: RunSite, key: ReplicaKey, machines: Machines | None = None) -> Document:
    """Return the task of one replica, on a cluster of its own: by default on the machines that the
    spec requests."""
    service = key[0]
    machines = machines or machines_of(site.config.sky, service)
    document: Document = {"name": site.replica_name(key)}
    if machines.num_nodes > 1:
        document["num_nodes"] = machines.num_nodes
    document["resources"] = _replica_resources(site, service, machines)
    document["workdir"] = site.workdir
    wanted = service_variables.required_secrets(site.spec, service)
    document["secrets"] = dict.fromkeys(wanted)
    document["setup"] = f"set -e\n{site.config.sky.setup}\n"
    document["run"] = run_script(_watched_replica(site, key))
    limits = _slurm_limits(site, machines)
    if limits:
        document["config"] = limits
    return document


def fill_secrets(document: Document, values: Mapping[str, str]) -> Document:
    """Fill in the secrets' values, and add the optional ones that the launcher has."""
    named = dict.fromkeys((*document["secrets"], *values))
    return {**document, "secrets": {name: values.get(name) for name in named}}


def _watched_replica(site: RunSite, key: ReplicaKey) -> WatchedReplica:
    sky = site.config.sky
    return WatchedReplica(
        run_id=site.run_id,
        key=key,
        module=site.spec.module_of(key[0]),
        python=sky.python,
        registry=site.registry,
        port=sky.port,
        public=sky.network == "public",
        hard_limit_s=hard_limit_s(site.config),
        evaluate=site.mode is RunMode.EVAL_ONLY,
        nodes=machines_of(sky, key[0]).num_nodes,
        further_module=site.spec.further_module_of(key[0]) if may_span(key[0]) else "",
        metrics=site.config.metrics,
    )


def _replica_resources(site: RunSite, service: str, machines: Machines) -> Document:
    found = resources_from_machines(machines)
    sky = site.config.sky
    if sky.network == "public" and service in (LEARNER, GATEWAY):
        found["ports"] = [sky.port, weights_port(sky.port)] if service == LEARNER else [sky.port]
    found["labels"] = _replica_labels(site, service)
    found["autostop"] = {"idle_minutes": sky.idle_minutes, "down": True, "wait_for": "jobs"}
    return found


def resources_from_machines(machines: Machines) -> Document:
    """Return one candidate, or the list of them."""
    candidates = [machine.model_dump(exclude_defaults=True) for machine in machines.candidates]
    if len(candidates) == 1:
        return candidates[0]
    return {"any_of" if machines.any_of else "ordered": candidates}


def _replica_labels(site: RunSite, service: str) -> dict[str, str]:
    """Return labels that all clouds take: lower case, digits and hyphens."""
    own = {
        "flotilla-run": names.slugify_run_id(site.run_id),
        "flotilla-service": service.replace("_", "-"),
        "flotilla-owner": site.owner,
    }
    return {**site.config.sky.labels, **own}


def _slurm_limits(site: RunSite, machines: Machines) -> Document:
    """Return the time limit of Slurm's allocation, which ends by itself.

    A longer time than its partition allows would wait for ever, so only a limit from the spec
    is passed on."""
    clouds = {cloud_of(machine) for machine in machines.candidates}
    if "slurm" not in clouds or site.config.max_hours is None:
        return {}
    minutes, seconds = divmod(hard_limit_s(site.config), 60)
    hours, minutes = divmod(minutes, 60)
    return {"slurm": {"sbatch_options": {"time": f"{hours:02}:{minutes:02}:{seconds:02}"}}}


def describe_machine(machine: Machine) -> str:
    """Describe a machine to people: `lambda H200:4, 200+ GiB, spot`."""
    parts = [machine.accelerators or f"{machine.cpus or 'any'} CPUs"]
    if machine.memory:
        parts.append(f"{machine.memory} GiB")
    if machine.disk_size or machine.disk_tier:
        size = f" {machine.disk_size} GB" if machine.disk_size else ""
        parts.append(f"disk{size}{f' of tier {machine.disk_tier}' if machine.disk_tier else ''}")
    if machine.image_id:
        parts.append(f"image {machine.image_id}")
    if machine.use_spot:
        parts.append("spot")
    return f"{machine.infra or 'any cloud'} {', '.join(parts)}"

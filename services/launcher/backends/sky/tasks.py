"""A run's replicas as SkyPilot's task documents: plain dictionaries, secrets by name alone."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from services.launcher.backends.sky import names
from services.launcher.backends.sky.machine_script import Watched, run_script, weights_port
from services.launcher.backends.sky.resources import cloud_of, machines_of, of_attempt, of_group
from services.launcher.config.launcher import LauncherConfig
from services.launcher.config.sky import Machine, Machines
from services.launcher.control.agent_reports import EXIT_PREEMPTED
from services.launcher.ports import Launch
from services.launcher.security import secret_names
from services.launcher.state import GATEWAY, LEARNER, Key, RunMode

Document = dict[str, Any]
# A machine ends by itself after so long, if the spec sets no `max_hours`.
UNLIMITED_HOURS = 168.0
# What a run may take beyond `max_hours` and its draining: machines are looked for and set up.
_SLACK_S = 600.0
_TERMINATION_DELAY = "60s"


@dataclass(frozen=True, slots=True)
class Site:
    """What all replicas of a run have in common on machines.

    `registry` is the address of the run's registry as the machines reach it, `workdir` the folder
    of code that they get.
    """

    run_id: str
    owner: str
    registry: str
    workdir: str
    config: LauncherConfig
    spec: Mapping[str, Any] = field(default_factory=dict[str, Any])
    mode: RunMode = RunMode.TRAIN

    def name(self, key: Key) -> str:
        return names.member_name(self.owner, self.run_id, key)

    @property
    def group(self) -> str:
        return names.group_name(self.owner, self.run_id)

    @property
    def groups(self) -> tuple[str, str]:
        """What the run's group may be called: by its learner if that is alone in it."""
        return self.group, self.learner

    @property
    def learner(self) -> str:
        return self.name((LEARNER, 0))


def hard_limit_s(config: LauncherConfig) -> int:
    """When a machine's work is ended, whoever is alive."""
    hours = config.max_hours or UNLIMITED_HOURS
    return int(hours * 3600 + config.drain_s + _SLACK_S)


def site_of(launch: Launch, owner: str, registry: str, workdir: str) -> Site:
    """The site of the run that a launch belongs to."""
    spec = json.loads(launch.spec_json or "{}")
    return Site(launch.run_id, owner, registry, workdir, launch.config, spec, launch.mode)


def task(site: Site, key: Key, attempt: int = 1) -> Document:
    """One replica: the task of a managed job, or in mode `cluster` of a cluster of its own."""
    service = key[0]
    sky = site.config.sky
    declared = sky.mode == "group" and is_static(key)
    machines = (of_group if declared else of_attempt)(machines_of(sky, service), attempt)
    document: Document = {"name": site.name(key)}
    if machines.num_nodes > 1:
        document["num_nodes"] = machines.num_nodes
    document["resources"] = _resources(site, service, machines)
    document["workdir"] = site.workdir
    wanted = secret_names.of_service(site.spec, site.config, service)
    document["secrets"] = dict.fromkeys(wanted)
    document["setup"] = f"set -e\n{sky.setup}\n"
    document["run"] = run_script(_watched(site, key))
    limits = _slurm_limits(site, machines)
    if limits:
        document["config"] = limits
    return document


def with_secrets(document: Document, values: Mapping[str, str]) -> Document:
    """With values in place of the names, and with what only the launcher that starts it knew that
    it has."""
    named = dict.fromkeys((*document["secrets"], *values))
    return {**document, "secrets": {name: values.get(name) for name in named}}


def group(site: Site, keys: list[Key], attempt: int = 1) -> list[Document]:
    """The Job Group of a run: header, learner, gateways. When the learner ends, all end."""
    # SkyPilot gives the only task of a group the group's name, and then misses its own.
    header: Document = {
        "name": site.group if len(keys) > 1 else site.learner,
        "execution": "parallel",
        "primary_tasks": [site.learner],
        "termination_delay": {"default": _TERMINATION_DELAY},
        # Names within a group exist on Kubernetes only; the registry tells peers of peers.
        "inter_connection": False,
    }
    return [header, *(task(site, key, attempt) for key in sorted(keys, key=_learner_first))]


def is_static(key: Key) -> bool:
    """Whether a replica is declared with its group; others join and leave it on their own."""
    return key[0] in (LEARNER, GATEWAY)


def _learner_first(key: Key) -> tuple[bool, str, int]:
    return (key[0] != LEARNER, *key)


def _watched(site: Site, key: Key) -> Watched:
    sky = site.config.sky
    return Watched(
        run_id=site.run_id,
        key=key,
        module=site.config.modules.get(key[0], f"services.{key[0]}"),
        python=sky.python,
        registry=site.registry,
        port=sky.port,
        public=sky.network == "public",
        hard_limit_s=hard_limit_s(site.config),
        evaluate=site.mode is RunMode.EVAL_ONLY,
        nodes=machines_of(sky, key[0]).num_nodes,
        metrics=site.config.metrics,
    )


def _resources(site: Site, service: str, machines: Machines) -> Document:
    found = resources_of(machines)
    sky = site.config.sky
    if sky.network == "public" and service in (LEARNER, GATEWAY):
        found["ports"] = [sky.port, weights_port(sky.port)] if service == LEARNER else [sky.port]
    found["labels"] = _labels(site, service)
    if sky.mode == "group":
        # A replica that crashes is the watcher's and the launcher's business; SkyPilot replaces
        # machines that are taken away, and those whose watcher saw that coming.
        found["job_recovery"] = {
            "max_restarts_on_errors": 0,
            "recover_on_exit_codes": [EXIT_PREEMPTED],
        }
    else:
        found["autostop"] = {"idle_minutes": sky.idle_minutes, "down": True, "wait_for": "jobs"}
    return found


def resources_of(machines: Machines) -> Document:
    """One candidate, or the list of them."""
    candidates = [machine.model_dump(exclude_defaults=True) for machine in machines.candidates]
    if len(candidates) == 1:
        return candidates[0]
    return {"any_of" if machines.any_of else "ordered": candidates}


def _labels(site: Site, service: str) -> dict[str, str]:
    """Clouds take lower case, digits and hyphens in labels, all of them."""
    own = {
        "flotilla-run": names.slug(site.run_id),
        "flotilla-service": service.replace("_", "-"),
        "flotilla-owner": site.owner,
    }
    return {**site.config.sky.labels, **own}


def _slurm_limits(site: Site, machines: Machines) -> Document:
    """Slurm ends an allocation by itself. A longer time than its partition allows would wait for
    ever, so only a limit from the spec is passed on."""
    clouds = {cloud_of(machine) for machine in machines.candidates}
    if "slurm" not in clouds or site.config.max_hours is None:
        return {}
    minutes, seconds = divmod(hard_limit_s(site.config), 60)
    hours, minutes = divmod(minutes, 60)
    return {"slurm": {"sbatch_options": {"time": f"{hours:02}:{minutes:02}:{seconds:02}"}}}


def describe(machine: Machine) -> str:
    """For people: `lambda H200:4, 200+ GiB, spot`."""
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

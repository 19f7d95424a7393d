"""A run's spec as the launcher reads it: parsed once, where it enters, then passed on."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from flotilla_common.process.own_version import own_version
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.config import canonical_json
from flotilla_common.spec.spec import SharedConfig, parse_shared
from flotilla_common.spec.spec_loading import expand_spec
from flotilla_common.text.parsing import ParseError, TextLimits, TooLargeError, parse_json
from flotilla_launcher.config import imitation_rules, sampling_rules, tinker_rules
from flotilla_launcher.config.launcher import LauncherConfig, parse_launcher
from flotilla_launcher.state import LEARNER, ROLLOUT

# For each service whose replica may span several machines: the table that sets their number and
# the port for Ray, and the room with the module that further ones run.
_SPANNING = {LEARNER: ("rank", "ranks"), ROLLOUT: ("engine", "nodes")}
_LIMITS = TextLimits(bytes=2**21, values=2**16)


class BadSpecError(ConfigError):
    """The spec cannot be run; the message names the key and the cause."""


@dataclass(frozen=True)
class RunSpec:
    """A run's spec: all its tables, of which the launcher understands `shared` and its own
    `config`."""

    tables: Mapping[str, Any]
    shared: SharedConfig
    config: LauncherConfig

    @property
    def name(self) -> str:
        return self.shared.name

    @cached_property
    def text(self) -> str:
        """Its canonical JSON."""
        return canonical_json(self.tables)

    @property
    def sha256(self) -> bytes:
        return hashlib.sha256(self.text.encode()).digest()

    @property
    def uses_tinker(self) -> bool:
        """Whether a Tinker service trains and samples, so that no process has GPUs or weights."""
        return tinker_rules.uses_tinker(self.tables)

    @property
    def services(self) -> tuple[str, ...]:
        """The services that the run needs, which it has replicas of."""
        return imitation_rules.needed_services(self.tables)

    @property
    def late_services(self) -> tuple[str, ...]:
        """Those of them that would wait for the end of a warm start."""
        return imitation_rules.unused_at_first(self.tables)

    def replica_counts(self) -> dict[str, int]:
        """Return the number of replicas of each service that the run needs."""
        counts = self.config.replica_counts()
        return {service: counts[service] for service in self.services}

    def machines_of(self, service: str) -> int:
        """Return the number of machines of one replica of a service. The service must have
        checked the spec."""
        if not may_span(service):
            return 1
        table, _ = _SPANNING[service]
        nodes: int = self.tables.get(service, {}).get(table, {}).get("nodes", 1)
        return nodes

    def module_of(self, service: str) -> str:
        """Return the module that is a service's program."""
        return self.config.modules.get(service, f"flotilla_{service}")

    def further_module_of(self, service: str) -> str:
        """Return the module that the further machines of a service's replica run."""
        _, room = _SPANNING[service]
        return f"{self.module_of(service)}.{room}"

    def with_revision(self, commit: str) -> "RunSpec":
        """Return the spec with its model pinned to a commit of the hub."""
        return self._with_shared(policy={**self.tables["policy"], "revision": commit})

    def with_writer(self) -> "RunSpec":
        """Return the spec with the Flotilla that writes it, which the run's services read."""
        return self._with_shared(written_by=own_version().to_dict())

    def _with_shared(self, **keys: Any) -> "RunSpec":
        tables = {**self.tables, **keys}
        return replace(self, tables=tables, shared=parse_shared(tables, where="spec"))


def parse_spec(text: str, where: str = "spec") -> RunSpec:
    """Parse a spec's JSON text; `where` names it. Raises ConfigError."""
    try:
        tables = parse_json(text, _LIMITS, strict=True)
    except TooLargeError as error:
        raise BadSpecError(f"the spec is too large: {error}") from error
    except ParseError as error:
        raise BadSpecError(f"the spec is not JSON: {error}") from error
    if not isinstance(tables, dict):
        raise BadSpecError("the spec is not a JSON object")
    return read_spec(expand_spec(tables, where=where), where)


def read_spec(tables: Mapping[str, Any], where: str = "spec") -> RunSpec:
    """Read the parts of a loaded spec that the launcher understands. Raises ConfigError."""
    shared, config = parse_shared(tables, where=where), parse_launcher(tables, where=where)
    problems = [
        *tinker_rules.list_contradictions(tables, config),
        *sampling_rules.list_contradictions(tables),
    ]
    if problems:
        raise BadSpecError("\n".join(f"{where}: {problem}" for problem in problems))
    return RunSpec(tables, shared, config)


def may_span(service: str) -> bool:
    """Return whether one replica of a service may span several machines."""
    return service in _SPANNING


def machines_key(service: str) -> str:
    """Return the key that sets the number of machines of one replica of a service."""
    return f"{service}.{_SPANNING[service][0]}.nodes"


def ray_port_key(service: str) -> str:
    """Return the key that sets the Ray port of a replica's machines."""
    return f"{service}.{_SPANNING[service][0]}.ray_port"

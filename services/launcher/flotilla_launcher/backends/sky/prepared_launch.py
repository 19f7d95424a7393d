"""A launch that is ready to be submitted."""

from dataclasses import dataclass, field

from flotilla_launcher.backends.ports import LaunchSpec
from flotilla_launcher.backends.sky import task_documents
from flotilla_launcher.config.sky import Machines
from flotilla_launcher.state import ReplicaKey


@dataclass(frozen=True, slots=True)
class PreparedLaunch:
    """A replica's launch with its site, its secrets and the machines to request, in this order."""

    launch: LaunchSpec
    site: task_documents.RunSite
    machines: Machines
    secrets: dict[str, str] = field(repr=False)

    @property
    def key(self) -> ReplicaKey:
        return self.launch.key

    @property
    def name(self) -> str:
        return self.site.replica_name(self.key)

    @property
    def limit_s(self) -> float:
        return self.launch.spec.config.sky.provision.timeout_s

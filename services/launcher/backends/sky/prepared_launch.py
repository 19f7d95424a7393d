"""A launch that is ready to be submitted, in either mode."""

from dataclasses import dataclass, field

from services.launcher.backends.ports import LaunchSpec
from services.launcher.backends.sky import task_documents
from services.launcher.state import ReplicaKey


@dataclass(frozen=True, slots=True)
class PreparedLaunch:
    """A replica's launch with its site and its secrets."""

    launch: LaunchSpec
    site: task_documents.RunSite
    secrets: dict[str, str] = field(repr=False)

    @property
    def key(self) -> ReplicaKey:
        return self.launch.key

    @property
    def name(self) -> str:
        return self.site.replica_name(self.key)

    @property
    def limit_s(self) -> float:
        return self.launch.config.sky.provision.timeout_s

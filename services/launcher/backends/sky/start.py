"""What is to be started, in either mode."""

from dataclasses import dataclass, field

from services.launcher.backends.sky import tasks
from services.launcher.ports import Launch
from services.launcher.state import Key


@dataclass(frozen=True, slots=True)
class Start:
    """A replica to start: where, and with what."""

    launch: Launch
    site: tasks.Site
    secrets: dict[str, str] = field(repr=False)

    @property
    def key(self) -> Key:
        return self.launch.key

    @property
    def name(self) -> str:
        return self.site.name(self.key)

    @property
    def limit_s(self) -> float:
        return self.launch.config.sky.provision.timeout_s

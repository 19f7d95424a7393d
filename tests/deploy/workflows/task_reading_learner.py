"""A fake learner that knows the tasks selected for it, as the real one does."""

from services.common.process.service_main import run_service_process
from services.learner.config.sampling import SelectConfig
from services.wire.registry import load_registry
from tests.support.fake_service import FakeConfig, serve


class SelectingConfig(FakeConfig):
    """The fake's settings, and the selection that a workflow may change."""

    select: SelectConfig = SelectConfig()


if __name__ == "__main__":
    run_service_process(
        "learner", SelectingConfig, lambda: serve, doc="A fake.", registry=load_registry
    )

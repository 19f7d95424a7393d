"""A fake learner that knows the data prepared for it, as the real one does."""

from flotilla_common.process.service_main import run_service_process
from flotilla_common.wire.registry import load_registry
from tests.support.fake_service import FakeConfig, serve


class PreparedConfig(FakeConfig):
    """The fake's settings, and the files that `[data]` makes."""

    tasks: str
    data: str


if __name__ == "__main__":
    run_service_process(
        "learner", PreparedConfig, lambda: serve, doc="A fake.", registry=load_registry
    )

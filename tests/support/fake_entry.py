"""The entry of the fake services, which imports only what its arguments need."""

import os
import sys

from tests.support.stand_in import stand_in

# The address of a forge.
FORGE_VARIABLE = "FLOTILLA_TEST_FORGE"
_FAKE = "tests.support.fake_service"


def run_fake(service: str) -> None:
    """Run a fake service, or stand in for a fork of a forge if there is one: it has imported what a
    fake needs, which is most of what a fake takes."""
    forge = os.environ.pop(FORGE_VARIABLE, "")
    if forge and _FAKE not in sys.modules:
        stand_in(forge, ["-m", f"tests.support.fake_{service}", *sys.argv[1:]])
    from tests.support.fake_service import run

    run(service)

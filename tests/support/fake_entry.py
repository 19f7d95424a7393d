"""The entry of the fake services, which imports only what its arguments need."""

import os
import sys

from tests.support.stand_in import stand_in

# The address of a forge.
FORGE_VARIABLE = "FLOTILLA_TEST_FORGE"


def run_fake(service: str) -> None:
    """Run a fake service, or have a forge check its part of the spec if there is one: its fork has
    imported what a fake needs, which is most of what a check takes."""
    forge = os.environ.pop(FORGE_VARIABLE, "")
    if forge and "--check-config" in sys.argv:
        stand_in(forge, ["-m", f"tests.support.fake_{service}", *sys.argv[1:]])
    from tests.support.fake_service import run

    run(service)

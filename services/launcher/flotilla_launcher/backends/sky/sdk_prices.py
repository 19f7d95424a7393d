"""Prices as SkyPilot computes them where it is installed, else from the catalog it left."""

import io
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from flotilla_common.telemetry import log
from flotilla_launcher.backends.sky.blocking_calls import start_in_thread
from flotilla_launcher.backends.sky.machine_candidates import cloud_of
from flotilla_launcher.backends.sky.price_catalog import PriceCatalog, open_catalog
from flotilla_launcher.config.sky import Machine

_HOUR_S = 3600.0
# The catalog answers for these; without a cloud SkyPilot would query all of them.
_OWN = frozenset({"", "slurm", "kubernetes", "ssh"})
# Pause before an unreachable catalog is fetched again.
_AGAIN_S = 600.0
# Stands for all clouds.
_ANY = "any"
# SkyPilot fetches without a limit; users do not wait for a price that long.
_PATIENCE_S = 5.0
_log = log.get_logger(__name__)


def choose_price_source() -> Callable[[Machine], float | None]:
    """Return the best source of $/h of a machine that this environment has."""
    catalog = open_catalog()
    prices = _shared_sky_prices(catalog) if find_spec("sky") is not None else catalog
    return prices.machine_price


@cache
def _shared_sky_prices(catalog: PriceCatalog) -> "SkyPrices":
    """Return one instance for all callers, so that a failing SkyPilot is detected only once."""
    return SkyPrices(catalog)


class SkyPrices:
    """Prices from SkyPilot's optimizer; `catalog` answers where that does not."""

    def __init__(self, catalog: PriceCatalog) -> None:
        self._catalog = catalog
        # Time of the last failure of each cloud, or of SkyPilot as a whole.
        self._away: dict[str, float] = {}

    def machine_price(self, machine: Machine) -> float | None:
        cloud = cloud_of(machine)
        if cloud in _OWN or self._is_away(cloud) or self._is_away(_ANY):
            return self._catalog.machine_price(machine)
        try:
            # SkyPilot fetches missing catalogs, and prints its progress.
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                sky = import_module("sky")
                return start_in_thread(lambda: _compute_price(sky, machine)).result(_PATIENCE_S)
        # Prices are informative: no error of SkyPilot may end a plan.
        except Exception as error:  # noqa: BLE001
            self._away[_ANY if isinstance(error, TimeoutError) else cloud] = time.monotonic()
            _log.info("SkyPilot has no price", machine=machine.infra, error=str(error)[:200])
            return self._catalog.machine_price(machine)

    def _is_away(self, cloud: str) -> bool:
        return time.monotonic() - self._away.get(cloud, -_AGAIN_S) < _AGAIN_S


def _compute_price(sky: Any, machine: Machine) -> float | None:
    requested = sky.Resources(**machine.model_dump(exclude_defaults=True))
    feasible = requested.cloud.get_feasible_launchable_resources(requested)
    return min((each.get_cost(_HOUR_S) for each in feasible.resources_list), default=None)

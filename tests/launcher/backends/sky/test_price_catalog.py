"""Prices from SkyPilot's catalog."""

from pathlib import Path

import pytest

from flotilla_launcher.backends.sky.cost_estimate import OfferMaker
from flotilla_launcher.backends.sky.price_catalog import PriceCatalog, cheapest_price
from flotilla_launcher.backends.sky.status import Place
from flotilla_launcher.config.sky import Machine, Machines
from flotilla_launcher.state import ROLLOUT
from tests.support import sky_launches
from tests.support.sky_launches import VMS

_CONFIG = "slurm: {pricing: {cpu: 0.04, memory: 0.005, accelerators: {H100: 2.5}}}\n"


@pytest.fixture
def catalog(tmp_path: Path) -> PriceCatalog:
    folder = tmp_path / "catalogs/v8/lambda"
    folder.mkdir(parents=True)
    (folder / "vms.csv").write_text(VMS)
    (tmp_path / "config.yaml").write_text(_CONFIG)
    return PriceCatalog(tmp_path)


@pytest.mark.parametrize(
    ("machine", "price"),
    [
        (Machine(infra="lambda", accelerators="H100:1"), 2.29),
        (Machine(infra="lambda/us-east-1", accelerators="h100"), 2.49),
        (Machine(accelerators="H100:8"), 23.92),
        (Machine(infra="lambda", accelerators="H100:1", use_spot=True), 1.1),
        (Machine(infra="lambda", cpus="2+", memory="16+"), 0.2),
        (Machine(infra="lambda", cpus="2"), None),
        (Machine(infra="lambda", accelerators="H100:1", memory="400+"), None),
        (Machine(infra="lambda", accelerators="H100:1", max_hourly_cost=1.0), None),
        (Machine(infra="lambda", accelerators="B200:1"), None),
        (Machine(infra="aws", accelerators="H100:1"), None),
        (Machine(infra="slurm/mini/gpu", accelerators="H100:2", cpus="4+", memory="10"), 5.21),
    ],
)
def test_the_cheapest_machine_that_fits_is_the_price(
    catalog: PriceCatalog, machine: Machine, price: float | None
) -> None:
    found = catalog.machine_price(machine)
    assert found == (None if price is None else pytest.approx(price))


def test_of_several_candidates_the_one_that_is_tried_first_counts(catalog: PriceCatalog) -> None:
    dear = Machine(infra="lambda/us-east-1", accelerators="H100:1")
    cheap = Machine(infra="lambda/us-west-1", accelerators="H100:1")
    unknown = Machine(infra="aws", accelerators="H100:1")
    price_of = catalog.machine_price
    assert cheapest_price(Machines(any_of=(unknown, dear, cheap)), price_of) == 2.29
    assert cheapest_price(Machines(ordered=(dear, cheap)), price_of) == 2.49
    assert cheapest_price(Machines(ordered=(unknown, cheap)), price_of) == 2.29


def test_a_replica_of_several_machines_costs_them_all(catalog: PriceCatalog) -> None:
    machine = Machine(infra="lambda/us-east-1", accelerators="H100:1")
    twice = Machines(ordered=(machine,), num_nodes=2)
    assert cheapest_price(twice, catalog.machine_price) == 4.98


@pytest.mark.parametrize(
    ("place", "price"),
    [
        (Place("lambda", "us-east-1", "H100:1"), 2.49),
        (Place("lambda", "us-west-1", "H100:1.0"), 2.29),
        (Place("lambda", "us-east-1", "H100:8"), 23.92),
        (Place("aws", "us-east-1", "H100:1"), None),
        (Place("lambda", "us-east-1"), None),
        (Place("slurm", "mini", "H100:2"), 5.21),
    ],
)
def test_a_replica_costs_what_the_candidate_does_that_came(
    catalog: PriceCatalog, place: Place, price: float | None
) -> None:
    wish = {
        "ordered": [
            {"infra": "slurm/mini/gpu", "accelerators": "H100:2", "cpus": "4+", "memory": "10"},
            {"infra": "lambda", "accelerators": "h100"},
            {"accelerators": "H100:8"},
        ]
    }
    launch = sky_launches.launch((ROLLOUT, 0), sky_launches.config(rollout=wish))
    found = OfferMaker("owner", catalog.machine_price).price_at_place(launch, place)
    assert found == (None if price is None else pytest.approx(price))


def test_without_a_catalog_there_is_no_price(tmp_path: Path) -> None:
    empty = PriceCatalog(tmp_path / "nothing")
    assert empty.machine_price(Machine(accelerators="H100:1")) is None
    assert empty.machine_price(Machine(infra="slurm/mini", cpus="1")) is None

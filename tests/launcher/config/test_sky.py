"""`launcher.sky.cloud` restricts a run to one cloud; `launcher.sky.secrets` are names."""

import pytest
from pydantic import ValidationError

from flotilla_launcher.backends.sky.machine_candidates import check_candidates, machines_of
from flotilla_launcher.config.sky import Machine, Machines, SkyConfig
from flotilla_launcher.state import LEARNER, ROLLOUT

ANYWHERE = Machine(accelerators="H100:1")
LAMBDA = Machine(infra="lambda/us-east-1", accelerators="H100:1")
RUNPOD = Machine(infra="runpod", accelerators="H100:1")


def test_candidates_elsewhere_are_left_out_and_those_of_no_cloud_go_there() -> None:
    config = SkyConfig(cloud="lambda", learner=Machines(ordered=(RUNPOD, LAMBDA, ANYWHERE)))
    assert check_candidates(config, LEARNER) == []
    found = machines_of(config, LEARNER)
    assert [machine.infra for machine in found.ordered] == ["lambda/us-east-1", "lambda"]
    assert all(machine.accelerators == "H100:1" for machine in found.ordered)


def test_a_service_without_requests_gets_that_cloud_too() -> None:
    found = machines_of(SkyConfig(cloud="nebius"), ROLLOUT)
    assert [machine.infra for machine in found.candidates] == ["nebius"]


def test_a_cloud_without_candidates_is_refused_by_name() -> None:
    config = SkyConfig(cloud="vast", learner=Machines(any_of=(RUNPOD, LAMBDA)))
    (problem,) = check_candidates(config, LEARNER)
    assert problem.startswith("launcher.sky.cloud: launcher.sky.learner has no candidate at 'vast'")
    assert "lambda, runpod" in problem


@pytest.mark.parametrize("name", ["*", "AWS_*", "", "A=b", "1ST"])
def test_a_secret_that_is_no_name_of_a_variable_is_refused(name: str) -> None:
    assert SkyConfig(secrets=("MY_KEY", "_x1")).secrets == ("MY_KEY", "_x1")
    with pytest.raises(ValidationError) as refused:
        SkyConfig(secrets=("MY_KEY", name))
    assert (
        f"{name!r} is not the name of an environment variable: list each variable by name"
        in str(refused.value)
    )

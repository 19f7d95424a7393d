"""The help of a service, which lists every key of its tables."""

from collections.abc import Iterator

import pytest

from flotilla_common.process.arguments import parse_arguments
from flotilla_common.spec.config import ConfigModel, find_tables
from flotilla_env_gateway.config.gateway import EnvGatewayConfig
from flotilla_learner.config.learner import LearnerConfig
from flotilla_rollout.config.rollout import RolloutConfig

SERVICES = {"env_gateway": EnvGatewayConfig, "learner": LearnerConfig, "rollout": RolloutConfig}


def tables(cls: type[ConfigModel], path: str) -> Iterator[tuple[str, type[ConfigModel]]]:
    yield path, cls
    for name, field in cls.model_fields.items():
        for rest, table in find_tables(field.annotation):
            yield from tables(table, f"{path}.{field.alias or name}{rest}")


@pytest.mark.parametrize("service", SERVICES)
def test_the_help_lists_the_keys_of_all_tables(
    service: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(service, SERVICES[service], "a service", ["--help"])
    text = capsys.readouterr().out
    found = list(tables(SERVICES[service], service))
    for path, table in found:
        for name, field in table.model_fields.items():
            assert f"  --{path}.{field.alias or name}" in text, (path, name)
    below = [line.partition("=")[0] for line in text.splitlines() if line.startswith("  --")]
    assert len(below) == len(set(below)), "a key is listed once"
    assert service != "env_gateway" or any(".NAME." in line for line in below)

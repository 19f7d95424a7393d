"""Misspelled names of environments, where the server would accept any."""

from pathlib import Path
from typing import Any

import pytest

from flotilla_common.spec.spec_loading import load_spec
from flotilla_launcher.doctor.findings import Status
from flotilla_launcher.doctor.misnamed_environments import find_misnamed
from tests.launcher.doctor import own_environment
from tests.support.doctor import check, probed, subject


def findings_for(counts: dict[str, int], backend: str = "mcp", **environments: str) -> list[str]:
    """Findings for this many tasks of each; `environments` are the spec's, with their backends."""
    declared = {name: {"backend": own or None} for name, own in environments.items()}
    section: dict[str, Any] = {"backend": backend, "environments": declared}
    tasks = [
        (f"{env_key}-{number}", env_key)
        for env_key, count in counts.items()
        for number in range(count)
    ]
    findings = find_misnamed(section, tasks)
    assert all(finding.status is Status.WARN for finding in findings)
    return [finding.detail for finding in findings]


def test_a_rare_name_that_is_almost_another_is_found() -> None:
    (reported,) = findings_for({"library": 20, "libary": 1})
    assert reported.startswith("task 'libary-0' is of environment 'libary', and no other")
    assert "did you mean 'library'?" in reported
    assert "correct env_id" in reported


def test_where_the_spec_names_environments_an_unnamed_one_is_reported() -> None:
    (reported,) = findings_for({"library": 5, "shp": 2}, library="")
    assert reported.startswith(
        "2 tasks, as 'shp-0', are of environment 'shp', which [env_gateway.env"
    )
    (reported,) = findings_for({"library": 5, "libary": 4}, library="mcp")
    assert "did you mean 'library'?" in reported


def test_a_table_of_the_spec_that_no_task_uses_is_reported() -> None:
    assert any(
        "no task is of environment 'libary' (did you mean 'library'?)" in reported
        for reported in findings_for({"library": 5}, libary="fleet")
    )


@pytest.mark.parametrize(
    ("counts", "environments"),
    [
        ({"library": 5, "shop": 1}, {}),
        ({"env1": 50, "env10": 1, "env2": 1}, {}),
        ({"library": 5, "libary": 4}, {}),
        ({"library": 50, "shop": 1}, {"other": "fleet"}),
        ({"library": 50, "libary": 1}, {"libary": "", "library": ""}),
        ({"library": 50}, {"library": "", "unused": ""}),
    ],
)
def test_names_that_may_well_be_meant_are_left_alone(
    counts: dict[str, int], environments: dict[str, str]
) -> None:
    assert findings_for(counts, **environments) == []


@pytest.mark.parametrize("backend", ["embedded", "fleet", "fleet_openenv"])
def test_a_backend_that_knows_its_names_reports_what_it_lacks(backend: str) -> None:
    assert findings_for({"library": 50, "libary": 1}, backend, library="") == []


async def test_the_doctor_names_the_task(policy: Path, tmp_path: Path) -> None:
    path = own_environment.write(tmp_path, policy)
    tasks = tmp_path / "tasks.json"
    tasks.write_text(tasks.read_text().replace('"env_id": "library"', '"env_id": "libary"', 1))
    spec = load_spec(path, ['--env_gateway.environments.library={backend = "mcp"}'])
    result = await probed("dataset", subject(spec, tmp_path))
    check(result, Status.WARN, "task 'lend-0' is of environment 'libary'", "did you mean 'library'")

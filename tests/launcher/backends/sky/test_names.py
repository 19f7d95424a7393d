"""Names of jobs and clusters at SkyPilot."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from services.launcher.backends.sky import names
from services.launcher.state import GATEWAY, LEARNER, ROLLOUT

# Length of a managed task's name that SkyPilot keeps uncut in the name of its cluster.
_TASK_NAME_LIMIT = 25
_SERVICES = st.sampled_from((LEARNER, ROLLOUT, GATEWAY))
_RUN_IDS = st.from_regex(r"[a-z0-9][a-z0-9._-]{0,80}", fullmatch=True)


@given(_RUN_IDS, _SERVICES, st.integers(0, 255))
def test_a_name_fits_uncut_into_that_of_a_managed_jobs_cluster_and_is_parsed_back(
    run_id: str, service: str, index: int
) -> None:
    owner = names.owner_of(Path("runs"))
    name = names.member_name(owner, run_id, (service, index))
    assert len(name) <= _TASK_NAME_LIMIT
    expected = names.ParsedName(owner, names.run_mark(run_id), (service, index))
    assert names.parse_name(name) == expected
    # SkyPilot's name for the cluster of job 17.
    assert names.parse_name(f"{name}-17") == expected


@given(_RUN_IDS)
def test_a_groups_name_is_readable_and_names_no_replica(run_id: str) -> None:
    owner = names.owner_of(Path("runs"))
    name = names.group_name(owner, run_id)
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
    assert len(name) <= 64
    assert names.parse_name(name) == names.ParsedName(owner, names.run_mark(run_id), None)


def test_the_time_of_a_run_is_kept_where_its_name_is_too_long() -> None:
    slug = names.slugify_run_id(f"{'long-' * 12}20260131-235959")
    assert slug.endswith("-20260131-235959")


def test_names_of_others_are_nobodys() -> None:
    for name in ("sky-jobs-controller-abc", "flo-x-learner-0", "my-flo-abcdefghi-learner-0", ""):
        assert names.parse_name(name) is None


def test_two_runs_folders_have_two_owners(tmp_path: Path) -> None:
    assert names.owner_of(tmp_path / "a") != names.owner_of(tmp_path / "b")
    assert names.owner_of(tmp_path / "a") == names.owner_of(tmp_path / "a")

"""Names of clusters at SkyPilot and of their machines at clouds."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flotilla_launcher.backends.sky import names
from flotilla_launcher.state import GATEWAY, LEARNER, ROLLOUT

# Length of a name that no cloud cuts: 35 at GCP, less a hyphen and the user's mark.
_NAME_LIMIT = 26
_SERVICES = st.sampled_from((LEARNER, ROLLOUT, GATEWAY))
_RUN_IDS = st.from_regex(r"[a-z0-9][a-z0-9._-]{0,80}", fullmatch=True)


# Owners of now, and of runs folders that were begun with shorter ones.
@given(st.sampled_from(("abcde", "a2c")), _RUN_IDS, _SERVICES, st.integers(0, 255))
def test_a_name_fits_uncut_into_that_of_a_machine_and_is_parsed_back(
    owner: str, run_id: str, service: str, index: int
) -> None:
    name = names.member_name(owner, run_id, (service, index))
    assert len(name) <= _NAME_LIMIT
    expected = names.ParsedName(owner, names.run_mark(owner, run_id), (service, index))
    assert names.parse_name(name) == expected
    # SkyPilot's name for a machine.
    assert names.parse_name(f"{name}-17") == expected


@given(_RUN_IDS)
def test_a_run_id_is_readable_where_a_cloud_takes_few_letters(run_id: str) -> None:
    slug = names.slugify_run_id(run_id)
    assert set(slug) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
    assert len(slug) <= 64


def test_the_time_of_a_run_is_kept_where_its_name_is_too_long() -> None:
    slug = names.slugify_run_id(f"{'long-' * 12}20260131-235959")
    assert slug.endswith("-20260131-235959")


def test_names_of_others_are_nobodys() -> None:
    for name in ("sky-jobs-controller-abc", "flo-x-learner-0", "my-flo-abcdefghi-learner-0", ""):
        assert names.parse_name(name) is None


def test_two_runs_folders_have_two_owners(tmp_path: Path) -> None:
    assert names.owner_of(tmp_path / "a") != names.owner_of(tmp_path / "b")
    assert names.owner_of(tmp_path / "a") == names.owner_of(tmp_path / "a")
    assert len(names.owner_of(tmp_path / "a")) == 5


def test_a_runs_folder_keeps_its_owner_on_a_renamed_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = names.owner_of(tmp_path)
    monkeypatch.setattr("socket.gethostname", lambda: "another")
    assert names.owner_of(tmp_path) == owner
    assert names.owner_of(tmp_path / "new") != owner


def test_machines_of_a_folder_with_a_short_owner_are_found_as_before(tmp_path: Path) -> None:
    (tmp_path / ".owner").write_text("3o7\n")
    name = names.member_name(names.owner_of(tmp_path), "run-1", (ROLLOUT, 0))
    assert name == "flo-3o7" + "jzs5h6" + "-rollout-0"

"""The identity of a run, and who can read it."""

import os
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from flotilla_common.rpc.auth import check_token
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.rpc.tls import read_tls
from flotilla_launcher.security import certificates
from flotilla_launcher.store.run_files import RUN_ID_PATTERN


def test_every_service_gets_a_certificate_in_its_own_name() -> None:
    minted = certificates.mint_identity("qwen2.5-20261121-101500")
    assert {tls.name for tls in minted.members.values()} == {
        "launcher.qwen2.5-20261121-101500.flotilla",
        "env_gateway.qwen2.5-20261121-101500.flotilla",
        "learner.qwen2.5-20261121-101500.flotilla",
        "rollout.qwen2.5-20261121-101500.flotilla",
    }
    assert len({tls.ca for tls in minted.members.values()}) == 1
    assert len({tls.key for tls in minted.members.values()}) == 4
    assert check_token(minted.token)


def test_two_runs_of_one_name_have_nothing_in_common() -> None:
    first, second = certificates.mint_identity("run"), certificates.mint_identity("run")
    assert first.token != second.token
    assert first.tls_for("learner").ca != second.tls_for("learner").ca


def test_what_is_stored_is_for_its_owner_alone_and_is_the_same_when_read(tmp_path: Path) -> None:
    minted = certificates.mint_identity("run")
    old = os.umask(0)
    try:
        certificates.store_identity(tmp_path, minted)
    finally:
        os.umask(old)
    assert certificates.load_identity(tmp_path, "run") == minted
    stored = [tmp_path / ".identity", *(tmp_path / ".identity").rglob("*")]
    assert len(stored) == 2 + 1 + 4 + 4 * 3
    for path in stored:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


def test_a_stored_folder_is_what_a_service_takes(tmp_path: Path) -> None:
    minted = certificates.mint_identity("run")
    certificates.store_identity(tmp_path, minted)
    folder = certificates.identity_folder(tmp_path, "run") / "env_gateway"
    assert read_tls(folder) == minted.tls_for("env_gateway")


def test_storing_again_replaces_the_whole(tmp_path: Path) -> None:
    certificates.store_identity(tmp_path, certificates.mint_identity("run"))
    second = certificates.mint_identity("run", ("learner",))
    certificates.store_identity(tmp_path, second)
    assert certificates.load_identity(tmp_path, "run") == second


def test_a_removed_identity_is_gone_and_may_be_removed_again(tmp_path: Path) -> None:
    certificates.store_identity(tmp_path, certificates.mint_identity("run"))
    for _ in range(2):
        certificates.remove_identity(tmp_path, "run")
        assert certificates.load_identity(tmp_path, "run") is None
    assert list((tmp_path / ".identity").iterdir()) == []


def test_nothing_shows_a_secret_that_only_shows_itself() -> None:
    minted = certificates.mint_identity("run")
    shown = repr(minted)
    assert minted.token not in shown
    assert "PRIVATE KEY" not in shown
    assert "CERTIFICATE" in shown


def test_the_longest_run_id_still_has_a_certificate(tmp_path: Path) -> None:
    run_id = "r" * 128
    minted = certificates.mint_identity(run_id)
    certificates.store_identity(tmp_path, minted)
    tls = read_tls(certificates.identity_folder(tmp_path, run_id) / "learner")
    assert tls is not None
    tls.check_is("learner", run_id)
    with pytest.raises(ConfigError, match="is that of learner"):
        tls.check_is("rollout", run_id)


def test_a_launcher_is_known_by_the_same_after_every_restart_of_a_month(tmp_path: Path) -> None:
    began = datetime.now(UTC)
    minted = certificates.load_launcher_identity(tmp_path, now=began)
    assert (
        certificates.load_launcher_identity(tmp_path, now=began + timedelta(days=30, minutes=-1))
        == minted
    )
    path = tmp_path / ".identity" / certificates.LAUNCHER_ID / "token"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_launcher_that_starts_has_a_month_before_its_certificate_ends(tmp_path: Path) -> None:
    began = datetime.now(UTC)
    minted = certificates.load_launcher_identity(tmp_path, now=began)
    later = began + timedelta(days=30, minutes=1)
    renewed = certificates.load_launcher_identity(tmp_path, now=later)
    assert renewed.token != minted.token
    assert renewed.tls_for("client").ca != minted.tls_for("client").ca
    assert certificates.load_launcher_identity(tmp_path, now=later) == renewed


@pytest.mark.parametrize("spoilt", ["launcher/cert.pem", "client/key.pem", "client"])
def test_a_launchers_identity_that_cannot_be_read_is_refused_by_its_folder(
    tmp_path: Path, spoilt: str
) -> None:
    certificates.load_launcher_identity(tmp_path)
    folder = certificates.identity_folder(tmp_path, certificates.LAUNCHER_ID)
    path = folder / spoilt
    if spoilt == "launcher/cert.pem":
        path.write_text("")
    else:
        path.rename(tmp_path / "away")
    with pytest.raises(ConfigError, match=f"Remove {folder}, restart the launcher, and replace"):
        certificates.load_launcher_identity(tmp_path)


def test_no_run_has_the_id_under_which_the_launchers_identity_is_kept(tmp_path: Path) -> None:
    assert RUN_ID_PATTERN.fullmatch(certificates.LAUNCHER_ID) is None
    minted = certificates.load_launcher_identity(tmp_path)
    for run_id in ("launcher", "client", "launcher-20261122-101500"):
        certificates.store_identity(tmp_path, certificates.mint_identity(run_id))
        certificates.remove_identity(tmp_path, run_id)
    assert certificates.load_launcher_identity(tmp_path) == minted

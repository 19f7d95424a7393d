"""The list of verifiers that may run without a sandbox."""

from pathlib import Path

import pytest

from flotilla_common.rpc.errors import ConfigError
from flotilla_env_gateway.config.gateway import VerifiersConfig
from flotilla_env_gateway.grading.trusted_verifiers import load_digests
from tests.support.repository import ROOT

OWN = ROOT / "environments/flotilla_environments/verifiers.sha256"


def test_the_repositorys_own_are_listed_from_any_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    listed = load_digests(VerifiersConfig().digests)
    assert listed == {line.split()[0] for line in OWN.read_text().splitlines()}


def test_a_list_that_is_missing_is_refused_with_where_it_is_looked_for(tmp_path: Path) -> None:
    missing = tmp_path / "none.sha256"
    with pytest.raises(ConfigError, match=r"verifiers\.digests: .*none\.sha256.* beside the spec"):
        load_digests(missing)


def test_a_list_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "verifiers.sha256"
    path.write_text(f"{'0' * 64}  lend\ndef lent(env):\n")
    with pytest.raises(ConfigError, match="'def' is not a SHA-256"):
        load_digests(path)
    path.write_text(f"{'A' * 64}  lend\n\n")
    assert load_digests(path) == {"a" * 64}

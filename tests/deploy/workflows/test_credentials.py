"""The workflow's step that gives SkyPilot the keys of the clouds."""

import json
import os
import stat
import subprocess
import tomllib
from pathlib import Path

from tests.support.repository import ROOT

# Keys with difficult characters.
KEYS = {
    "LAMBDA_API_KEY": "secret_lambda_0123",
    "RUNPOD_API_KEY": 'rp"a\\b$HOME',
    "VAST_API_KEY": "0123456789abcdef",
    "PRIME_INTELLECT_API_KEY": 'pi"\\x',
    "NEBIUS_CREDENTIALS_JSON": '{"subject-credentials": {"private-key": "-----\\n"}}',
    "NEBIUS_TENANT_ID": "tenant-e00",
    "AWS_ACCESS_KEY_ID": "AKIA0123",
    "AWS_SECRET_ACCESS_KEY": "a/b+c=",
}


def run(home: Path, **environ: str) -> str:
    home.mkdir(exist_ok=True)
    done = subprocess.run(
        (ROOT / ".ci/cloud-credentials",),
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": os.environ["PATH"], "HOME": str(home), **environ},
    )
    return done.stdout + done.stderr


def test_keys_come_to_where_skypilot_reads_them_and_no_other_user_can(
    tmp_path: Path,
) -> None:
    output = run(tmp_path, **KEYS)
    assert not [key for key in KEYS.values() if key in output]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in files)
    read = {str(path.relative_to(tmp_path)): path.read_text() for path in files}
    assert read[".lambda_cloud/lambda_keys"] == "api_key = secret_lambda_0123\n"
    assert (
        tomllib.loads(read[".runpod/config.toml"])["default"]["api_key"] == KEYS["RUNPOD_API_KEY"]
    )
    assert read[".config/vastai/vast_api_key"] == KEYS["VAST_API_KEY"]
    assert json.loads(read[".prime/config.json"]) == {"api_key": KEYS["PRIME_INTELLECT_API_KEY"]}
    assert read[".nebius/credentials.json"].strip() == KEYS["NEBIUS_CREDENTIALS_JSON"]
    assert read[".nebius/NEBIUS_TENANT_ID.txt"].strip() == "tenant-e00"
    assert (
        "aws_access_key_id = AKIA0123\naws_secret_access_key = a/b+c=\n" in read[".aws/credentials"]
    )


def test_new_keys_replace_those_of_before_but_not_those_of_other_users(
    tmp_path: Path,
) -> None:
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws/credentials").write_text("[mine]\n")
    run(tmp_path, **KEYS)
    output = run(tmp_path, **{**KEYS, "VAST_API_KEY": "new"})
    assert "left alone: ~/.aws/credentials" in output
    assert (tmp_path / ".aws/credentials").read_text() == "[mine]\n"
    assert (tmp_path / ".config/vastai/vast_api_key").read_text() == "new"


def test_without_keys_and_with_a_launcher_elsewhere_nothing_is_written(tmp_path: Path) -> None:
    assert run(tmp_path / "a", LAMBDA_API_KEY="") == ""
    assert run(tmp_path / "b", **KEYS, FLOTILLA_LAUNCHER="{}") == ""
    for home in ("a", "b"):
        assert not [p for p in (tmp_path / home).rglob("*") if p.is_file() and p.stat().st_size]

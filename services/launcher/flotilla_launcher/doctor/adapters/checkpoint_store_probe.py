"""Probe that writes, reads back and removes one small object where checkpoints are to go."""

import os
import secrets
from collections.abc import Mapping
from typing import Any

from flotilla_common.process.extras import install_command
from flotilla_launcher.doctor.findings import Finding, fail, first_line, ok, warn
from flotilla_launcher.doctor.probe_process import answer_question

# JSON with options that a spec must not hold, as the learner reads it.
_OPTIONS_VARIABLE = "FLOTILLA_REMOTE_OPTIONS"
_S3 = ("s3", "s3a")
_CREDENTIALS = {"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError"}


def probe_url(question: Mapping[str, Any]) -> list[Finding]:
    url: str = question["url"]
    name = f"{url.rstrip('/')}/.flotilla-doctor-{secrets.token_hex(8)}"
    try:
        files = _open_filesystem(url, question["options"])
    except ImportError as error:
        return [_missing_package(url, error, elsewhere=question["elsewhere"])]
    except (ValueError, TypeError) as error:
        fix = f"correct learner.checkpoint.remote, its options or {_OPTIONS_VARIABLE}"
        return [fail(f"{url}: {first_line(str(error))}", fix)]
    return _round_trip(files, url, name)


def _missing_package(url: str, error: ImportError, *, elsewhere: bool) -> Finding:
    if elsewhere:
        what = f"{url} is not tried, for the launcher's own packages do not know it: {error}"
        return warn(what, "install what it names here, or make .venv by `make setup`")
    fix = install_command("s3") if url.startswith(_S3) else "install what it names"
    return fail(f"{url}: {error}", fix)


def _open_filesystem(url: str, options: Mapping[str, Any]) -> Any:
    import json

    from fsspec.core import url_to_fs

    secret = json.loads(os.environ.get(_OPTIONS_VARIABLE) or "{}")
    given = {**options, **secret}
    if url.split("://")[0] in _S3:
        quick = {"connect_timeout": 10, "read_timeout": 20, "retries": {"max_attempts": 1}}
        given = {"skip_instance_cache": True, "config_kwargs": quick, **given}
    return url_to_fs(url, **given)[0]


def _round_trip(files: Any, url: str, name: str) -> list[Finding]:
    data = secrets.token_bytes(64)
    doing = "write to"
    try:
        if not url.startswith(_S3):
            files.makedirs(files._parent(name), exist_ok=True)
        files.pipe_file(name, data)
        doing = "read back from"
        read = files.cat_file(name)
        doing = "remove from"
        files.rm_file(name)
    # Vendors' exceptions have no base class in common.
    except Exception as error:  # noqa: BLE001
        return [fail(f"cannot {doing} {url}: {first_line(str(error))}", _suggest_fix(error, doing))]
    if read != data:
        return [fail(f"{url} gave back other bytes than were written", "use another store")]
    return [ok(f"{url}: wrote, read back and removed an object")]


def _suggest_fix(error: Exception, doing: str) -> str:
    if type(error).__name__ in _CREDENTIALS:
        return "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or run `aws configure`"
    if isinstance(error, FileNotFoundError):
        return "make the bucket, or correct learner.checkpoint.remote"
    if isinstance(error, PermissionError):
        return f"let these credentials {doing} it (s3:PutObject, s3:GetObject, s3:DeleteObject)"
    return "see whether endpoint_url in learner.checkpoint.remote_options is right and answers"


if __name__ == "__main__":
    answer_question(probe_url)

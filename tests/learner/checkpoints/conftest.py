from collections.abc import Iterator
from pathlib import Path

import pytest

from flotilla_learner.checkpoints.adapters.fsspec_store import FsspecStore, open_store
from tests.support.remote_checkpoints import RUN_ID, s3_server, s3_store


@pytest.fixture(scope="session")
def endpoint() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "an-id-for-tests")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret-for-tests")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        with s3_server() as address:
            yield address


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FsspecStore]:
    """A store of the run of this test, in memory."""
    found = open_store(f"memory://{tmp_path}/{RUN_ID}", {})
    yield found
    found.remove(found.list_files(""))


@pytest.fixture
def s3(endpoint: str, tmp_path: Path) -> FsspecStore:
    """A store of the run of this test, in S3."""
    return s3_store(endpoint, tmp_path.name)

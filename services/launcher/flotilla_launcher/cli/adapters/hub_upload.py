"""Upload of a model to a repository of the Hugging Face hub."""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from flotilla_common.text.printable_text import one_line
from flotilla_common.text.redaction import add_secret, redact
from flotilla_launcher.cli.terminal import CommandError

_MAIN = "main"
_REASON_CHARACTERS = 300


def upload_model(
    files: Mapping[str, Path | bytes],
    repo: str,
    revision: str,
    message: str,
    show: Callable[[str], None],
    *,
    private: bool,
) -> str:
    """Upload `files`, by their names there, as one commit on a branch of a repository, which is
    made if it is not there; return the commit's URL. The hub keeps the content of each large file
    as soon as it has arrived, so a repeated call sends only what is missing, and what is unchanged
    is left out of the commit. Raises CommandError."""
    token = get_token()
    if not token:
        raise CommandError("set HF_TOKEN to a token of the hub that may write")
    add_secret(token)
    api = HfApi(token=token)
    with _explained_errors(repo):
        api.create_repo(repo, private=private or None, exist_ok=True)
        if private and not api.model_info(repo).private:
            raise CommandError(
                f"{repo} exists and is public: choose another, or leave out --private"
            )
        if revision != _MAIN:
            api.create_branch(repo, branch=revision, exist_ok=True)
        additions = [CommitOperationAdd(name, content) for name, content in files.items()]
        for number, addition in enumerate(additions, start=1):
            api.preupload_lfs_files(repo, [addition], revision=revision, free_memory=False)
            show(f"{number} of {len(additions)}: {addition.path_in_repo}")
        done = api.create_commit(repo, additions, commit_message=message, revision=revision)
    return done.commit_url


@contextmanager
def _explained_errors(repo: str) -> Generator[None]:
    """Turn what the hub's client raises into a CommandError, which says what to do."""
    page, again = f"{constants.ENDPOINT}/{repo}", "the same command goes on"
    try:
        yield
    except CommandError:
        raise
    except HFValidationError as error:
        raise CommandError(f"--push {repo}: write OWNER/NAME: {error}") from error
    except HfHubHTTPError as error:
        refused = error.response.status_code in (401, 403)
        hint = "HF_TOKEN may not write there" if refused else again
        raise CommandError(f"{page}: {_first_line(error)}; {hint}") from error
    # The errors of the hub's HTTP library pass through its client unchanged.
    except Exception as error:
        raise CommandError(
            f"{page}: {type(error).__name__}: {_first_line(error)}; {again}"
        ) from error


def _first_line(error: Exception) -> str:
    cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
    return one_line(redact(str(cause)), _REASON_CHARACTERS)

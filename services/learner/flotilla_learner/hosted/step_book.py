"""What a run has ordered of its model at the service: `hosted/book.json` in the run's folder.

It is written before orders are sent and after their answers came, so that a learner that was killed
in between sends the same orders with the same numbers again, and the service carries out each once.
Results of steps are kept until a saved state has them, because a restarted learner replays the
plans since its newest checkpoint: those that the model has behind it are answered from here."""

import json
import os
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from flotilla_common.files.durable_files import sync_path, write_durably
from flotilla_common.rpc.errors import ConfigError
from flotilla_learner.hosted.ports import HostedModel
from flotilla_learner.ranks import protocol
from flotilla_learner.types import StepResult

FORMAT = 1
FOLDER = "hosted"
_BOOK = "book.json"
Kind = Literal["step", "publish", "state"]


@dataclass(frozen=True, slots=True)
class Pending:
    """Orders that were sent, or may have been."""

    kind: Kind
    version: int
    # Number of the first, and digest of all.
    first: int
    digest: str


@dataclass(frozen=True, slots=True)
class Published:
    """Weights that were saved for samplers."""

    version: int
    address: str
    # The trainer's logprobs of the canary under them.
    canary: tuple[float, ...]
    # False if the model was trained again since, from an earlier version.
    current: bool = True


@dataclass(frozen=True, slots=True)
class KeptState:
    """Weights and optimizer that were saved."""

    version: int
    address: str
    model_id: str


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A step that the model has made."""

    step: int
    # Digest of what it was made of.
    data: str
    result: StepResult
    # Number of the model's next order.
    next_order: int
    # Tokens that were trained on.
    tokens: int


@dataclass(frozen=True, slots=True)
class Page:
    """The content of the book."""

    run_id: str
    # The model in use; None if the next start makes another.
    model: HostedModel | None = None
    # Versions at which it began, and that it has reached.
    start: int = 0
    version: int = 0
    # Number of its next order.
    next_order: int = 1
    pending: Pending | None = None
    # Oldest first.
    published: tuple[Published, ...] = ()
    states: tuple[KeptState, ...] = ()
    # Addresses to delete.
    superseded: tuple[str, ...] = ()
    # Tokens trained on over all starts of the run, those of repeated steps included.
    trained_tokens: int = 0
    format: int = field(default=FORMAT)


_PAGE = TypeAdapter(Page)


class StepBook:
    """The book of one run. Every change is on disk when a method returns."""

    def __init__(self, run_dir: Path, run_id: str) -> None:
        """Open the book, empty for a new run. Raises ConfigError if it cannot be read, or is of
        another run, whose model this one must not train."""
        self._folder = run_dir / FOLDER
        self._folder.mkdir(parents=True, exist_ok=True)
        self.page = _read_page(self._folder / _BOOK, run_id)

    def write(self, **changes: Any) -> None:
        """Write the page with these changes."""
        page = replace(self.page, **changes)
        path = self._folder / _BOOK
        draft = path.with_suffix(".new")
        write_durably(draft, json.dumps(asdict(page), indent=1).encode())
        os.replace(draft, path)
        sync_path(self._folder)
        self.page = page

    def begin_model(self, model: HostedModel, version: int, trained_tokens: int = 0) -> None:
        """Note a new model, whose weights are those of `version`; its run has trained on so many
        tokens, if the book does not know of more."""
        known = [
            replace(each, current=each.current and each.version == version)
            for each in self.page.published
        ]
        self._drop_results(self.page.start, self.page.version)
        self.write(
            model=model,
            start=version,
            version=version,
            next_order=model.first_order,
            pending=None,
            published=tuple(known),
            trained_tokens=max(self.page.trained_tokens, trained_tokens),
        )

    def serves_from(self, version: int) -> bool:
        """Return True if a run at `version` can go on with the present model: it knows the results
        of all steps since."""
        page = self.page
        steps = range(version + 1, page.version + 1)
        reached = page.model is not None and page.start <= version <= page.version
        return reached and all(self._result_path(step).exists() for step in steps)

    def find_published(self, version: int) -> Published | None:
        """Return the newest saved weights of a version, if they are kept."""
        found = [each for each in self.page.published if each.current and each.version == version]
        return found[-1] if found else None

    def find_state(self, version: int) -> KeptState | None:
        """Return the state of a version that the present model has saved, if it is kept."""
        model = self.page.model
        for state in self.page.states:
            if model and state.version == version and state.model_id == model.model_id:
                return state
        return None

    def finish_step(self, done: FinishedStep) -> None:
        """Note that the model has made a step."""
        step, result = done.step, replace(done.result, token_file=None)
        if result.tokens is not None:
            protocol.write_tokens(self._token_path(step), result.tokens)
            sync_path(self._token_path(step))
        message = {"data": done.data, **protocol.encode_step_result(result)}
        write_durably(self._result_path(step), json.dumps(message).encode())
        total = self.page.trained_tokens + done.tokens
        self.write(version=step, next_order=done.next_order, pending=None, trained_tokens=total)

    def read_result(self, step: int, data: str) -> StepResult | None:
        """Return the result of a step that is kept; None if it was made of other data."""
        message = json.loads(self._result_path(step).read_text())
        if message.pop("data") != data:
            return None
        result, path = protocol.decode_step_result(message), self._token_path(step)
        return replace(result, tokens=protocol.read_tokens(path)) if path.exists() else result

    def drop_results_before(self, version: int) -> None:
        """Forget the results of steps up to a version that a checkpoint has."""
        self._drop_results(0, version)

    def _drop_results(self, start: int, end: int) -> None:
        for path in self._folder.glob("step-*"):
            if start < int(path.stem.partition("-")[2]) <= end:
                path.unlink(missing_ok=True)

    def _result_path(self, step: int) -> Path:
        return self._folder / f"step-{step:06d}.json"

    def _token_path(self, step: int) -> Path:
        return self._folder / f"step-{step:06d}.safetensors"


def _read_page(path: Path, run_id: str) -> Page:
    if not path.exists():
        return Page(run_id)
    remedy = "without it the run goes on from its newest checkpoint: move it away"
    try:
        data = json.loads(path.read_text())
        if data["format"] != FORMAT:
            raise ConfigError(
                f"{path} has format {data['format']}, but this program reads and writes {FORMAT}:"
                " use the version of the program that wrote it"
            )
        page = _PAGE.validate_python(data)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; {remedy}") from error
    if page.run_id != run_id:
        raise ConfigError(f"{path} is of run {page.run_id}, not of {run_id}; {remedy}")
    return page

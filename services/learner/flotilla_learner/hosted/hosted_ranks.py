"""A model that a service trains, in the place of training ranks. Implements `ports.Ranks`."""

import asyncio
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from safetensors import SafetensorError

from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.spec import PolicyConfig
from flotilla_common.telemetry.log import get_logger
from flotilla_common.weights.fingerprint import compute_fingerprint
from flotilla_common.weights.sampler_reference import write_reference
from flotilla_learner.config.learner import LearnerConfig
from flotilla_learner.hosted import datums, saved_states, step_result
from flotilla_learner.hosted.ports import (
    Answer,
    HostedService,
    Order,
    SaveOrder,
    ServiceGoneError,
    ServiceRefusedError,
)
from flotilla_learner.hosted.step_book import (
    FinishedStep,
    KeptState,
    Kind,
    Pending,
    Published,
    StepBook,
)
from flotilla_learner.ports import RankError
from flotilla_learner.rank.canary import canary_token_ids
from flotilla_learner.ranks import protocol
from flotilla_learner.training_types import TargetScores
from flotilla_learner.types import (
    BatchScore,
    CheckpointFiles,
    Comparison,
    ModelInfo,
    Publication,
    StepResult,
    TrainBatch,
)

_log = get_logger(__name__)
# What own ranks have, and a service cannot give.
LACKS = ("fingerprints of weights", "audits of samples", "proof of a token's version", "entropy")


@dataclass(frozen=True, slots=True)
class HostedSite:
    """Facts about the run and its place."""

    # Prefix of the names of its files in `shm_dir`.
    name: str
    shm_dir: Path
    policy: PolicyConfig
    vocabulary: int

    @property
    def base_model(self) -> str:
        """The service's name of the model that is trained."""
        return self.policy.tinker.model or self.policy.model


class HostedRanks:
    """The run's model at a service: one call at a time, as with ranks."""

    def __init__(
        self, site: HostedSite, config: LearnerConfig, service: HostedService, book: StepBook
    ) -> None:
        self._site = site
        self._config = config
        self._service = service
        self._book = book
        self._saved_version = -1

    @property
    def _lora_rank(self) -> int:
        return self._config.lora.rank if self._config.lora else 0

    async def start_ranks(self, checkpoint: Path | None) -> ModelInfo:
        """Go on with the model of an earlier start if the service still has it, else create one,
        from the checkpoint's state if there is one. See `ports.Ranks`."""
        saved = checkpoint and saved_states.read_state(
            checkpoint, self._site.base_model, self._lora_rank
        )
        step = saved.step if saved else 0
        self._saved_version = step if saved else -1
        try:
            if not await self._attach(step):
                model = await (
                    self._service.load_model(saved.address)
                    if saved
                    else self._service.create_model()
                )
                self._book.begin_model(model, step, saved.trained_tokens if saved else 0)
        except ServiceGoneError as error:
            if saved is None:
                raise RankError(str(error)) from error
            raise ConfigError(
                f"{saved.address} is not at the service any more ({error}): move {checkpoint} away,"
                " and the run goes on from the checkpoint before it; or start a new run"
            ) from error
        except ServiceRefusedError as error:
            raise ConfigError(str(error)) from error
        _log.info("trained at a service", without=LACKS)
        # The service tells no count of parameters.
        return ModelInfo(parameters=0, vocab_size=self._site.vocabulary, step=step)

    async def _attach(self, step: int) -> bool:
        """Return True if the run, at `step`, goes on with the model that it has."""
        page = self._book.page
        if page.model is None or not self._book.serves_from(step):
            return False
        try:
            await self._service.attach_model(page.model)
        except ServiceGoneError as error:
            _log.warning("the model is no more: going on from saved state", why=str(error))
            return False
        _log.info("re-attached", model=page.model.model_id, version=page.version, step=step)
        await self._settle()
        return True

    async def _settle(self) -> None:
        """Finish a save that an earlier start may have ordered."""
        pending = self._book.page.pending
        if pending is None or pending.kind == "step":
            return
        if pending.kind == "publish":
            await self._save_for_samplers(pending.version)
        else:
            await self._save_state(pending.version)

    async def train_step(self, batch: TrainBatch) -> StepResult:
        """Have the service make a step; one that the model has behind it is answered from the
        book. See `ports.Ranks`."""
        step, version = batch.step, self._book.page.version
        data = datums.digest_of_batch(batch)
        if step > version + 1:
            raise self._give_up(f"step {step} requested after {version}")
        if step == version + 1:
            return self._with_token_file(step, await self._make_step(batch, data))
        made = self._book.read_result(step, data)
        if made is None:
            raise self._give_up(f"the model's step {step} was made of other samples")
        return self._with_token_file(step, made)

    async def _make_step(self, batch: TrainBatch, data: str) -> StepResult:
        started, config = time.monotonic(), self._config
        cut, count = datums.cut_sequences(batch, self._site.policy.max_model_len)
        prepared = step_result.prepare(cut, config.algorithm, self._site.policy)
        parts = datums.moving_parts(prepared)
        adam = datums.adam_update(config.optimizer, batch.step, config.steps)
        orders = datums.step_orders(parts, config.algorithm, adam)
        answers, following = await self._carry_out("step", batch.step, orders)
        tokens = datums.trained_tokens(orders)
        sampled, prompts = datums.sampled_and_prompt_tokens(batch)
        counts = {
            "policy/lr": adam.learning_rate,
            "policy/truncated": float(count),
            # Nothing here has seen the weights.
            "policy/verified": 0.0,
            "tokens/trained": float(tokens),
            "tokens/sampled": float(sampled),
            "tokens/prompt": float(prompts),
            "tokens/trained_total": float(self._book.page.trained_tokens + tokens),
        }
        result = step_result.make_result(batch, prepared, parts, answers, counts, started)
        kept = result if config.dumps.enabled else replace(result, tokens=None)
        done = FinishedStep(batch.step, data, kept, following, tokens)
        await asyncio.to_thread(self._book.finish_step, done)
        return kept

    def _with_token_file(self, step: int, result: StepResult) -> StepResult:
        """Return a result with its token values in a file of its own, which its reader removes."""
        if result.tokens is None:
            return result
        path = protocol.token_path(self._site.shm_dir, self._site.name, step)
        try:
            protocol.write_tokens(path, result.tokens)
        except (OSError, SafetensorError) as error:
            path.unlink(missing_ok=True)
            _log.warning("a step's token values are lost", step=step, why=str(error))
            return result
        return replace(result, token_file=path)

    async def compare_batch(self, batch: TrainBatch, *, diagnose: bool = False) -> Comparison:
        """Compare nothing: samples of earlier weights cannot be scored again there."""
        return Comparison()

    async def score_batch(self, batch: TrainBatch) -> BatchScore:
        """Refuse: no service scores without a step. A spec that would need it is refused first."""
        raise RankError("a Tinker service scores no batch without training on it")

    async def publish_weights(self, version: int) -> Publication:
        """Save the weights for samplers, and publish their address. See `ports.Ranks`."""
        found = self._book.find_published(version)
        if found is None:
            found = await self._save_for_samplers(version)
        site = self._site
        path = protocol.slot_paths(site.shm_dir, site.name)[version % protocol.SLOT_COUNT]
        manifest = write_reference(path, found.address)
        total = sum(entry.size_bytes for entry in manifest)
        await self._delete_superseded()
        return Publication(
            version=version,
            fingerprint=compute_fingerprint(manifest, total),
            manifest=manifest,
            total_bytes=total,
            path=path,
            canary_token_ids=canary_token_ids(site.vocabulary),
            canary_logprobs=np.array(found.canary, np.float32),
        )

    async def _save_for_samplers(self, version: int) -> Published:
        """Save the weights while the canary is scored under them."""
        canary = datums.scored_batch(canary_token_ids(self._site.vocabulary))
        orders: list[Order] = [canary, SaveOrder(_save_name(version), "sampler")]
        (scores, address), following = await self._carry_out("publish", version, orders)
        assert isinstance(scores, TargetScores)
        assert isinstance(address, str)
        found = Published(version, address, tuple(scores.logprobs[0].tolist()))
        page = self._book.page
        published = (*page.published, found)
        kept = _kept_publications(published, has_state=bool(page.states))
        gone = tuple(each.address for each in published if each not in kept)
        self._book.write(
            published=kept,
            superseded=page.superseded + gone,
            next_order=following,
            pending=None,
        )
        return found

    async def begin_checkpoint(self, directory: Path) -> Awaitable[CheckpointFiles]:
        """Have the service save weights and optimizer; the checkpoint is their address. See
        `ports.Ranks`."""
        page = self._book.page
        saved = self._book.find_state(page.version) or await self._save_state(page.version)
        # The checkpoint before this one is the run's newest by now.
        self._book.drop_results_before(self._saved_version)
        self._saved_version = saved.version
        state = saved_states.HostedState(
            saved.address,
            self._site.base_model,
            self._lora_rank,
            saved.version,
            page.trained_tokens,
        )
        return asyncio.create_task(_write_checkpoint(directory, state))

    async def _save_state(self, version: int) -> KeptState:
        orders = [SaveOrder(_save_name(version), "state")]
        (address,), following = await self._carry_out("state", version, orders)
        page = self._book.page
        assert isinstance(address, str)
        assert page.model is not None
        saved = KeptState(version, address, page.model.model_id)
        # The oldest one is a checkpoint until this one is.
        kept = (*page.states, saved)[-self._most_states - 1 :]
        gone = tuple(each.address for each in page.states if each not in kept)
        self._book.write(
            states=kept,
            superseded=page.superseded + gone,
            next_order=following,
            pending=None,
        )
        await self._delete_superseded()
        return saved

    @property
    def _most_states(self) -> int:
        """Number of states of which a checkpoint is kept, here or in a store."""
        checkpoint = self._config.checkpoint
        return max(checkpoint.keep, checkpoint.remote_keep if checkpoint.remote else 0)

    async def _carry_out(
        self, kind: Kind, version: int, orders: Sequence[Order]
    ) -> tuple[list[Answer], int]:
        """Send orders, after they were written down. Raises RankError."""
        page = self._book.page
        if kind != "step" and version != page.version:
            raise self._give_up(f"version {version} is not kept; the model has {page.version}")
        asked = Pending(kind, version, page.next_order, datums.digest_of(orders))
        if page.pending not in (None, asked):
            raise self._give_up(f"{kind} {version} requested while {page.pending} is open")
        if not orders:
            return [], page.next_order
        self._book.write(pending=asked)
        try:
            return await self._service.carry_out(orders, asked.first, f"{kind} {version}")
        except ServiceGoneError as error:
            raise self._give_up(str(error)) from error
        except ServiceRefusedError as error:
            raise RankError(f"{kind} {version}: {error}") from error

    def _give_up(self, why: str) -> RankError:
        """Have the next start make another model, from saved state."""
        self._book.write(model=None)
        return RankError(f"{why}: the run goes on from its newest checkpoint at the next start")

    async def _delete_superseded(self) -> None:
        """Delete what nothing names any more, at the service."""
        addresses = self._book.page.superseded
        if addresses:
            done = await asyncio.gather(*(self._service.delete(each) for each in addresses))
            left = [each for each, gone in zip(addresses, done, strict=True) if not gone]
            self._book.write(superseded=tuple(left))

    async def close(self) -> None:
        """Let go of the service. After the run's last step it forgets the model; before that, it
        keeps it for a while, so that the next start goes on with it."""
        page = self._book.page
        done = page.version >= self._config.steps and self._saved_version == page.version
        finish = done and page.model is not None
        if finish:
            await self._let_go_of_saves()
            self._book.write(model=None)
        await self._service.close(finish=finish)

    async def _let_go_of_saves(self) -> None:
        """Delete saves but those of kept checkpoints and the newest published weights, and say
        where these are."""
        page = self._book.page
        states, published = page.states[-self._most_states :], page.published[-1:]
        kept = {each.address for each in (*states, *published)}
        known = [each.address for each in (*page.states, *page.published)]
        gone = tuple(each for each in known if each not in kept)
        self._book.write(states=states, published=published, superseded=page.superseded + gone)
        await self._delete_superseded()
        if states and published:
            _log.info(
                "the trained weights stay at the service",
                sampler=published[0].address,
                download=f"tinker checkpoint download {states[-1].address}",
            )


def _save_name(version: int) -> str:
    """Return the name of a save, the same whenever it is ordered again."""
    return f"step-{version:06d}"


def _kept_publications(published: Sequence[Published], *, has_state: bool) -> tuple[Published, ...]:
    """Return the newest, which engines may still use; and the first policy's until a state is
    saved, since until then every start of the run begins with it."""
    newest = published[-protocol.SLOT_COUNT :]
    first = [each for each in published if each.version == 0 and not has_state]
    return tuple(each for each in published if each in newest or each in first)


async def _write_checkpoint(directory: Path, state: saved_states.HostedState) -> CheckpointFiles:
    return await asyncio.to_thread(saved_states.write_state, directory, state)

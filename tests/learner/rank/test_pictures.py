"""Ranks train on pictures: what a policy computes with them is what its published class computes,
however its sequences are packed and its towers trained."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flotilla_common.images.picture import Picture, PlacedPicture, ShownPicture
from flotilla_common.images.pixels import PixelReader
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.spec import VisionConfig
from flotilla_learner.algo.packing import Segments
from flotilla_learner.algo.picture_positions import pack_positions
from flotilla_learner.checkpoints.export import export_model
from flotilla_learner.config.algorithm import AlgorithmConfig
from flotilla_learner.config.learner import OptimizerConfig
from flotilla_learner.config.lora import LoraConfig
from flotilla_learner.config.rank import RankConfig
from flotilla_learner.rank.burn_in import BurnIn
from flotilla_learner.rank.compare_command import CompareCommand
from flotilla_learner.rank.model import Policy, score_canary, score_tokens
from flotilla_learner.rank.model_loading import ModelError, find_own_files
from flotilla_learner.rank.optimizer import Optimizer
from flotilla_learner.rank.policy_loading import load_policy
from flotilla_learner.rank.split_loading import has_all_tensors
from flotilla_learner.rank.text_part import find_tower
from flotilla_learner.rank.trainer import Trainer
from flotilla_learner.rank.weight_slots import WeightSlots
from flotilla_learner.types import TrainBatch, TrainSequence
from tests.support.checkpoints import write_checkpoint
from tests.support.picture_batches import PICTURES, family_of, picture_batch
from tests.support.rank_configs import policy_config
from tests.support.vision_models import load_vision_model, vision_inputs, vision_logprobs

KINDS = ("qwen2_5_vl", "qwen3_vl")
FROZEN, TRAINED = VisionConfig(), VisionConfig(tower="trained", projector="trained")
# With the eps below an update is the gradient times this rate.
RATE = 0.01
EVERYTHING: dict[str, object] = {
    "proximal": "trainer",
    "entropy_coefficient": 0.01,
    "epochs": 2,
    "mini_batches": 2,
    "kl": {"coefficient": 0.05},
}
Folders = Callable[[str], Path]


def load(folder: Path, vision: VisionConfig = FROZEN, **rank: Any) -> Policy:
    config = policy_config(folder, vision=vision, max_model_len=256)
    return load_policy(config, RankConfig(**rank))


@dataclass(frozen=True)
class PictureSteps:
    policy: Policy
    optimizer: Optimizer
    metrics: list[Mapping[str, float]]

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return {n: p.detach().clone() for n, p in self.policy.named_parameters().items()}


def train(
    folder: Path,
    vision: VisionConfig = FROZEN,
    *,
    steps: int = 2,
    lora: LoraConfig | None = None,
    algorithm: Mapping[str, object] = EVERYTHING,
    **rank: Any,
) -> PictureSteps:
    chosen = RankConfig.model_validate({"pack_tokens": 512, "head_chunk": 16, **rank})
    config = policy_config(folder, vision=vision, max_model_len=256)
    policy = load_policy(config, chosen, lora=lora)
    # Adam divides a gradient by its own size, rounding errors too; not with this eps.
    settings = OptimizerConfig(lr=RATE).model_copy(update={"eps": 1.0})
    optimizer = Optimizer(policy.trained_parameters(), settings)
    trainer = Trainer(policy, optimizer, AlgorithmConfig.model_validate(algorithm), chosen)
    batches = [picture_batch(family_of(folder), step=step) for step in range(1, steps + 1)]
    return PictureSteps(policy, optimizer, [trainer.train_step(b, RATE).metrics for b in batches])


def assert_same(one: PictureSteps, other: PictureSteps, tolerance: float = 1e-6) -> None:
    for ours, theirs in zip(one.metrics, other.metrics, strict=True):
        for name in theirs.keys() - {"policy/shared_prompt_share"}:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-5), name
    for name, value in other.weights.items():
        torch.testing.assert_close(one.weights[name], value, rtol=0, atol=tolerance)


def moved(folder: Path, trained: PictureSteps) -> tuple[set[str], set[str]]:
    """Return the names of the tower's parameters, and of all, that training has changed."""
    before = dict(load_vision_model(folder).named_parameters())
    changed = {n for n, value in trained.weights.items() if not torch.equal(before[n], value)}
    return {name for name in changed if ".visual." in name}, changed


def published(folder: Path, sequence: TrainSequence, **options: Any) -> np.ndarray:
    """Return the sequence's logprobs by transformers' own pass."""
    family = family_of(folder)
    by_hash = {picture.sha256: picture for picture in PICTURES}
    shown = [ShownPicture(by_hash[place.sha256], place) for place in sequence.pictures]
    inputs = vision_inputs(sequence.token_ids, shown, family, PixelReader(folder, family))
    return vision_logprobs(load_vision_model(folder), inputs, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_has_the_logprobs_of_the_published_model(
    kind: str, vision_folder: Folders
) -> None:
    folder = vision_folder(kind)
    policy, batch = load(folder), picture_batch(family_of(folder))
    for sequence in batch.sequences[:3]:
        with policy.showing(batch):
            ours = score_tokens(policy, sequence.token_ids, chunk=16, pictures=sequence.pictures)
        np.testing.assert_allclose(ours, published(folder, sequence), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_another_picture_changes_what_is_behind_it_alone(kind: str, vision_folder: Folders) -> None:
    folder = vision_folder(kind)
    policy, batch = load(folder), picture_batch(family_of(folder))
    first = batch.sequences[0]
    # Its bytes under the hash of another.
    swapped = {**batch.pictures, PICTURES[0].sha256: redraw(PICTURES[0])}
    found: list[np.ndarray] = []
    for pictures in (batch.pictures, swapped):
        with policy.showing(replace(batch, pictures=pictures)):
            places = first.pictures
            found.append(score_tokens(policy, first.token_ids, chunk=16, pictures=places))
    start = first.pictures[0].offset
    assert np.array_equal(found[0][: start - 1], found[1][: start - 1])
    end = start + policy_family(policy).count(first.pictures[0].grid)
    assert np.abs(found[0][end:] - found[1][end:]).max() > 1e-3


def redraw(picture: Picture) -> bytes:
    from tests.support.vision_models import draw_picture

    return draw_picture(9, picture.width, picture.height).data


def policy_family(policy: Policy) -> Any:
    assert policy.vision is not None
    return policy.vision.family


@pytest.mark.parametrize("kind", KINDS)
def test_positions_are_those_of_the_published_class(kind: str, vision_folder: Folders) -> None:
    folder = vision_folder(kind)
    family, model = family_of(folder), load_vision_model(folder)
    for sequence in picture_batch(family, blind=[1]).sequences:
        ids = torch.from_numpy(sequence.token_ids.astype(np.int64))[None]
        grids = torch.tensor([place.grid for place in sequence.pictures])
        expected, _ = model.model.get_rope_index(
            ids,
            mm_token_type_ids=(ids == family.image_pad).int(),
            image_grid_thw=grids if len(grids) else None,
        )
        ours = pack_positions(
            Segments([sequence.token_ids], pictures=[sequence.pictures]), family.merge
        )
        assert np.array_equal(ours, expected[:, 0].numpy())


def test_a_follower_goes_on_where_a_whole_sequence_would(vision_folder: Folders) -> None:
    family = family_of(vision_folder("qwen3_vl"))
    sequence = picture_batch(family).sequences[0]
    ids, first = sequence.token_ids, sequence.pictures[0]
    cut = first.offset + family.count(first.grid) + 3
    rest = [replace(p, offset=p.offset - cut) for p in sequence.pictures[1:]]
    shared = pack_positions(
        Segments([ids[:cut], ids[cut:], ids[cut:]], [None, 0, 0], None, [[first], rest, rest]),
        family.merge,
    )
    whole = pack_positions(Segments([ids], pictures=[sequence.pictures]), family.merge)
    assert np.array_equal(shared[:, : len(ids)], whole)
    assert np.array_equal(shared[:, len(ids) :], whole[:, cut:])


@pytest.mark.parametrize(
    "vision",
    [
        pytest.param(FROZEN, id="frozen", marks=pytest.mark.slow),
        pytest.param(TRAINED, id="trained"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_packed_equals_unpacked_and_a_shared_prompt_its_copies(
    kind: str, vision: VisionConfig, vision_folder: Folders
) -> None:
    folder = vision_folder(kind)
    shared = train(folder, vision)
    apart = train(folder, vision, share_prompts=False)
    alone = train(folder, vision, share_prompts=False, pack_tokens=1)
    assert shared.metrics[0]["policy/shared_prompt_share"] > 0.2
    assert apart.metrics[0]["policy/shared_prompt_share"] == 0
    assert_same(shared, alone)
    assert_same(apart, alone)


@pytest.mark.parametrize(
    "checkpointing", [pytest.param("selective", marks=pytest.mark.slow), "full"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_recomputed_activations_give_the_same_steps(
    kind: str, checkpointing: str, vision_folder: Folders
) -> None:
    folder = vision_folder(kind)
    kept = train(folder, TRAINED, gradient_checkpointing="off")
    again = train(folder, TRAINED, gradient_checkpointing=checkpointing)
    assert_same(again, kept, tolerance=0)


@pytest.mark.parametrize(
    ("tower", "projector"),
    [("frozen", "frozen"), ("frozen", "trained"), ("trained", "frozen"), ("trained", "trained")],
)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_trained_moves_and_all_is_published(
    kind: str, tower: str, projector: str, vision_folder: Folders
) -> None:
    folder = vision_folder(kind)
    vision = VisionConfig.model_validate({"tower": tower, "projector": projector})
    trained = train(folder, vision, steps=1, algorithm={})
    seen, changed = moved(folder, trained)
    all_seen = {name for name in trained.weights if ".visual." in name}
    merging = {name for name in all_seen if "merger" in name}
    expected = (all_seen - merging if tower == "trained" else set[str]()) | (
        merging if projector == "trained" else set()
    )
    assert seen == expected
    assert changed - seen
    text = trained.weights.keys() - all_seen
    assert trained.policy.published_parameters().keys() == trained.weights.keys()
    assert trained.policy.trained_parameters().keys() == text | expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_continues_it_and_an_export_is_the_model(
    kind: str, vision_folder: Folders, tmp_path: Path
) -> None:
    folder = vision_folder(kind)
    config = policy_config(folder, vision=TRAINED)
    trained = train(folder, TRAINED)
    write_checkpoint(tmp_path / "saved", trained.policy, trained.optimizer, 2)
    resumed = load_policy(config, RankConfig(), tmp_path / "saved")
    expected = score_canary(trained.policy, 64)
    again = score_canary(resumed, 64)
    assert np.array_equal(again.logprobs, expected.logprobs)
    export_model(tmp_path / "saved", folder, config, tmp_path / "out")
    exported = score_canary(load(tmp_path / "out"), 64)
    np.testing.assert_allclose(exported.logprobs, expected.logprobs, rtol=0, atol=1e-6)
    assert np.abs(score_canary(load(folder), 64).logprobs - expected.logprobs).max() > 1e-3
    loaded = dict(load_vision_model(tmp_path / "out").named_parameters())
    for name, value in trained.weights.items():
        assert torch.equal(loaded[name], value), name


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_are_added_to_the_text_alone(
    kind: str, vision_folder: Folders, tmp_path: Path
) -> None:
    folder = vision_folder(kind)
    before = dict(load_vision_model(folder).named_parameters())
    trained = train(folder, lora=LoraConfig(rank=4, alpha=8))
    adapters = trained.policy.adapters
    assert adapters is not None and adapters.layers
    assert not any("visual" in name for name in adapters.layers)
    assert all(torch.equal(before[n], value) for n, value in trained.weights.items())
    assert any(bool(p.detach().any()) for n, p in adapters.named_parameters().items() if "_B" in n)
    names = trained.policy.published_parameters().keys()
    assert names == before.keys()
    # The same steps as with prompts of their own.
    apart = train(folder, lora=LoraConfig(rank=4, alpha=8), share_prompts=False)
    for ours, theirs in zip(trained.metrics, apart.metrics, strict=True):
        assert ours["policy/loss"] == pytest.approx(theirs["policy/loss"], abs=1e-5)
    with pytest.raises(ModelError, match="choose of"):
        load_policy(
            policy_config(folder, vision=FROZEN),
            RankConfig(),
            lora=LoraConfig(target_modules=("qkv",)),
        )


@pytest.mark.parametrize("kind", KINDS)
def test_ids_that_are_never_sampled_have_no_probability(kind: str, vision_folder: Folders) -> None:
    folder = vision_folder(kind)
    family, policy = family_of(folder), load(folder)
    batch = picture_batch(family)
    told = changed_behaviour(folder, batch, family.banned_ids)
    slots = no_slots(policy)
    config = policy_config(folder, vision=FROZEN)
    compare = CompareCommand(policy, slots, config, RankConfig(head_chunk=16))
    found = compare.run_comparison(told, 0, diagnose=False)
    assert found.versions[0].abs_diff_max < 1e-5
    plain = compare.run_comparison(changed_behaviour(folder, batch, ()), 0, diagnose=False)
    assert plain.versions[0].abs_diff_max > 1e-3
    trained = train_once(folder, told)
    assert trained["mismatch/logprob_abs_diff_mean"] < 1e-5


def changed_behaviour(folder: Path, batch: TrainBatch, banned: Sequence[int]) -> TrainBatch:
    """Return the batch as an engine that bans these ids would have reported it."""
    sequences: list[TrainSequence] = []
    for sequence in batch.sequences:
        own = published(folder, sequence, banned=banned, temperature=sequence.temperature)
        told = np.where(sequence.policy_mask, np.append(np.float32(0), own), 0).astype(np.float32)
        sequences.append(replace(sequence, behaviour_logprobs=told))
    return replace(batch, sequences=tuple(sequences))


def train_once(folder: Path, batch: TrainBatch) -> Mapping[str, float]:
    policy = load(folder)
    optimizer = Optimizer(policy.trained_parameters(), OptimizerConfig(lr=1e-3))
    trainer = Trainer(policy, optimizer, AlgorithmConfig(), RankConfig())
    return trainer.train_step(batch, 1e-3).metrics


def no_slots(policy: Policy) -> WeightSlots:
    from flotilla_common.weights.shared_memory import private_folder

    with private_folder("pictures") as folder:
        return WeightSlots(policy.published_parameters(), torch.float32, folder, "slots")


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_tower_shows_in_the_canary_and_in_a_comparison(
    kind: str, vision_folder: Folders
) -> None:
    folder = vision_folder(kind)
    policy, other = load(folder), load(folder)
    canary = score_canary(policy, 64)
    (shown,) = canary.pictures
    sequence = TrainSequence(
        *("canary", 0, 0.0, canary.token_ids),
        np.arange(len(canary.token_ids)) > 0,
        np.append(np.float32(0), canary.logprobs),
        *(1.0, 0),
        pictures=(shown.place,),
        canary=True,
    )
    batch = TrainBatch(1, (sequence,), pictures={shown.picture.sha256: shown.picture.data})
    config = policy_config(folder, vision=FROZEN)
    compare = CompareCommand(policy, no_slots(policy), config, RankConfig())
    found = compare.run_comparison(batch, 0, diagnose=True)
    assert found.versions[0].abs_diff_max < 1e-5
    assert {each.setting for each in found.hypotheses} >= {"temperature", "dtype"}
    tower: Any = find_tower(other.model)
    with torch.no_grad():
        next(iter(tower.blocks[0].parameters())).mul_(1.5)
        tower.patch_embed.proj.weight.mul_(0.7)
    wrong = score_canary(other, 64).logprobs
    end = shown.place.offset + policy_family(policy).count(shown.place.grid)
    before = shown.place.offset - 1
    assert np.array_equal(wrong[:before], canary.logprobs[:before])
    assert np.abs(wrong[end:] - canary.logprobs[end:]).max() > 1e-2


@pytest.mark.parametrize("kind", KINDS)
def test_a_burn_in_shows_as_many_pictures_as_fit(kind: str, vision_folder: Folders) -> None:
    folder = vision_folder(kind)
    rank = RankConfig(pack_tokens=512, head_chunk=16)
    config = policy_config(folder, vision=TRAINED, max_model_len=256)
    policy = load_policy(config, rank)
    assert policy.vision is not None
    ids, shown = policy.vision.fill(np.arange(256, dtype=np.int32), 0)
    assert len(ids) == 256
    assert (ids == policy_family(policy).image_pad).sum() > 190
    assert len({each.picture.sha256 for each in shown}) == len(shown) >= 1
    optimizer = Optimizer(policy.trained_parameters(), OptimizerConfig())
    before = [p.detach().clone() for p in policy.model.parameters()]
    peaks = BurnIn(policy, None, optimizer, AlgorithmConfig(), rank).run(256)
    assert peaks.tokens == 512
    now = list(policy.model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, now, strict=True))
    assert all(parameter.grad is None for parameter in now)


def test_its_files_name_every_weight_so_that_ranks_read_parts(vision_folder: Folders) -> None:
    for kind in KINDS:
        config = policy_config(vision_folder(kind), vision=FROZEN)
        assert has_all_tensors(load_policy(config, RankConfig()).model, find_own_files(config))


def wrong(sequence: TrainSequence, **changes: Any) -> TrainSequence:
    return replace(sequence, **changes)


def test_pictures_that_are_not_the_sequences_are_refused(vision_folder: Folders) -> None:
    folder = vision_folder("qwen3_vl")
    family, policy = family_of(folder), load(folder)
    batch = picture_batch(family, groups=1, size=1)
    (sequence,) = batch.sequences
    sampled = sequence.token_ids.copy()
    sampled[np.flatnonzero(sequence.policy_mask)[0]] = family.vision_end
    moved_place = replace(sequence.pictures[0], offset=sequence.pictures[0].offset + 1)
    cases: list[tuple[TrainSequence, str]] = [
        (wrong(sequence, token_ids=sampled), f"the policy wrote token {family.vision_end}"),
        (wrong(sequence, pictures=sequence.pictures[1:]), "not those of its pictures"),
        (
            wrong(sequence, pictures=(moved_place, *sequence.pictures[1:])),
            "not those of its pictures",
        ),
    ]
    for given, message in cases:
        with (
            pytest.raises(ValueError, match=message),
            policy.showing(TrainBatch(1, (given,), pictures=batch.pictures)),
        ):
            pass
    with (
        policy.showing(replace(batch, pictures={})),
        pytest.raises(ValueError, match="without its"),
    ):
        score_tokens(policy, sequence.token_ids, chunk=16, pictures=sequence.pictures)
    other = PlacedPicture(PICTURES[1].sha256, (1, 2, 2), 5)
    with policy.showing(batch), pytest.raises(ValueError, match="patches here, and 1x2x2"):
        policy.vision.store.find(other)  # pyright: ignore[reportOptionalMemberAccess]
    text = load_policy(policy_config(folder), RankConfig())
    with pytest.raises(ValueError, match=r"no policy\.vision"):
        text.showing(batch)


def test_a_model_of_another_family_is_refused(tmp_path: Path) -> None:
    from tests.support.multimodal_models import make_multimodal

    make_multimodal(tmp_path, "gemma3")
    with pytest.raises((ModelError, ConfigError), match="'gemma3' are not shown pictures"):
        load(tmp_path)


def test_pixels_are_kept_for_a_batch_and_then_forgotten(vision_folder: Folders) -> None:
    folder = vision_folder("qwen3_vl")
    policy, batch = load(folder), picture_batch(family_of(folder))
    assert policy.vision is not None
    store, place = policy.vision.store, batch.sequences[0].pictures[0]
    with policy.showing(batch):
        assert store.find(place) is store.find(place)
    with pytest.raises(ValueError, match="without its bytes"):
        store.find(place)

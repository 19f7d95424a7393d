"""Adapters are all that is trained, and engines get the weights that the trainer computes with."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from peft.tuners.lora import Linear
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from flotilla_learner.checkpoints.export import export_adapters
from flotilla_learner.config.algorithm import AlgorithmConfig
from flotilla_learner.config.lora import LoraConfig
from flotilla_learner.config.rank import RankConfig
from flotilla_learner.rank.checkpoint import CheckpointError
from flotilla_learner.rank.compare_command import CompareCommand
from flotilla_learner.rank.data_parallel import Replicas
from flotilla_learner.rank.merged_linear import MergedLinear, merge_weight
from flotilla_learner.rank.model import Policy
from flotilla_learner.rank.model_loading import ModelError
from flotilla_learner.rank.packed_rows import RowPacker
from flotilla_learner.rank.policy_loading import load_policy
from flotilla_learner.rank.rank_setup import RankModels, RankSetup, load_models
from flotilla_learner.rank.reference import ReferencePolicy
from flotilla_learner.rank.rows import Row
from flotilla_learner.rank.scoring import score_rows
from flotilla_learner.rank.tensor_shards import ShardFolder
from flotilla_learner.rank.weight_slots import WeightSlots
from flotilla_learner.types import StepResult, TrainBatch, TrainSequence
from tests.support.checkpoints import write_models
from tests.support.rank_configs import ALONE, policy_config
from tests.support.tiny_ranks import (
    changed,
    make_batch,
    make_trainer,
    parameters,
    reference_logprobs,
    same_bits,
    trained_parameters,
    write_sparse_model,
)

LORA = LoraConfig(rank=4, alpha=8)
RANK = RankConfig(pack_tokens=256, head_chunk=16)


def setup(folder: Path, tmp_path: Path, source: Path | None = None, **changes: object) -> RankSetup:
    return RankSetup.model_validate(
        {
            "name": "run",
            "shm_dir": tmp_path,
            "total_steps": 9,
            "policy": policy_config(folder),
            "algorithm": {},
            "optimizer": {"lr": 1e-2},
            "rank": RANK,
            "lora": LORA,
            "checkpoint": source,
            "place": ALONE,
            **changes,
        }
    )


def trained(models: RankModels, *steps: int, lr: float = 1e-2) -> list[StepResult]:
    found = [models.trainer.train_step(make_batch(step=step), lr) for step in steps]
    return [replace(result, seconds=0.0) for result in found]


def published(policy: Policy, folder: Path, version: int = 0) -> dict[str, Tensor]:
    folder.mkdir(exist_ok=True)
    slots = WeightSlots(
        policy.named_parameters(),
        policy.compute_dtype,
        folder,
        "run",
        merge=policy.published_tensor,
    )
    return load_file(slots.write_version(version)[0])


def scores(policy: Policy) -> dict[int, np.ndarray]:
    rows = [Row.from_sequence(i, s) for i, s in enumerate(make_batch().sequences)]
    return score_rows(policy, rows, RowPacker(policy, 256, Replicas()), chunk=16)


@pytest.mark.parametrize("tied", [True, False])
def test_a_step_changes_adapters_alone(model_folder: Path, untied_folder: Path, tied: bool) -> None:
    folder = model_folder if tied else untied_folder
    policy, optimizer, trainer = make_trainer(folder, lora=LORA)
    base, before = parameters(policy), trained_parameters(policy)
    assert all(torch.count_nonzero(v) == 0 for n, v in before.items() if ".lora_B." in n)
    result = trainer.train_step(make_batch(policy), lr=1e-2)
    assert result.metrics["policy/grad_norm"] > 0
    assert same_bits(parameters(policy), base)
    after = trained_parameters(policy)
    # A moves from the second step on: its gradient is B's.
    moved = {name for name in after if not torch.equal(after[name], before[name])}
    assert moved == {name for name in after if ".lora_B." in name}
    assert len(after) == 2 * 2 * 7
    held = {name.partition(".")[2] for name in optimizer.state_tensors()}
    assert held == set(after)


def test_the_gradient_is_that_of_the_merged_matrices(model_folder: Path) -> None:
    """B's is scale * dW A^T and A's is scale * B^T dW, where W trains in full."""
    policy, optimizer, trainer = make_trainer(model_folder, lora=LORA)
    for step in (1, 2):
        trainer.train_step(make_batch(step=step), lr=1e-2)
    whole, other, plain = make_trainer(model_folder)
    with torch.no_grad():
        for name, parameter in whole.named_parameters().items():
            parameter.copy_(policy.published_tensor(name, policy.named_parameters()[name]))
    batch, scale = make_batch(whole, step=3, shift=0.1), LORA.alpha / LORA.rank
    full, own = gradients(plain, other, batch), gradients(trainer, optimizer, batch)
    matrices = policy.trained_parameters()
    for name in {name.partition(".lora_")[0] for name in own}:
        change = full[f"{name}.weight"]
        a, b = (matrices[f"{name}.lora_{kind}.weight"].detach() for kind in "AB")
        expected = {"A": scale * b.t() @ change, "B": scale * change @ a.t()}
        for kind, value in expected.items():
            torch.testing.assert_close(
                own[f"{name}.lora_{kind}.weight"], value, rtol=1e-4, atol=1e-7
            )


def gradients(trainer: Any, optimizer: Any, batch: Any) -> dict[str, Tensor]:
    """The gradients that a step is about to apply, unclipped."""
    seen: dict[str, Tensor] = {}
    norm = optimizer.gradient_norm

    def listening() -> Tensor:
        seen.update({n: p.grad.clone() for n, p in optimizer._parameters.items()})
        return norm()

    optimizer.gradient_norm = listening
    trainer.train_step(batch, lr=1e-9)
    return seen


@pytest.fixture
def rounded_folder(model_folder: Path, tmp_path: Path) -> Path:
    """A model as most are published: bfloat16 holds all of its weights."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "rounded")
    return tmp_path / "rounded"


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_what_is_published_scores_to_the_bit_as_the_trainer_does(
    rounded_folder: Path, tmp_path: Path, dtype: str
) -> None:
    policy, _, trainer = make_trainer(rounded_folder, lora=LORA, dtype=dtype)
    served = load_policy(policy_config(rounded_folder, dtype=dtype), RANK)
    initial = scores(served)
    assert same_bits(published(policy, tmp_path), published(served, tmp_path))
    for step in range(1, 4):
        trainer.train_step(make_batch(step=step), lr=1e-3)
    weights = published(policy, tmp_path, 1)
    with torch.no_grad():
        for name, parameter in served.named_parameters().items():
            parameter.copy_(weights[name])
    own, theirs = scores(policy), scores(served)
    assert distance(own, initial) > 0.03
    assert distance(own, theirs) == (0 if dtype == "bfloat16" else pytest.approx(0, abs=1e-5))
    # Adapters beside their base, as PEFT computes them, are another policy than the engines have.
    with usual_products():
        assert (distance(scores(policy), theirs) > 0.03) is (dtype == "bfloat16")


@contextmanager
def usual_products() -> Generator[None]:
    def forward(layer: MergedLinear, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, layer.base_layer.weight.dtype != torch.float32):
            return Linear.forward(layer, x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MergedLinear, "forward", forward)
        yield


def distance(one: Mapping[int, np.ndarray], other: Mapping[int, np.ndarray]) -> float:
    """Return the largest difference of two scores."""
    return max(float(np.abs(one[index] - other[index]).max()) for index in one)


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_the_reference_is_the_base_without_a_second_model(rounded_folder: Path, dtype: str) -> None:
    algorithm = AlgorithmConfig.model_validate({"kl": {"coefficient": 0.1}})
    policy, _, trainer = make_trainer(rounded_folder, lora=LORA, dtype=dtype, algorithm=algorithm)
    kls = [trainer.train_step(make_batch(step=s), lr=1e-3).metrics["policy/kl"] for s in (1, 2)]
    assert kls[0] == 0 < kls[1]
    base = ReferencePolicy.copy_of(policy, offload=True)
    config = policy_config(rounded_folder, dtype=dtype)
    other = ReferencePolicy.from_config(config, policy, offload=True)
    assert base.weights_fingerprint() == other.weights_fingerprint()
    with base.on_policy_device() as frozen:
        assert frozen.model is policy.model
        own = scores(frozen)
    with other.on_policy_device() as frozen:
        assert distance(own, scores(frozen)) == 0
    assert distance(own, scores(policy)) > 0.01


def test_a_run_that_resumes_equals_the_one_that_was_never_stopped(
    model_folder: Path, tmp_path: Path
) -> None:
    kl = {"kl": {"coefficient": 0.1}}
    straight = load_models(setup(model_folder, tmp_path, algorithm=kl))
    trained(straight, 1, 2)
    saved = tmp_path / "checkpoint"
    files = write_models(saved, straight, 2)
    assert set(files.sha256) == {path.name for path in saved.iterdir()}
    assert not ShardFolder(saved).list_group("model")
    resumed = load_models(setup(model_folder, tmp_path, saved, algorithm=kl))
    assert resumed.step == 2
    assert same_bits(trained_parameters(resumed.policy), trained_parameters(straight.policy))
    assert trained(resumed, 3, 4) == trained(straight, 3, 4)
    assert same_bits(trained_parameters(resumed.policy), trained_parameters(straight.policy))
    moments = (models.optimizer.state_tensors() for models in (resumed, straight))
    assert same_bits(*moments)


@pytest.fixture(scope="module")
def saved(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    models = load_models(setup(model_folder, folder))
    trained(models, 1, 2)
    write_models(folder / "checkpoint", models, 2)
    return folder / "checkpoint"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora": None}, "holds only adapters of .*: set learner.lora"),
        ({"lora": {"rank": 8, "alpha": 8}}, "started with learner.lora.rank = 4, but it is 8"),
        ({"lora": {"rank": 4, "alpha": 4}}, "started with learner.lora.alpha = 8.0, but it is 4.0"),
        (
            {"lora": {"rank": 4, "alpha": 8, "target_modules": "q_proj"}},
            "other layers than learner.lora.target_modules",
        ),
    ],
    ids=["none", "rank", "alpha", "layers"],
)
def test_a_checkpoint_of_other_adapters_is_refused(
    model_folder: Path, tmp_path: Path, saved: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_models(setup(model_folder, tmp_path, saved, **changes))


def test_a_checkpoint_of_another_base_is_refused(
    model_folder: Path, rounded_folder: Path, tmp_path: Path, saved: Path
) -> None:
    with pytest.raises(CheckpointError, match=f"adapters belong to {model_folder} .weights .*"):
        load_models(setup(rounded_folder, tmp_path, saved))


def test_a_checkpoint_of_a_whole_model_is_refused(model_folder: Path, tmp_path: Path) -> None:
    models = load_models(setup(model_folder, tmp_path, lora=None))
    write_models(tmp_path / "whole", models, 0)
    with pytest.raises(CheckpointError, match="started without learner"):
        load_models(setup(model_folder, tmp_path, tmp_path / "whole"))


def test_peft_loads_an_export_onto_the_base(
    model_folder: Path, tmp_path: Path, saved: Path
) -> None:
    export_adapters(saved, model_folder, tmp_path / "adapters")
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(base, str(tmp_path / "adapters"))
    models = load_models(setup(model_folder, saved.parent, saved))
    for sequence in make_batch().sequences[:3]:
        ids = torch.from_numpy(sequence.token_ids.astype(np.int64))[None]
        with torch.no_grad():
            theirs = loaded(input_ids=ids).logits[0, :-1].div(0.8).log_softmax(-1)
        chosen = theirs.gather(1, ids[0, 1:, None]).squeeze(1).numpy()
        own = reference_logprobs(models.policy, sequence.token_ids, 0.8)
        np.testing.assert_allclose(chosen, own, rtol=0, atol=1e-4)


def test_what_an_adapter_does_not_change_keeps_its_bits() -> None:
    base = torch.tensor([[-0.0, 1.0], [2.0, -3.0]], dtype=torch.bfloat16)
    none = merge_weight(base, torch.ones(1, 2), torch.zeros(2, 1), 2.0)
    assert none.view(torch.int16).equal(base.view(torch.int16))
    # Below half of the last place of 1.0 nothing is left; above it is rounded once.
    some = merge_weight(base, torch.tensor([[0.0, 1.0]]), torch.tensor([[2**-9], [0.0]]), 1.0)
    assert some.equal(base)
    more = merge_weight(base, torch.tensor([[0.0, 1.0]]), torch.tensor([[2**-8], [0.0]]), 1.5)
    assert more[0, 1] == 1 + 2**-7


def test_layers_are_named_by_their_ends(model_folder: Path) -> None:
    chosen = LoraConfig(rank=4, target_modules=("q_proj", "layers.1.mlp.up_proj"))
    policy = load_policy(policy_config(model_folder), RANK, lora=chosen)
    assert policy.adapters is not None
    assert set(policy.adapters.layers) == {
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.mlp.up_proj",
    }


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("qproj", "'qproj' is no module of this model; choose of down_proj, gate_proj, k_proj"),
        ("lm_head", "'lm_head' is no linear layer of the body"),
        ("embed_tokens", "'embed_tokens' is no linear layer of the body"),
    ],
)
def test_what_cannot_have_an_adapter_is_refused(untied_folder: Path, target: str, why: str) -> None:
    chosen = LoraConfig(target_modules=target)
    with pytest.raises(ModelError, match=why):
        load_policy(policy_config(untied_folder), RANK, lora=chosen)


def test_a_base_whose_files_name_layers_otherwise_is_refused_at_the_start(
    model_folder: Path, tmp_path: Path
) -> None:
    """No export could merge adapters into them."""
    model: Any = AutoModelForCausalLM.from_pretrained(model_folder)
    # Of a body alone, whose names transformers completes as it reads them.
    model.base_model.save_pretrained(tmp_path / "body")
    assert load_policy(policy_config(tmp_path / "body"), RANK).packable
    named = (
        r"learner\.lora: the files of .*body have another name for model\.layers\.0\.self_attn\."
    )
    with pytest.raises(ModelError, match=named):
        load_models(setup(tmp_path / "body", tmp_path))


def test_experts_are_left_out(tmp_path: Path) -> None:
    config = policy_config(write_sparse_model(tmp_path))
    policy = load_policy(config, RANK, lora=LORA)
    assert policy.adapters is not None
    ends = {name.rpartition(".")[2] for name in policy.adapters.layers}
    assert ends == {"q_proj", "k_proj", "v_proj", "o_proj"}
    with pytest.raises(ModelError, match="'gate_up_proj' is an expert's weight"):
        load_policy(config, RANK, lora=LoraConfig(target_modules="gate_up_proj"))


GAE = {"advantage": "gae", "critic": {"lr": 1e-2}, "kl": {"coefficient": 0.05}}


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_a_critic_has_adapters_of_its_own_on_the_same_base(
    model_folder: Path, tmp_path: Path, dtype: str
) -> None:
    changes: dict[str, Any] = {"algorithm": GAE, "policy": policy_config(model_folder, dtype=dtype)}
    models = load_models(setup(model_folder, tmp_path, **changes))
    assert models.critic is not None
    assert models.critic.body is models.policy.model.base_model
    base, before = parameters(models.policy), trained_parameters(models.policy)
    values = critic_state(models)
    trained(models, 1)
    # At first its head is zero, so that nothing of the body has a gradient.
    assert moved(models, values) == {"model.head.weight", "model.head.bias"}
    trained(models, 2, 3)
    assert moved(models, values) == values.keys()
    assert same_bits(parameters(models.policy), base)
    own = trained_parameters(models.policy)
    assert not any(torch.equal(own[name], value) for name, value in before.items())
    write_models(tmp_path / "checkpoint", models, 3)
    resumed = load_models(setup(model_folder, tmp_path, tmp_path / "checkpoint", **changes))
    assert trained(resumed, 4) == trained(models, 4)
    assert same_bits(trained_parameters(resumed.policy), trained_parameters(models.policy))
    assert same_bits(critic_state(resumed), critic_state(models))


def test_what_a_critic_recomputes_in_its_backward_pass_is_its_own(
    model_folder: Path, tmp_path: Path
) -> None:
    states: list[dict[str, Tensor]] = []
    for checkpointing in ("off", "full"):
        rank = RANK.model_copy(update={"gradient_checkpointing": checkpointing})
        models = load_models(setup(model_folder, tmp_path, algorithm=GAE, rank=rank))
        trained(models, 1, 2, 3)
        states.append({**critic_state(models), **trained_parameters(models.policy)})
    assert same_bits(*states)


def critic_state(models: RankModels) -> dict[str, Tensor]:
    assert models.critic is not None
    return {name: value.clone() for name, value in models.critic.state_tensors().items()}


def moved(models: RankModels, before: Mapping[str, Tensor]) -> set[str]:
    state = critic_state(models)
    return {name for name, value in before.items() if not torch.equal(state[name], value)}


def test_older_publications_score_without_the_adapters_that_are_merged_in(
    model_folder: Path, tmp_path: Path
) -> None:
    models = load_models(setup(model_folder, tmp_path))
    policy = models.policy
    slots = WeightSlots(
        policy.named_parameters(),
        policy.compute_dtype,
        tmp_path,
        "run",
        merge=policy.published_tensor,
    )
    sequences: list[TrainSequence] = []
    for version in (0, 1, 2):
        slots.write_version(version)
        sampled = changed(make_batch(policy, step=version + 1, groups=1), staleness=2 - version)
        sequences += sampled.sequences
        if version < 2:
            trained(models, version + 1)
    own = scores(policy)
    comparing = CompareCommand(policy, slots, policy_config(model_folder), RANK)
    found = comparing.run_comparison(TrainBatch(3, tuple(sequences)), 2, diagnose=True)
    assert found.versions.keys() == {0, 1, 2}
    assert max(version.abs_diff_max for version in found.versions.values()) < 1e-4
    stale = {h.value: h.effect for h in found.hypotheses if h.setting == "weights"}
    assert stale["those of version 0"] > stale["those of version 1"] > 0.01
    first = "those of policy.model, which the run began with"
    assert stale[first] == pytest.approx(stale["those of version 0"], rel=1e-4)
    # Nothing of it stays in the model.
    assert distance(scores(policy), own) == 0

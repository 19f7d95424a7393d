"""Run specs, and the GPUs that each is to fit: docs/scaling.md is written from this table."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flotilla_common.models.activation_memory import DecoderShape
from flotilla_common.spec.spec import parse_shared
from flotilla_common.spec.spec_loading import load_spec
from flotilla_launcher.doctor.memory_estimate import (
    GIB,
    EngineMemory,
    TrainerMemory,
    estimate_engine,
    estimate_trainer,
)
from flotilla_launcher.doctor.model_size import ModelSize
from flotilla_launcher.doctor.vision_size import VisionSize
from tests.support.doctor import sections
from tests.support.repository import ROOT

# From the models' config.json and weights on the hub.
MODELS: Mapping[str, ModelSize] = {
    "openenv-fleet-grpo": ModelSize(
        1_543_714_304, 28, 1536, 8960, 151_936, kv_heads=2, head_dim=128, positions=32_768
    ),
    "qwen3-8b": ModelSize(
        8_190_735_360, 36, 4096, 12_288, 151_936, kv_heads=8, head_dim=128, positions=40_960
    ),
    "qwen3-32b": ModelSize(
        32_762_123_264, 64, 5120, 25_600, 151_936, kv_heads=8, head_dim=128, positions=40_960
    ),
    "vl-8b": ModelSize(
        *(8_767_123_696, 36, 4096, 12_288, 151_936),
        kv_heads=8,
        head_dim=128,
        positions=262_144,
        vision=VisionSize(
            tower=415_829_232,
            projector=160_466_944,
            shape=DecoderShape(27, 1152, 4304),
            patches_per_token=4,
            patch_values=1536,
            features=4 * 4096,
            # By the spec's policy.vision.max_pixels.
            largest=1032,
        ),
    ),
}


@dataclass(frozen=True, slots=True)
class Layout:
    """A spec with overrides, and the GPUs of its learner and of each rollout replica."""

    spec: str
    # GB of one GPU, as it is sold.
    gpu: int
    overrides: tuple[str, ...] = ()

    @property
    def gpu_bytes(self) -> int:
        return self.gpu * GIB

    def read_spec(self) -> dict[str, Any]:
        return load_spec(ROOT / f"deploy/runs/{self.spec}.toml", self.overrides)

    def measure_needs(self) -> tuple[TrainerMemory, EngineMemory]:
        """Return the doctor's computation of its memory."""
        content = self.read_spec()
        own = sections(content)
        policy = parse_shared(content, where="spec").policy
        model = MODELS[self.spec]
        return (
            estimate_trainer(model, policy, own["learner"]),
            estimate_engine(model, policy, own["rollout"]),
        )


_NOT_OFFLOADED = "--learner.rank.offload_optimizer=false"
LAYOUTS = (
    Layout("openenv-fleet-grpo", 80),
    Layout("qwen3-8b", 80),
    Layout(
        "qwen3-8b",
        80,
        (_NOT_OFFLOADED, "--learner.rank.processes=4", "--launcher.learner.gpus=4"),
    ),
    Layout("qwen3-8b", 141),
    Layout("qwen3-8b", 141, (_NOT_OFFLOADED,)),
    Layout(
        "qwen3-32b",
        80,
        (
            "--learner.rank.offload_optimizer=true",
            "--rollout.engine.tensor_parallel=2",
            "--launcher.rollout.gpus=2",
        ),
    ),
    Layout("qwen3-32b", 141),
    Layout("vl-8b", 80),
    Layout("vl-8b", 141),
    Layout(
        "vl-8b",
        141,
        (
            "--learner.rank.shard=false",
            "--learner.rank.processes=1",
            "--launcher.learner.gpus=1",
        ),
    ),
)

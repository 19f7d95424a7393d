"""The learner's part of a run spec, `[learner]`."""

import re
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.config import ConfigModel
from flotilla_common.spec.number_ranges import MOST_CANDIDATES, MOST_STEPS, Count, Seconds, Steps
from flotilla_common.spec.spec import ServiceConfig, SharedConfig
from flotilla_learner.config.alarms import AlarmsConfig
from flotilla_learner.config.algorithm import BEYOND_REWARDS, AlgorithmConfig
from flotilla_learner.config.dumps import DumpsConfig
from flotilla_learner.config.guard import GuardConfig
from flotilla_learner.config.hosted import check_hosted
from flotilla_learner.config.imitation import (
    ImitationConfig,
    SftConfig,
    WarmStartConfig,
    check_imitation,
    check_warm_start,
)
from flotilla_learner.config.judge import JudgeConfig, check_judge
from flotilla_learner.config.lora import LoraConfig
from flotilla_learner.config.pictures import check_pictures
from flotilla_learner.config.rank import RankConfig
from flotilla_learner.config.sampling import SamplingConfig, SelectConfig, Tasks
from flotilla_learner.config.teacher import TeacherConfig, check_teacher
from flotilla_learner.config.tracking import TrackingConfig

EvalMoment = Literal["before", "during", "after"]
Decay = Annotated[float, Field(ge=0, lt=1)]

REMOTE_OPTIONS_VARIABLE = "FLOTILLA_REMOTE_OPTIONS"
_REMOTE_URL = re.compile(r"[a-z][a-z0-9+.-]*://[^@\s]*")
_SECRET_OPTION = re.compile(r"key|secret|token|password|credential|username", re.IGNORECASE)


class OptimizerConfig(ConfigModel):
    """AdamW and its schedule."""

    lr: float = Field(default=1e-6, gt=0, le=1)
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    weight_decay: float = Field(default=0.0, ge=0, le=10)
    eps: float = Field(default=1e-8, gt=0, le=1)
    # Largest norm of the whole gradient; 0 switches clipping off.
    grad_clip: float = Field(default=1.0, ge=0, le=1e6)
    # Steps over which the learning rate rises linearly from 0.
    warmup_steps: int = Field(default=0, ge=0, le=MOST_STEPS)
    # After warm-up `linear` and `cosine` fall, and would reach 0 one step after the run's last.
    schedule: Literal["constant", "linear", "cosine"] = "constant"


class CheckpointConfig(ConfigModel):
    """Schedule and storage of checkpoints of parameters and optimizer."""

    # Steps between checkpoints; the last step always makes one.
    every: Steps = 20
    # How many to keep.
    keep: Count = 2
    # Second place for checkpoints, in a folder named after the run: any fsspec URL, such as
    # `s3://bucket/prefix`; absent: none. Its keys come from the environment, never from here.
    remote: str | None = None
    # Options of its file system, such as `endpoint_url`.
    remote_options: dict[str, str | int | float | bool] = Field(
        default_factory=dict[str, str | int | float | bool]
    )
    # How many to keep in the store.
    remote_keep: Count = 2
    # How long the end of a run waits for the upload of its last checkpoint.
    remote_exit_s: Seconds = 600.0

    @model_validator(mode="after")
    def _holds_no_keys(self) -> Self:
        for name in self.remote_options:
            if _SECRET_OPTION.search(name):
                raise ValueError(
                    f"remote_options.{name}: keys do not belong in a spec; pass such options"
                    f" as a JSON object in the environment variable {REMOTE_OPTIONS_VARIABLE}"
                )
        if self.remote is not None and not _REMOTE_URL.fullmatch(self.remote):
            raise ValueError(
                "remote: expected a URL such as s3://bucket/prefix, without user and password"
            )
        return self


class EvalSetConfig(ConfigModel):
    """One fixed set of tasks and one way to sample them."""

    # `heldout` is reported as `eval/...`, any other name as `eval_{name}/...`.
    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    # A task file: a JSON array or an object with the key `tasks`.
    tasks: str
    # 0 is greedy decoding.
    temperature: float = Field(default=1.0, ge=0, le=10)
    # Most tasks to use, spread evenly over the environments that `learner.select` leaves; absent:
    # all.
    count: Tasks | None = None
    # Attempts at each task.
    attempts: int = Field(default=1, ge=1, le=64)
    # pass@k is reported for these k, and always for 1 and `attempts`; absent: for powers of two.
    pass_at: tuple[Annotated[int, Field(ge=1, le=64)], ...] | None = None
    when: tuple[EvalMoment, ...] = ("before", "during", "after")

    @property
    def reported_k(self) -> tuple[int, ...]:
        """Every k of which pass@k is reported, in order."""
        powers = [2**n for n in range(self.attempts.bit_length())]
        chosen = powers if self.pass_at is None else self.pass_at
        return tuple(sorted({1, self.attempts, *chosen}))

    @model_validator(mode="after")
    def _attempts_suffice(self) -> Self:
        if self.pass_at and max(self.pass_at) > self.attempts:
            raise ValueError(
                f"pass_at: pass@{max(self.pass_at)} needs as many attempts, but attempts is"
                f" {self.attempts}"
            )
        return self


class EvalConfig(ConfigModel):
    """Evaluation on tasks that are never trained on."""

    sets: tuple[EvalSetConfig, ...] = ()
    # Steps between the evaluations during training; 0: none.
    every: int = Field(default=0, ge=0, le=MOST_STEPS)
    # How long the next publication waits for an evaluation of the policy before it.
    hold_s: Seconds = 120.0
    # Tasks of an evaluation that may be leased at once.
    slots: Count = 64

    @model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        names = [chosen.name for chosen in self.sets]
        if len(set(names)) < len(names):
            raise ValueError(f"sets: their names must differ; got {names}")
        return self


class WeightsConfig(ConfigModel):
    """Distribution of published weights to engines."""

    # Network between learner and engines. `private`: any transport that both sides support.
    # `public`: it may have strangers in it, so only WeightService under TLS is used; shared memory,
    # NCCL and gloo neither encrypt nor authenticate.
    network: Literal["private", "public"] = "private"
    # Port of WeightService, for machines with few open ports; 0 is any free one.
    port: int = Field(default=0, ge=0, le=65535)
    # HOST or HOST:PORT at which engines reach it; absent: the learner's host and that port.
    advertise: str | None = None
    # New weights sent into live engines, by vLLM's weight transfer. `auto`: to engines on other
    # machines of a private network, over NCCL between GPUs and gloo otherwise. `gloo`, `nccl`: to
    # all engines, also on this machine. `ipc`: to engines on the learner's own devices, through
    # their memory, and to others as with `auto`. `off`: engines read shared memory, or fetch.
    transfer: Literal["auto", "off", "gloo", "nccl", "ipc"] = "auto"
    # Port at which engines meet the sender; 0 is any free one.
    transfer_port: int = Field(default=0, ge=0, le=65535)
    # A sender or engine that makes no progress for this long is abandoned by the other.
    transfer_stall_s: Seconds = 15.0
    # For engines that fetch every publication. `auto`: only the difference to one that they hold,
    # if few words changed; they keep a copy of the newest. `off`: the whole publication.
    delta: Literal["auto", "off"] = "auto"

    @model_validator(mode="after")
    def _strangers_receive_nothing(self) -> Self:
        if self.network == "public" and self.transfer in ("gloo", "nccl", "ipc"):
            raise ValueError(
                f"transfer: {self.transfer!r}, but network is 'public': the weights' sender neither"
                " encrypts nor authenticates; set learner.weights.transfer = 'auto', so that"
                " engines fetch from WeightService under TLS"
            )
        return self


class JournalConfig(ConfigModel):
    """What the journal keeps."""

    # Never prune token ids, logprobs, messages and pictures of attempts, so that a later run can
    # imitate all of them: 4 bytes a token, 4 more for a sampled one, and the rest as it came. By
    # default, what every kept checkpoint has behind it is pruned, except each step's first group.
    keep_payloads: bool = False


class IntakeConfig(ConfigModel):
    """Limits on trajectories in transit to the learner."""

    # Bytes in transit from one worker; its further trajectories wait unread.
    worker_bytes: int = Field(default=8 * 2**20, ge=2**20, le=2**40)
    # Bytes in transit from all workers together.
    total_bytes: int = Field(default=64 * 2**20, ge=2**20, le=2**40)
    # A submission without progress for this long is aborted; its worker sends it again.
    stall_s: Seconds = 30.0


class LearnerConfig(ServiceConfig):
    """Everything under `[learner]`."""

    # Who trains: `ranks`, the learner's own processes on its own devices, or `tinker`, a service
    # that speaks Tinker's protocol (docs/tinker_training.md) and also samples: see policy.tinker.
    engine: Literal["ranks", "tinker"] = "ranks"
    # `eval` evaluates the run's newest policy on all sets and ends, without training.
    mode: Literal["train", "eval"] = "train"
    # `rl` trains on attempts that engines sample; `sft` imitates the demonstrations of `[sft]`.
    objective: Literal["rl", "sft"] = "rl"
    sft: SftConfig | None = None
    # Imitate demonstrations first, then train as `rl` does; absent: no such steps.
    warm_start: WarmStartConfig | None = None
    # A task file: a JSON array or an object with the key `tasks`. This key, `groups_per_step` and
    # `group_size` have no default, but are absent with objective "sft".
    tasks: str = ""
    # The manifest of `flotilla data prepare` that the tasks must be from; absent: any tasks.
    data: str | None = Field(default=None, min_length=1)
    # Optimizer steps, beside those of a warm start.
    steps: Steps
    groups_per_step: Count = 0
    # Attempts at each task, sampled together.
    group_size: int = Field(default=0, ge=2, le=1024)
    # Versions by which the policy that wrote a token may lag behind the trainer's.
    # 0 is strictly on policy: rollout and training take turns.
    max_staleness: int = Field(default=1, ge=0, le=1000)
    # A group with fewer graded attempts at its deadline is dropped.
    min_group: int = Field(default=2, ge=2, le=1024)
    # Tries of one attempt in total.
    max_tries: int = Field(default=3, ge=1, le=1000)
    # Times that a task whose group was dropped comes back before it is given up.
    max_requeues: int = Field(default=2, ge=0, le=1000)
    lease_ttl_s: Seconds = 30.0
    # From a group's first lease until its work is no longer accepted.
    group_deadline_s: Seconds = 1800.0
    # Of samples to train on; evaluation sets have their own.
    temperature: float = Field(default=1.0, gt=0, le=10)
    # Sample them from the `top_k` likeliest tokens, or with `top_p` from the likeliest of those
    # that have so much of the probability. Engines name what each token was sampled from, and
    # trainer and guard score it among the same. Absent: from all tokens. Evaluation has no such
    # limits.
    top_k: int | None = Field(default=None, ge=2, le=MOST_CANDIDATES)
    top_p: float = Field(default=1.0, gt=0, le=1)
    # Groups whose rewards are all equal carry no signal. `mask`: trained with advantage 0, so
    # that their tokens count in the mean. `drop`: left out of the batch and not replaced.
    # `replace`: left out, and more are sampled until a step has `groups_per_step` with signal.
    constant_groups: Literal["mask", "drop", "replace"] = "mask"
    # For `replace`: most groups replaced in one step, in multiples of groups_per_step.
    max_refill: int = Field(default=4, ge=1, le=1000)
    # Longest time that an engine may take to fetch new weights, and again to load them. Leases of
    # a worker that does not serve them by then end; an engine that does not answer is restarted.
    publish_timeout_s: Seconds = 120.0
    intake: IntakeConfig = IntakeConfig()
    weights: WeightsConfig = WeightsConfig()
    # How long a worker stays a member after its Attach stream breaks.
    attach_grace_s: Seconds = 10.0
    # A stage without progress for this long is logged with all stacks.
    stall_s: Seconds = 300.0
    algorithm: AlgorithmConfig = AlgorithmConfig()
    # Who scores the policy's samples, for distillation; absent: nobody.
    teacher: TeacherConfig | None = None
    # Who compares the attempts of a group, where no verifier can grade one by itself; absent:
    # nobody.
    judge: JudgeConfig | None = None
    optimizer: OptimizerConfig = OptimizerConfig()
    rank: RankConfig = RankConfig()
    # Train adapters in place of the model; absent: all of its parameters.
    lora: LoraConfig | None = None
    guard: GuardConfig = GuardConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    journal: JournalConfig = JournalConfig()
    eval: EvalConfig = EvalConfig()
    dumps: DumpsConfig = DumpsConfig()
    select: SelectConfig = SelectConfig()
    sampling: SamplingConfig = SamplingConfig()
    tracking: TrackingConfig = TrackingConfig()
    alarms: AlarmsConfig = AlarmsConfig()

    @model_validator(mode="after")
    def _objective_is_whole(self) -> Self:
        if self.objective == "sft":
            if self.sft is None:
                raise ValueError("sft: missing; its key `data` names the file of demonstrations")
            if self.warm_start is not None:
                raise ValueError(
                    'warm_start: with learner.objective = "sft" all steps imitate; leave it out, or'
                    " leave learner.objective and learner.sft out"
                )
            return self
        needed = ("tasks", "groups_per_step", "group_size")
        if lacking := [key for key in needed if key not in self.model_fields_set]:
            also = f", nor have {' and '.join(lacking[1:])}" if lacking[1:] else ""
            raise ValueError(f"{lacking[0]}: missing; it has no default{also}")
        if self.sft is not None:
            raise ValueError('sft: it has no effect without learner.objective = "sft"')
        return self

    @model_validator(mode="after")
    def _a_group_can_be_complete(self) -> Self:
        if self.objective == "rl" and self.min_group > self.group_size:
            raise ValueError(
                f"min_group: {self.min_group}, but a group has only {self.group_size} attempts"
            )
        return self

    @model_validator(mode="after")
    def _candidates_are_bounded(self) -> Self:
        if self.top_p < 1 and self.top_k is None:
            raise ValueError(
                f"top_p: {self.top_p:g} alone may keep the whole vocabulary, and what it keeps is"
                " sent and stored with each token, so that the trainer scores it among the same;"
                f" set learner.top_k too (2 to {MOST_CANDIDATES}), or leave top_p out"
            )
        return self

    @model_validator(mode="after")
    def _what_is_learned_from_is_not_left_out(self) -> Self:
        advantage, choice = self.algorithm.advantage, self.constant_groups
        if choice != "mask" and advantage in BEYOND_REWARDS:
            raise ValueError(
                f"constant_groups: {choice!r} judges groups by their rewards alone, and leaves out"
                f' some that algorithm.advantage = "{advantage}" learns from; set it to "mask"'
            )
        return self

    @model_validator(mode="after")
    def _no_guard_without_samples(self) -> Self:
        """Switch the guard off with `engine = "tinker"` and `objective = "sft"`, unless told
        otherwise."""
        # Not before the fields are read: after such a validator, lists of a spec are no tuples.
        samples = self.engine == "ranks" and self.objective == "rl"
        if samples or "mode" in self.guard.model_fields_set:
            return self
        return self.model_copy(update={"guard": self.guard.model_copy(update={"mode": "off"})})

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises ConfigError if the model has no more tokens than the likeliest ones that are asked
        for: engines then answer with fewer, or refuse each attempt."""
        asked = {
            "learner.top_k": self.top_k or 0,
            "learner.algorithm.distillation.top_k": self.algorithm.distillation.top_k,
        }
        for key, count in asked.items():
            if count >= vocab_size:
                raise ConfigError(
                    f"{key}: {count}, but policy.model has only {vocab_size} tokens in all; lower"
                    " it, or leave it out"
                )

    @property
    def imitation(self) -> ImitationConfig | None:
        """What the run imitates, in all of its steps or in the first ones."""
        return self.sft or self.warm_start

    @property
    def warm_steps(self) -> int:
        """Steps of the warm start, which have the numbers 1 to this."""
        return 0 if self.warm_start is None else self.warm_start.steps

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run, those of a warm start included."""
        return self.warm_steps + self.steps

    def evaluates_during(self, version: int) -> bool:
        """Return True if sets with `during` evaluate this version: that which a warm start ends
        with, and after it every `eval.every` steps before the last."""
        done, every = version - self.warm_steps, self.eval.every
        if version == 0 or not 0 <= done < self.steps:
            return False
        return done == 0 or (every > 0 and done % every == 0)

    def check(self, shared: SharedConfig) -> None:
        if self.warm_start is not None:
            check_warm_start(self, shared.policy)
        check_teacher(self, shared.policy)
        check_judge(self, shared.policy)
        if self.objective == "sft":
            check_imitation(self, shared.policy)
        elif self.engine == "tinker":
            check_hosted(self, shared.policy)
        else:
            check_pictures(self, shared.policy)
        published = shared.policy.adapter_rank
        if published is None:
            return
        if self.lora is None or self.lora.rank != published:
            own = "is absent" if self.lora is None else f"is {self.lora.rank}"
            raise ConfigError(
                f"policy.adapter_rank: {published}, but learner.lora.rank {own}; set both to the"
                " same rank, or leave policy.adapter_rank out to publish merged weights"
            )
        if self.weights.transfer in ("gloo", "nccl", "ipc"):
            raise ConfigError(
                f"learner.weights.transfer: {self.weights.transfer!r} sends whole weights, but with"
                " policy.adapter_rank there are none; leave it out"
            )

"""The page about scaling. `python -m tests.deploy.scaling_page` writes it from its tables."""

from collections.abc import Iterable, Iterator, Sequence

from flotilla_common.spec.config import canonical_json
from flotilla_launcher.doctor.memory_estimate import GIB
from flotilla_launcher.run_spec import parse_spec
from flotilla_launcher.state import ROLLOUT
from tests.deploy.gpu_lines import GPU_LINES
from tests.deploy.layouts import LAYOUTS, Layout
from tests.support.repository import ROOT

PAGE = ROOT / "docs" / "scaling.md"
_HEAD = """\
# Scaling

```
flotilla plan   deploy/runs/qwen3-8b.toml --gpus 4x80GB    # one machine, refused if it does not fit
flotilla plan   deploy/runs/qwen3-32b.toml                 # the machines in the spec
flotilla doctor deploy/runs/qwen3-8b.toml                  # and all other causes of failure
```

These commands check whether a spec fits on GPUs that are not here. A spec that does not fit is
refused, with settings that take less memory. The table below lists which spec trains which model on
how many GPUs, with the memory that the doctor computes. All figures are computed, not measured:
`python -m tests.deploy.scaling_page` writes this page from the tables of the tests,
`tests/deploy/layouts.py` and `tests/deploy/gpu_lines.py`.

Learner and rollout have separate GPUs and work at the same time. The learner's ranks, one per GPU,
split the model (`learner.rank.shard`,
[running.md](running.md#more-than-one-gpu-or-core-for-training)). Each rollout replica has a full
copy on one GPU, or one split over `rollout.engine.tensor_parallel` GPUs.

## Memory of a GPU

GiB per GPU. For the learner: a rank's part of parameters, gradients and AdamW's moments, including
the blocks gathered at one time; the activations of a pass over the longest sequence and the logits
of one chunk. For a rollout replica: the engine's weights, and how many sequences of full length fit
into its KV cache at once. `host` is the memory of the learner's machine for offloaded parts and a
checkpoint in progress. Where the policy sees pictures, the activations include the pixels, the
features and the passing layer of the tower for a pack with as many as it may show, and an engine
keeps room for its encoder cache and for encoding as much.

"""
_LAYOUT_COLUMNS = (
    "spec",
    "GPUs: learner + rollout",
    "GB each",
    "parameters",
    "gradients",
    "moments",
    "activations",
    "**total**",
    "host",
    "engine: weights",
    "sequences",
)
_LINES = """
## Code that only GPUs execute

Tests and figures of this repository come from machines without GPUs, except those on one GPU in
[running.md](running.md#on-one-gpu), [performance.md](performance.md#a-rank-on-a-gpu) and
[mismatch.md](mismatch.md). This table lists the lines of the services that only a GPU reaches, or
that behave differently there; the last column is the test without one. On a machine with a GPU,
`make test-full` also runs `tests/gpu`. These pass on an H100 and on an H200 with torch 2.11, those
of split models with torch 2.13's `torch.distributed.fsdp` in it. Nothing has been run on several
GPUs.

"""
_BEYOND = """
Some GPU code has no line in the services: torch's bfloat16 kernels (attention, AdamW, autocast),
FSDP2's copies on separate streams, and vLLM's GPU worker. Of the latter, CPUs test tensor
parallelism with two workers, the record of experts (`policy.routing_replay`) with Flotilla's
recorder (`tests/rollout/adapters/test_vllm_experts.py`), and adapters (`policy.adapter_rank`) in
torch (`tests/e2e/test_adapter_publication.py`).

Two measurements need several GPUs and are missing: the time of weights over NCCL, and the gain if
each part of a split model went directly to the engine worker that needs it, as in vLLM's
`nccl_m2n`. Today the learner's ranks gather a split model tensor by tensor and write it to shared
memory, where the sender reads it, with every backend. If these gathers take most of a publication,
compare them with m2n.
"""


def write_page() -> str:
    """Return the page."""
    lines = (
        (f"`{file}`", f"`{line}`", *message)
        for file, found in GPU_LINES.items()
        for line, message in found.items()
    )
    columns = ("file", "line", "on a GPU", "tried without one")
    return "".join(
        (
            _HEAD,
            *_table(_LAYOUT_COLUMNS, map(_describe, LAYOUTS)),
            *_explain(),
            _LINES,
            *_table(columns, lines),
            _BEYOND,
        )
    )


def _describe(layout: Layout) -> tuple[str, ...]:
    rank, engine = layout.measure_needs()
    config = parse_spec(canonical_json(layout.read_spec())).config
    replicas, gpus = config.replica_counts()[ROLLOUT], engine.gpus
    rollout = f"{replicas}" if gpus == 1 else f"{replicas} x {gpus}"
    held = (rank.parameters, rank.gradients, rank.moments, rank.activations, rank.device)
    sizes = [f"{size / GIB:.1f}" for size in held]
    sizes[-1] = f"**{sizes[-1]}**"
    mark = f" [{_footnotes()[layout]}]" if layout.overrides else ""
    return (
        f"`{layout.spec}.toml`{mark}",
        f"{rank.gpus} + {rollout}",
        f"{layout.gpu}",
        *sizes,
        f"{rank.host / GIB:.0f}",
        f"{engine.weights / GIB:.1f}",
        f"{engine.kv_cache_bytes(layout.gpu_bytes) / engine.sequence:.1f}",
    )


def _footnotes() -> dict[Layout, int]:
    changed = [layout for layout in LAYOUTS if layout.overrides]
    return {layout: number for number, layout in enumerate(changed, 1)}


def _explain() -> Iterator[str]:
    yield "\nMarked rows use these overrides:\n\n"
    for layout, number in _footnotes().items():
        yield f"- [{number}] `{' '.join(layout.overrides)}`\n"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |\n"
    yield f"|{'---|' * len(columns)}\n"
    for row in rows:
        yield f"| {' | '.join(row)} |\n"


if __name__ == "__main__":
    PAGE.write_text(write_page())

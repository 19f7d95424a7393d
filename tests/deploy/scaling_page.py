"""The page of scaling. `python -m tests.deploy.scaling_page` writes it from its tables."""

from collections.abc import Iterable, Iterator, Sequence

from services.common.config import canonical_json
from services.launcher.doctor.memory_estimate import GIB
from services.launcher.run_plan import parse_spec
from services.launcher.state import ROLLOUT
from tests.deploy.gpu_lines import GPU_LINES
from tests.deploy.layouts import LAYOUTS, Layout
from tests.support.repository import ROOT

PAGE = ROOT / "docs" / "scaling.md"
_HEAD = """\
# Scaling

Which spec trains which model on how many GPUs, with the memory that the doctor computes. The
command `python -m tests.deploy.scaling_page` writes this page from the tables that the tests try,
`tests/deploy/layouts.py` and `tests/deploy/gpu_lines.py`. Figures are computed, not measured.

Learner and rollout have GPUs of their own and work at the same time: the learner's ranks, one to a
GPU, split the model among them (`learner.rank.shard`,
[running.md](running.md#more-than-one-gpu-or-core-for-training)); each rollout replica has a whole
one, or one split over `rollout.engine.tensor_parallel` GPUs. These say whether a spec fits into
GPUs that are not here:

```
flotilla plan   deploy/runs/qwen3-8b.toml --gpus 4x80GB    # one machine, refused if it does not fit
flotilla plan   deploy/runs/qwen3-32b.toml                 # the machines that the spec asks for
flotilla doctor deploy/runs/qwen3-8b.toml                  # and all else that would make it fail
```

What does not fit is refused, with the smallest change after which it would.

## Memory of a GPU

GiB of each GPU of the learner: a rank's part of parameters, gradients and AdamW's moments, with
what is whole at once of them; what a pass over the longest sequence keeps, and the logits of one
chunk. Beside it, of each GPU of a rollout replica, its engine: weights, and how many sequences of
full length its KV cache holds at once. `host` is what the learner's machine holds: offloaded
parts, and a checkpoint while it is written.

"""
_LAYOUT_COLUMNS = (
    "spec",
    "GPUs: learner + rollout",
    "GB each",
    "parameters",
    "gradients",
    "moments",
    "activations",
    "**in all**",
    "host",
    "engine: weights",
    "sequences",
)
_LINES = """
## What no machine without GPUs executes

Tests and figures of this repository come from machines without GPUs, but for what
[running.md](running.md#on-a-gpu) and [mismatch.md](mismatch.md) say of an H100. These are the lines
of the services that only a GPU reaches, or that do something else there; what stands in for them
elsewhere is in the last column. `make test-full` on a machine with a GPU runs `tests/gpu`, too.
Several GPUs have run none of it.

"""
_BEYOND = """
Without a line of their own, and only on GPUs: torch's kernels in bfloat16 (attention, AdamW,
autocast), FSDP2's copies on streams of their own, and all of vLLM's GPU worker, with its tensor
parallelism, which CPUs try with two workers, its record of experts (`policy.routing_replay`), for
which a recorder of ours stands in (`tests/rollout/adapters/test_vllm_experts.py`), and its kernels
for adapters (`policy.adapter_rank`), which CPUs compute in torch
(`tests/e2e/test_adapter_publication.py`).

Not here, for it takes several GPUs: how long weights take over NCCL, and what would be saved if
each part of a split model went straight to the engine's worker that needs it, as vLLM's `nccl_m2n`
has it. The learner's ranks gather a split model tensor by tensor and write it whole into shared
memory; the sender reads it there, whatever the backend. Where those gathers turn out to take most
of a publication, m2n is what to measure against them.
"""


def write_page() -> str:
    """Return the page."""
    lines = (
        (f"`{file}`", f"`{line}`", *said)
        for file, found in GPU_LINES.items()
        for line, said in found.items()
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
    needs = layout.measure_needs()
    rank, engine = needs.trainer.rank, needs.engine
    config = parse_spec(canonical_json(layout.read_spec())).config
    replicas, gpus = config.replica_counts()[ROLLOUT], engine.gpus
    rollout = f"{replicas}" if gpus == 1 else f"{replicas} x {gpus}"
    held = (rank.parameters, rank.gradients, rank.moments, rank.activations, rank.device)
    sizes = [f"{size / GIB:.1f}" for size in held]
    sizes[-1] = f"**{sizes[-1]}**"
    mark = f" [{_footnotes()[layout]}]" if layout.overrides else ""
    return (
        f"`{layout.spec}.toml`{mark}",
        f"{needs.trainer.gpus} + {rollout}",
        f"{layout.gpu}",
        *sizes,
        f"{needs.trainer.host / GIB:.0f}",
        f"{engine.weights / GIB:.1f}",
        f"{engine.kv_cache_bytes(layout.gpu_bytes) / engine.sequence:.1f}",
    )


def _footnotes() -> dict[Layout, int]:
    changed = [layout for layout in LAYOUTS if layout.overrides]
    return {layout: number for number, layout in enumerate(changed, 1)}


def _explain() -> Iterator[str]:
    yield "\nWith these on the command line, the others as they are:\n\n"
    for layout, number in _footnotes().items():
        yield f"- [{number}] `{' '.join(layout.overrides)}`\n"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |\n"
    yield f"|{'---|' * len(columns)}\n"
    for row in rows:
        yield f"| {' | '.join(row)} |\n"


if __name__ == "__main__":
    PAGE.write_text(write_page())

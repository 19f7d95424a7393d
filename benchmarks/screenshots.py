"""What a screenshot costs on its way to a step: `python -m benchmarks.screenshots [--count 40]`.

Screenshots of 1366 x 768 pixels, as PNG and as JPEG, pass through the code of each service in this
process: text, buttons and a photograph, each with other content. The last line is one JSON object
with, for each format:

- `bytes`: of a file, on average; `tokens`: of Qwen3-VL for it; `pixels_mb`: of its pixel tensor.
- `cpu_ms` of one screenshot by stage: `gateway` (base64 of an MCP answer decoded and hashed, its
  chunks written), `rollout_in` (chunks read, the file decoded once and judged), `rollout_out`
  (written for the wire), `learner_in` (read, hashed, its size and places compared), `journal`
  (inserted and fsynced, less the same trajectory without pictures), `batch` (read from the journal,
  hashed, written for the ranks), `rank_in` (read by a rank), `pixels` (scaled, cut into patches).
- `journal_bytes`: growth of the journal for one screenshot, beyond the trajectory without any.

Processor time of all threads, the lowest of `--rounds`.
"""

import argparse
import asyncio
import base64
import hashlib
import io
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from PIL import Image, ImageDraw

from benchmarks.submission import POLICY, VOCABULARY
from flotilla.env_gateway.v1 import episode_service_pb2 as episode_pb
from flotilla.learner.v1 import group_service_pb2 as group_pb
from flotilla_common.domain.attempts import AttemptKey, Purpose, StopReason
from flotilla_common.domain.token_authors import Author, Span
from flotilla_common.domain.trajectory import Media, Trajectory, content_digest
from flotilla_common.domain.trajectory import Sequence as Sampled
from flotilla_common.images.picture import Picture
from flotilla_common.images.picture_files import read_picture
from flotilla_common.images.pixels import PixelReader
from flotilla_common.images.placeholders import expand_pictures
from flotilla_common.images.vision_family import VisionFamily, load_vision_family
from flotilla_common.run_folder.journal_file import JOURNAL_FILE, open_read_only
from flotilla_common.run_folder.picture_tables import whole_trajectories_of
from flotilla_common.spec.spec import VisionConfig
from flotilla_common.wire.trajectory import encode_submission
from flotilla_learner.api.decode import TrajectoryAssembler
from flotilla_learner.api.sequence_decode import TokenLimits
from flotilla_learner.group_types import GroupSpec, Lease
from flotilla_learner.groups.batcher import build_train_batch
from flotilla_learner.journal.store import Journal, open_journal
from flotilla_learner.ranks import protocol
from flotilla_learner.sampling.tasks import Task

T = TypeVar("T")
SIZE = (1366, 768)
_CHUNK_BYTES = 2**18
# As Qwen3-VL publishes them.
_CONFIG = {"model_type": "qwen3_vl", "vision_config": {"patch_size": 16, "spatial_merge_size": 2}}
_PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 16,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 65536, "longest_edge": 16777216},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def draw_screen(seed: int) -> Image.Image:
    """Draw a page with a bar, lines of text, buttons, and a photograph in a ninth of it."""
    chosen = np.random.default_rng(seed)
    image = Image.new("RGB", SIZE, "#f6f7f9")
    draw = ImageDraw.Draw(image)
    draw.rectangle((0, 0, SIZE[0], 56), fill="#24408e")
    for row in range(38):
        words = " ".join(f"{n:x}" for n in chosen.integers(0, 2**24, chosen.integers(4, 14)))
        draw.text((24, 72 + 18 * row), words, fill="#20242c")
    for column in range(5):
        draw.rounded_rectangle((880 + 92 * column, 700, 964 + 92 * column, 736), 6, fill="#dfe6f5")
    coarse = chosen.integers(0, 256, (24, 36, 3)).astype(np.uint8)
    photo = Image.fromarray(coarse).resize((455, 256), Image.Resampling.BICUBIC)
    grain = chosen.normal(0, 4, (256, 455, 3))
    photo = Image.fromarray((np.asarray(photo) + grain).clip(0, 255).astype(np.uint8))
    image.paste(photo, (880, 90))
    return image


def make_files(kind: str, count: int) -> list[bytes]:
    """Return the files of so many screens."""
    files: list[bytes] = []
    for seed in range(count):
        file = io.BytesIO()
        draw_screen(seed).save(file, kind, **({"quality": 90} if kind == "JPEG" else {}))
        files.append(file.getvalue())
    return files


def make_trajectory(index: int, pictures: Sequence[Picture], family: VisionFamily) -> Trajectory:
    """Return an attempt that sees each picture before a turn of 64 tokens."""
    ids, spans, media = np.zeros(0, np.int32), list[Span](), list[Media]()
    for number, picture in enumerate(pictures):
        marks = [1, family.vision_start, family.image_pad, family.vision_end]
        seen, (shown,) = expand_pictures(marks, [picture], family)
        place = (shown.place.grid, shown.place.offset + len(ids))
        about = (picture.sha256, picture.mime, *place, family.processor_digest)
        media.append(Media(*about, len(picture.data)))
        spans.append(Span(Author.ENVIRONMENT if number else Author.PROMPT, len(seen)))
        spans.append(Span(Author.POLICY, 64, POLICY, 1.0))
        ids = np.concatenate([ids, seen, np.full(64, 7, np.int32)])
    logprobs = np.full(64 * len(pictures), -0.5, np.float32)
    sequence = Sampled(ids, tuple(spans), logprobs, tuple(media))
    return Trajectory(
        *(AttemptKey("group", index, 0), "lease", (sequence,), content_digest([sequence])),
        reward=1.0,
        stop_reason=StopReason.DONE,
        pictures={each.sha256: each.data for each in pictures},
    )


def without_pictures(trajectory: Trajectory) -> Trajectory:
    (sequence,) = trajectory.sequences
    bare = replace(sequence, media=())
    digest = content_digest([bare])
    return replace(trajectory, sequences=(bare,), content_digest=digest, pictures={})


class Stages:
    """Processor time of each stage, per screenshot."""

    def __init__(self, count: int, rounds: int) -> None:
        self._count, self._rounds = count, rounds
        self.cpu_ms: dict[str, float] = {}

    def time(self, name: str, work: Callable[[], T]) -> T:
        """Run a stage for all screenshots some times; keep the lowest time."""
        rounds: list[tuple[float, T]] = []
        for _ in range(self._rounds):
            began = time.process_time()
            found = work()
            rounds.append((time.process_time() - began, found))
        self.cpu_ms[name] = round(1000 * min(spent for spent, _ in rounds) / self._count, 3)
        return rounds[-1][1]


def read_answer(answer: bytes) -> bytes:
    """Return the picture of an MCP answer, hashed, as the gateway keeps it."""
    data = base64.b64decode(json.loads(answer)["data"], validate=True)
    hashlib.sha256(data).digest()
    return data


def write_chunks(data: bytes) -> list[bytes]:
    starts = range(0, len(data), _CHUNK_BYTES)
    pieces = [episode_pb.FetchMediaResponse(chunk=data[n : n + _CHUNK_BYTES]) for n in starts]
    return [piece.SerializeToString() for piece in pieces]


def read_chunks(chunks: Sequence[bytes]) -> Picture:
    pieces = [episode_pb.FetchMediaResponse.FromString(chunk).chunk for chunk in chunks]
    return read_picture(b"".join(pieces))


def decode_trajectory(messages: Sequence[bytes], limits: TokenLimits) -> Trajectory:
    """Return the trajectory of a submission, after all of the learner's checks."""
    first, *chunks = map(group_pb.SubmitTrajectoryRequest.FromString, messages)
    assembler = TrajectoryAssembler(first, limits)
    for chunk in chunks:
        assembler.add_chunk(chunk)
    return assembler.build_trajectory()


async def add_all(journal: Journal, trajectories: Sequence[Trajectory]) -> None:
    task = Task("task", "screen", json.dumps({"key": "task", "prompt": "x"}))
    spec = GroupSpec("group", 0, task, Purpose.TRAIN, len(trajectories), 1.0)
    await journal.begin_epoch(1)
    await journal.add_lease(Lease("lease", spec, (), POLICY, "w0", 0.0), "i", "r", 1)
    for each in trajectories:
        await journal.add_trajectory(each)
    await journal.close()


def fill_journal(folder: Path, trajectories: Sequence[Trajectory]) -> int:
    """Journal trajectories one by one; return the bytes of the file."""
    run_dir = Path(tempfile.mkdtemp(dir=folder)) / "run"
    asyncio.run(add_all(open_journal(run_dir), trajectories))
    return (run_dir / JOURNAL_FILE).stat().st_size


def write_batch(folder: Path, keys: Sequence[AttemptKey]) -> protocol.Message:
    """Read a step's trajectories from the journal, and write them for the ranks."""
    with open_read_only(folder / "step" / "run" / JOURNAL_FILE) as db:
        found, _ = whole_trajectories_of(db, keys)
    return protocol.write_batch(folder / "batch", build_train_batch(1, found))


def measure_format(kind: str, count: int, rounds: int, model: Path) -> dict[str, Any]:
    """Measure all stages for one format of files."""
    family = load_vision_family(model, VisionConfig())
    limits = TokenLimits(vocab_size=VOCABULARY, max_tokens=2**18, vision=family)
    reader, stages = PixelReader(model, family), Stages(count, rounds)
    files = make_files(kind, count)
    answers = [json.dumps({"data": base64.b64encode(f).decode()}).encode() for f in files]
    chunks = stages.time("gateway", lambda: [write_chunks(read_answer(a)) for a in answers])
    pictures = stages.time("rollout_in", lambda: [read_chunks(each) for each in chunks])
    tries = [make_trajectory(n, pictures[n::4], family) for n in range(4)]
    messages = stages.time(
        "rollout_out",
        lambda: [[part.SerializeToString() for part in encode_submission(t)] for t in tries],
    )
    found = stages.time("learner_in", lambda: [decode_trajectory(m, limits) for m in messages])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bare = [without_pictures(each) for each in found]
        size = stages.time("journal", lambda: fill_journal(folder, found))
        bare_size = stages.time("bare", lambda: fill_journal(folder, bare))
        stages.cpu_ms["journal"] = round(stages.cpu_ms["journal"] - stages.cpu_ms.pop("bare"), 3)
        asyncio.run(add_all(open_journal(folder / "step" / "run"), found))
        keys = [each.key for each in found]
        message = stages.time("batch", lambda: write_batch(folder, keys))
        batch = stages.time("rank_in", lambda: protocol.read_batch(message))
    pixels = stages.time("pixels", lambda: [reader.read(d) for d in batch.pictures.values()])
    return {
        "bytes": round(sum(map(len, files)) / count),
        "tokens": family.count(family.grid(*SIZE)),
        "pixels_mb": round(pixels[0].values.nbytes / 1e6, 1),
        "cpu_ms": stages.cpu_ms,
        "journal_bytes": round((size - bare_size) / count),
    }


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.screenshots",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--count", type=int, default=40, help="screenshots (40)")
    parser.add_argument("--rounds", type=int, default=5, help="repetitions (5)")
    given = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        model = Path(name)
        (model / "config.json").write_text(json.dumps(_CONFIG))
        (model / "preprocessor_config.json").write_text(json.dumps(_PROCESSOR))
        result = {
            kind.lower(): measure_format(kind, given.count, given.rounds, model)
            for kind in ("PNG", "JPEG")
        }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

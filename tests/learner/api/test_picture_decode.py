"""Pictures come whole and stand where their tokens are, or their trajectory is refused."""

import asyncio
import hashlib
import io
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from flotilla.learner.v1 import group_service_pb2 as pb
from flotilla.learner.v1 import policy_pb2, trajectory_pb2
from flotilla_common.domain.trajectory import Trajectory
from flotilla_common.images.picture_files import MOST_BYTES
from flotilla_common.wire.trajectory import encode_submission
from flotilla_learner.api.decode import TrajectoryAssembler
from flotilla_learner.api.picture_decode import MOST_PICTURES_BYTES
from flotilla_learner.api.sequence_decode import MalformedRequestError, TokenLimits
from tests.support.fake_ranks import VOCAB_SIZE
from tests.support.learner import Submission, graded
from tests.support.pictures import FAMILY, draw_picture, showing

LIMITS = TokenLimits(VOCAB_SIZE, max_tokens=128, vision=FAMILY)
FIRST, SECOND = draw_picture(1), draw_picture(2, 16, 16, "JPEG")


def plain() -> Submission:
    lease = pb.Lease(lease_id="lease", group_id="group", task_json='{"key": "t", "env_id": "e"}')
    lease.sampling.temperature = 1.0
    policy = policy_pb2.PolicyId(run_epoch=1, fingerprint=b"f" * 16)
    return graded(lease, pb.LeasedAttempt(seed=5), policy, reward=1.0)


def made() -> Submission:
    return showing(plain(), [FIRST, SECOND, FIRST])


def received(submission: Submission, limits: TokenLimits = LIMITS) -> Trajectory:
    async def collect() -> list[pb.SubmitTrajectoryRequest]:
        return [part async for part in submission.parts()]

    first, *others = asyncio.run(collect())
    assembly = TrajectoryAssembler(first, limits)
    for part in others:
        assembly.add_chunk(part)
    return assembly.build_trajectory()


def test_a_picture_shown_twice_is_sent_once_and_comes_back_with_its_places() -> None:
    found = received(made())
    assert found.pictures == {each.sha256: each.data for each in (FIRST, SECOND)}
    (sequence,) = found.sequences
    pads = np.flatnonzero(sequence.token_ids == FAMILY.image_pad)
    places = [
        np.arange(p.token_offset, p.token_offset + n)
        for p, n in zip(sequence.pictures, (6, 4, 6), strict=True)
    ]
    assert np.concatenate(places).tolist() == pads.tolist()
    assert [each.mime for each in sequence.pictures] == ["image/png", "image/jpeg", "image/png"]


def test_pictures_survive_the_codec_of_rollouts_in_chunks_of_any_size() -> None:
    large = draw_picture(3, 500, 400)
    assert len(large.data) > 2**19
    sent = received(showing(plain(), [large, SECOND]))
    first, *others = encode_submission(sent)
    assert sum(part.WhichOneof("part") == "picture" for part in others) == 3
    assembly = TrajectoryAssembler(first, LIMITS)
    for part in others:
        assembly.add_chunk(pb.SubmitTrajectoryRequest.FromString(part.SerializeToString()))
    assert assembly.build_trajectory().pictures == sent.pictures
    assert assembly.announced_bytes > len(large.data)


def media(submission: Submission, number: int) -> trajectory_pb2.MediaReference:
    return submission.header.sequences[0].media[number]


def set_media(number: int, **values: object) -> Callable[[Submission], None]:
    def change(submission: Submission) -> None:
        for name, value in values.items():
            item = media(submission, number)
            if name == "grid":
                del item.grid[:]
                item.grid.extend(value)  # pyright: ignore[reportArgumentType]
            else:
                setattr(item, name, value)

    return change


def set_token(place: int, token: int) -> Callable[[Submission], None]:
    def change(submission: Submission) -> None:
        ids = np.frombuffer(submission.token_ids[0], "<i4").copy()
        ids[place] = token
        submission.token_ids = [ids.tobytes()]

    return change


def cut_short(submission: Submission) -> None:
    submission.pictures[0] = submission.pictures[0][:-1]


def change_a_byte(submission: Submission) -> None:
    submission.pictures[0] = submission.pictures[0][:-1] + b"!"


def put_in(data: bytes) -> Callable[[Submission], None]:
    """Send other bytes, under their own hash."""

    def change(submission: Submission) -> None:
        digest = hashlib.sha256(data).digest()
        submission.pictures[0] = data
        submission.header.pictures[0].sha256 = digest
        submission.header.pictures[0].size_bytes = len(data)
        for number in (0, 2):
            media(submission, number).sha256 = digest

    return change


def claim_sizes(*sizes: int) -> Callable[[Submission], None]:
    def change(submission: Submission) -> None:
        del submission.header.pictures[:]
        for number, size in enumerate(sizes):
            submission.header.pictures.add(sha256=bytes([number]) * 32, size_bytes=size)
            submission.header.sequences[0].media.add(sha256=bytes([number]) * 32, mime="image/png")

    return change


def send_twice(submission: Submission) -> None:
    submission.header.pictures.append(submission.header.pictures[0])
    submission.pictures.append(submission.pictures[0])


def swap_places(submission: Submission) -> None:
    first, last = media(submission, 0), media(submission, 2)
    first.token_offset, last.token_offset = last.token_offset, first.token_offset


def send_a_stranger(submission: Submission) -> None:
    stranger = draw_picture(9)
    submission.pictures[0] = stranger.data
    submission.header.pictures[0].sha256 = bytes.fromhex(stranger.sha256)


def palette() -> bytes:
    file = io.BytesIO()
    Image.new("P", (24, 16)).save(file, "PNG")
    return file.getvalue()


CHANGES: dict[str, tuple[Callable[[Submission], None], str]] = {
    "cut short": (cut_short, r"pictures\[0\]: \d+ of \d+ bytes have come"),
    "a changed byte": (change_a_byte, r"pictures\[0\] does not match its sha256"),
    "no picture": (put_in(b"hello"), r"pictures\[0\]: it is none of PNG, JPEG"),
    "a palette": (put_in(palette()), r"pictures\[0\]: the picture is in P, not in RGB"),
    "another size": (
        put_in(draw_picture(5, 16, 16).data),
        r"its grid is \[1, 4, 6\]; 16x16 pixels give \[1, 4, 4\]",
    ),
    "an empty picture": (claim_sizes(0), r"pictures\[0\] has 0 bytes; 1 to"),
    "a huge picture": (claim_sizes(MOST_BYTES + 1), rf"1 to {MOST_BYTES} are allowed"),
    "too many bytes": (
        claim_sizes(*[MOST_BYTES] * 17),
        rf"\d+ bytes of pictures; at most {MOST_PICTURES_BYTES} are taken",
    ),
    "a picture twice": (send_twice, r"pictures\[2\] is sent twice"),
    "a stranger": (send_a_stranger, r"pictures\[0\] is shown by no sequence"),
    "another grid": (set_media(0, grid=[1, 2, 6]), r"its grid is \[1, 2, 6\]; 24x16 pixels give"),
    "no grid": (set_media(0, grid=[]), r"its grid is \[\], not patches"),
    "a negative grid": (set_media(0, grid=[1, -4, -6]), r"its grid is \[1, -4, -6\], not patches"),
    "another place": (set_media(0, token_offset=2), "image tokens are not those of its pictures"),
    "a place outside": (set_media(2, token_offset=10**9), "does not fit a sequence of"),
    "places out of order": (swap_places, "are not in the order of their tokens"),
    "another processor": (
        set_media(1, processor_digest=b"\x01" * 32),
        "was shown by processor 010101010101, but the learner has abababababab: install the same",
    ),
    "a missing picture token": (set_token(4, 5), "image tokens are not those of its pictures"),
    "a picture token too many": (set_token(0, 62), "image tokens are not those of its pictures"),
    "a start that the policy wrote": (set_token(-1, 60), "engines never sample such a token"),
    "a video": (set_token(0, 63), "engines never sample such a token"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_pictures_that_are_not_as_described_are_refused(name: str) -> None:
    change, message = CHANGES[name]
    submission = made()
    change(submission)
    with pytest.raises(MalformedRequestError, match=message):
        received(submission)


def test_a_learner_without_vision_takes_no_picture() -> None:
    with pytest.raises(MalformedRequestError, match=r"the run has no \[policy.vision\]"):
        received(made(), replace(LIMITS, vision=None))


def test_another_picture_of_the_same_size_is_another_content() -> None:
    submission = made()
    digest = submission.content_digest
    put_in(draw_picture(6).data)(submission)
    assert submission.content_digest != digest
    submission.digest = digest
    with pytest.raises(MalformedRequestError, match="content_digest does not match"):
        received(submission)

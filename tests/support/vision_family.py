"""A family of models that sees, without a model, and pictures for it."""

from flotilla_common.images.vision_family import VisionFamily


def make_family(
    ids: tuple[int, int, int, int] = (4, 5, 6, 7), most_pixels: int = 2**24
) -> VisionFamily:
    """Return a family like Qwen3-VL, with these ids of its tokens: the start and the end of a
    picture, the one that stands for it, and that of videos."""
    start, end, image, video = ids
    return VisionFamily(
        "qwen3_vl", 16, 2, 2, 32 * 32, most_pixels, start, end, image, video, "d" * 64
    )

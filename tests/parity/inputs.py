"""Inputs for every peer: padded matrices [sequences][positions], as plain lists.

Numbers are rounded to a few digits, so that they stand in the fixtures as they are. What lies under
a mask of 0 is not 0 on purpose: it must not count.
"""

import random

Matrix = list[list[float]]

# Policy tokens of each sequence, among observations that the policy did not write and padding.
_MASK = (
    "1111111111",
    "1111111000",
    "0110111110",
    "1000000000",
    "1111111111",
    "1101100000",
    "0000111111",
    "1111100000",
)
# log(policy / old) that reaches every branch of every clip in use, 0 and the edges of exp included.
_LOG_RATIOS = (
    0.0,
    0.02,
    -0.03,
    0.15,
    -0.15,
    0.21,
    -0.24,
    0.3,
    -0.4,
    0.9,
    -1.1,
    1.6,
    -2.5,
    3.2,
    -4.0,
)
# One per sequence.
_ADVANTAGES = (1.3, -0.7, 0.45, -1.9, 0.0, 2.1, -0.35, -1.2)


def mask() -> Matrix:
    return [[float(bit) for bit in row] for row in _MASK]


def _matrix(draw: random.Random, low: float, high: float, digits: int = 4) -> Matrix:
    return [[round(draw.uniform(low, high), digits) for _ in row] for row in _MASK]


def _shifted(matrix: Matrix, shifts: Matrix) -> Matrix:
    return [
        [round(value + shift, 6) for value, shift in zip(row, by, strict=True)]
        for row, by in zip(matrix, shifts, strict=True)
    ]


def tokens() -> dict[str, Matrix]:
    """Logprobs under the policy, the one before the step, the sampler and the reference."""
    draw = random.Random(5)
    old = _matrix(draw, -4.0, -0.05)
    ratios = [[draw.choice(_LOG_RATIOS) for _ in row] for row in _MASK]
    # Every branch of both signs of advantage, in the two longest sequences.
    ratios[0] = list(_LOG_RATIOS[:10])
    ratios[1] = list(_LOG_RATIOS[5:])
    return {
        "mask": mask(),
        "logprobs": _shifted(old, ratios),
        "old": old,
        "reference": _shifted(old, _matrix(draw, -2.0, 2.0)),
        "advantages": [[advantage] * len(_MASK[0]) for advantage in _ADVANTAGES],
    }


def sequences() -> dict[str, Matrix]:
    """Logprobs whose ratios differ by sequence: for a clip of sequences."""
    draw = random.Random(6)
    old = _matrix(draw, -4.0, -0.05)
    levels = (0.0, 0.01, -0.02, 0.12, -0.15, 0.06, -0.08, 0.5)
    shifts = [[level + round(draw.uniform(-0.01, 0.01), 4) for _ in _MASK[0]] for level in levels]
    advantages = (1.3, -0.7, 0.45, 1.9, -1.1, -2.1, 0.35, -1.2)
    return {
        "mask": mask(),
        "logprobs": _shifted(old, shifts),
        "old": old,
        "advantages": [[advantage] * len(_MASK[0]) for advantage in advantages],
    }


def sequences_by_token() -> dict[str, Matrix]:
    """The same with an advantage of each token's own, as a critic or a KL in the reward gives."""
    return sequences() | {"advantages": _matrix(random.Random(12), -2.0, 2.0)}


def extremes() -> dict[str, Matrix]:
    """Log-ratios beyond what exp is let near: +-8, +-12 and +-25."""
    shifts = [[-25.0, -12.0, -8.0, -3.0, 3.0, 8.0, 12.0, 25.0]]
    old = [[-30.0] * 8]
    return {
        "mask": [[1.0] * 8],
        "logprobs": _shifted(old, shifts),
        "old": old,
        "reference": old,
        "advantages": [[1.5, -1.5, 1.5, -1.5, 1.5, -1.5, 1.5, -1.5]],
    }


def far_sequences() -> dict[str, Matrix]:
    """Sequences whose mean log-ratio is 12 and -25, with advantages that no clip bounds there."""
    old = [[-30.0] * 4] * 2
    return {
        "mask": [[1.0] * 4] * 2,
        "logprobs": _shifted(old, [[11.0, 12.0, 13.0, 12.0], [-25.5, -24.5, -25.0, -25.0]]),
        "old": old,
        "advantages": [[-1.5] * 4, [1.5] * 4],
    }


def mismatch() -> dict[str, Matrix]:
    """Trainer and sampler that agree, drift by sequence, or differ in single tokens."""
    draw = random.Random(7)
    sampler = _matrix(draw, -4.0, -0.05)
    levels = (0.0, 0.004, -0.004, 1.4, 0.11, -0.3, -0.12, 0.2)
    shifts = [[level + round(draw.uniform(-0.02, 0.02), 4) for _ in _MASK[0]] for level in levels]
    for row, column, outlier in ((0, 3, 1.2), (0, 7, -1.3), (1, 2, 2.5), (2, 4, -2.8), (6, 5, 0.8)):
        shifts[row][column] = outlier
    trainer = _shifted(sampler, shifts)
    drift = [[draw.choice(_LOG_RATIOS[:11]) for _ in row] for row in _MASK]
    return {
        "mask": mask(),
        "sampler": sampler,
        "trainer": trainer,
        "logprobs": _shifted(trainer, drift),
        "advantages": [[advantage] * len(_MASK[0]) for advantage in _ADVANTAGES],
    }


def rewards() -> dict[str, list[str] | list[float]]:
    """Groups interleaved: of 1 to 5 attempts, constant, binary, large and negative rewards."""
    groups = {
        "spread": (0.0, 0.25, 1.0, 0.7),
        "constant": (0.3, 0.3, 0.3),
        "single": (0.8,),
        "binary": (0.0, 1.0, 0.0, 0.0, 1.0),
        "large": (-120.5, 300.25),
        "pair": (0.6, 0.2),
        "negative": (-0.5, -0.1, -0.3),
    }
    members = [(name, reward) for name, rewards in groups.items() for reward in rewards]
    random.Random(8).shuffle(members)
    return {"group": [name for name, _ in members], "reward": [reward for _, reward in members]}


def episodes() -> dict[str, Matrix]:
    """Rewards at the last policy token, penalties on every token, and a critic's values."""
    draw = random.Random(9)
    outcomes = (1.0, 0.0, 0.5, 1.0, -0.5, 0.0, 0.25, 1.0)
    policy = mask()
    rewards = [[0.0] * len(row) for row in policy]
    for row, (bits, outcome) in enumerate(zip(policy, outcomes, strict=True)):
        rewards[row][max(place for place, bit in enumerate(bits) if bit)] = outcome
    return {
        "mask": policy,
        "rewards": rewards,
        "penalties": _matrix(draw, -0.1, 0.1),
        "values": _matrix(draw, -0.5, 1.0),
        "new_values": _matrix(draw, -0.8, 1.3),
        "returns": _matrix(draw, -0.5, 1.2),
    }


def grouped_episodes(lone: bool = False) -> dict[str, Matrix | list[str]]:
    """Rewards at the last policy token, in groups of 3, 3 and 2; `lone`: of 3, 3, 1 and 1."""
    given = episodes()
    group = ["a", "b", "a", "c", "b", "a", "b", "d" if lone else "c"]
    return {"mask": given["mask"], "rewards": given["rewards"], "group": group}


def named_rewards() -> dict[str, Matrix | list[str] | list[float]]:
    """Two rewards of each attempt by name, in groups that they divide differently."""
    given = grouped_episodes()
    return {
        "mask": given["mask"],
        "group": given["group"],
        "correct": [1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0],
        "style": [0.25, 0.5, 1.0, 0.75, 0.5, 0.0, 0.5, -1.5],
    }


def head() -> dict[str, Matrix | list[int] | list[float]]:
    """Hidden states [tokens][width], a head [vocabulary][width], targets and temperatures."""
    draw = random.Random(10)

    def rows(count: int, width: int) -> Matrix:
        return [[round(draw.gauss(0, 0.8), 4) for _ in range(width)] for _ in range(count)]

    return {
        "hidden": rows(9, 5),
        "weight": rows(13, 5),
        "targets": [draw.randrange(13) for _ in range(9)],
        "temperature": [0.7] * 9,
    }


def lengths() -> dict[str, list[int]]:
    """Policy tokens of attempts: below, in and, for a limit of 10, at the end of a buffer of 4."""
    return {"tokens": [1, 5, 6, 7, 8, 9, 10]}

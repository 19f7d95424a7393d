import numpy as np
import torch

from flotilla_learner.algo.sampled_candidates import join_candidates, keep_candidates


def test_candidates_of_sequences_are_joined_at_the_width_of_the_widest() -> None:
    one, other = np.array([[4, 2], [3, -1]], np.int32), np.array([[7, 1, 0]], np.int32)
    joined = join_candidates([one, None, other], [2, 2, 1])
    assert joined is not None and joined.dtype == np.int64
    none = [-1, -1, -1]
    assert joined.tolist() == [[4, 2, -1], [3, -1, -1], none, none, [7, 1, 0]]
    assert join_candidates([None, None], [2, 1]) is None


def test_only_candidates_keep_their_logits_and_without_any_all_do() -> None:
    logits = torch.arange(12.0).view(3, 4)
    candidates = torch.tensor([[2, -1], [-1, -1], [3, 0]])
    kept = keep_candidates(logits.clone(), candidates, -9.0)
    assert kept.tolist() == [[-9, -9, 2, -9], [4, 5, 6, 7], [8, -9, -9, 11]]

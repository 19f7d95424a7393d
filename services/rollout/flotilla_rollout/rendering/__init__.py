"""`python -m flotilla_rollout.rendering`: conversations of others as the dialect of a spec plays
them, with the tokens that the policy would have sampled marked for training.

Start at `conversation_renderer.py`; `turn_writer.py` finds the tokens of one turn."""

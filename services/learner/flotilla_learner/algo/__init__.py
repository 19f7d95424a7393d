"""Advantages, losses, corrections and packing: tensors in, tensors out. Of the tokens that a policy
wrote, `overlong.py` leaves out whole sequences, and `corrections.py` single tokens."""

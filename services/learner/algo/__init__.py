"""Advantages, losses, corrections and packing: tensors in, tensors out."""

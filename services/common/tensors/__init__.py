"""Tensors as more than one service needs them: their checksum, and groups that send them."""

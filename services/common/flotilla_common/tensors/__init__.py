"""Tensor code that several services share: checksums, and groups that send tensors."""

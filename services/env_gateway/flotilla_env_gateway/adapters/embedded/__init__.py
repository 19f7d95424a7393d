"""The environments of this repository, in worker processes."""

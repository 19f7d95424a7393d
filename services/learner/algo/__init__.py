"""The mathematics of a training step: arrays and tensors in, arrays and tensors out, no I/O."""

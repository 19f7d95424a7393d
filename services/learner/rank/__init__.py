"""What one training rank runs: everything with tensors, in a process of its own."""

"""What the `flotilla` command does and shows."""

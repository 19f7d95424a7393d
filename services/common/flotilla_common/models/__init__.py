"""What a model's config.json says about it, without torch: its kind, its parts, and the
memory of its activations."""

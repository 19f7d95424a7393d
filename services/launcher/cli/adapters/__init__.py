"""The policy's tokenizer, for commands that show text."""

"""Word problems: one question, one turn, and a number to check."""

"""How much an environment bears, who is next, and where calls wait."""

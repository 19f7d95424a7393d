"""Teachers that a vendor's server serves."""

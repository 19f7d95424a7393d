"""Programs outside play episodes of a gateway by it."""

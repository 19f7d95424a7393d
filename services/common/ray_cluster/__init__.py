"""Ray between the machines of one service. Ray itself is imported in no service's own process."""

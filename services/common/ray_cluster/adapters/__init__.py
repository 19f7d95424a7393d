"""Programs and actors that are connected to a cluster: the only code here that imports Ray."""

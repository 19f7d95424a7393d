"""Programs and actors that connect to a cluster: the only code here that imports Ray."""

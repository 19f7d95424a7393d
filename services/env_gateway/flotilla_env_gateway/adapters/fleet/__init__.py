"""Fleet's control plane, instances, tools and verifiers, over its plain HTTP wire."""

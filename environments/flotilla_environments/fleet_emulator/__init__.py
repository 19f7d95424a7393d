"""An emulator of Fleet: control plane, instances, tools and verifiers, on this machine."""

"""From a run spec to SkyPilot's tasks, pure: nothing here imports SkyPilot."""

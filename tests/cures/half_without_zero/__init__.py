"""Half precision without ZeRO: its loss scale, and its checkpoints."""

"""What a shadow does before it is needed, so that the first step after a failure meets nothing for the first time."""

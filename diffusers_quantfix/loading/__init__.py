"""Loading: the device that a checkpoint loads onto, and checkpoints in several files."""

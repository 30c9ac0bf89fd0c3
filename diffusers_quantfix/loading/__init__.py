"""Loading: the device that a checkpoint loads onto, its size there, and checkpoints in several files."""

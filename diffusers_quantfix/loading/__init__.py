"""Loading of quantized checkpoints: the target device, the size there, and checkpoints in several files."""

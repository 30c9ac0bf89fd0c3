"""What versions and the machine can tell before anything runs: known bugs of pins, upgrades, combinations."""

"""What versions and the machine can tell before anything runs: known defects of pins, upgrades, combinations."""

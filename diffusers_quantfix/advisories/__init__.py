"""What can be told from versions and the machine before anything runs: known bugs, upgrades, bad combinations."""

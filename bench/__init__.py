"""The load tests: how fast Penstock forwards, as ratios to its baselines in one run. `python -m bench --help`."""

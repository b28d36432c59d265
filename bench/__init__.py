"""Benchmarks: Penstock measured against its baselines in one run. See `python -m bench --help`."""

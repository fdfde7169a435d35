"""The parts of `benchmarks/update_speed.py`."""

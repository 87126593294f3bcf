"""Measurements that can be repeated: `python -m benchmarks.<name>`; results are kept in benchmarks/results."""

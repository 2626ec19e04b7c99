"""The parts of bench.py: options, workloads, engines, the floor, steps, kernels and the report."""

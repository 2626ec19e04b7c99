"""What bench.py is made of: options, workloads, engines, the floor, steps, kernels and the report."""

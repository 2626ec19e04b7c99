"""Kernels for CPUs, one operation a file beside its Triton sibling; numba compiles them on first use.

A kernel is a function of one `program`, as in Triton; a team of threads runs the programs of a launch.
"""

"""Triton kernels are compiled in other processes while an engine's weights load."""

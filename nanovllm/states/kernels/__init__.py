"""Kernels of layers with states, one operation a file, each with its twin in plain torch."""

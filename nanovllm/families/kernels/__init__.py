"""Kernels that few families need."""

"""Kernels: one a file, beside its reference in plain MLX ops."""

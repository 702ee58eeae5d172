"""The Kimi K3 model in MLX."""

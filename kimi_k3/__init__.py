"""Run, prune and judge Kimi K3 on Apple's MLX.

Importing this package changes nothing: mlx-lm finds the model class through an
import finder that the installation adds (see :mod:`kimi_k3.registration`).
"""

__version__ = "0.1.0"

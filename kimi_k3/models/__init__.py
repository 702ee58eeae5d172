"""The Kimi K3 model in MLX."""

from .expert_banks import TwoBankSwitchGLU
from .kimi_k3 import Model, ModelArgs

__all__ = ["Model", "ModelArgs", "TwoBankSwitchGLU"]

"""The one reading of a Kimi K3 ``config.json``: see :mod:`kimi_k3.config.args`."""

from .args import LinearAttentionArgs, ModelArgs, TextArgs
from .quantization import stored_quantization

__all__ = ["LinearAttentionArgs", "ModelArgs", "TextArgs", "stored_quantization"]

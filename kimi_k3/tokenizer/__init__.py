"""Kimi K3's tokenizer and chat format, without code from a checkpoint."""

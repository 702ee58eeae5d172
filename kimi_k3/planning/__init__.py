"""Which experts of a checkpoint stay, at which width, and what that costs."""

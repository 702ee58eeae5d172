"""How far a build is from its source: divergence, perplexity, and their intervals."""

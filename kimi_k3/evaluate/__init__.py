"""How good a build is: divergence and perplexity against its source, and what it says."""

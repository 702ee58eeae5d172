"""Pages about a build, in which every number comes from a results file."""

"""Complete runs of the experiments, and the pages made of their results."""

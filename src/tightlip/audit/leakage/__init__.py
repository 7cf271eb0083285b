"""The training data leakage report: which runs of words a model completes, and whose they are."""

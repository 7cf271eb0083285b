"""tightlip: which words a language model gives away, and whose they were."""

__version__ = "0.1.0"

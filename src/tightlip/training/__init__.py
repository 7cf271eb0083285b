"""Training language models: one loop, and mitigations that plug into it."""

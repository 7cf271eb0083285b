"""Private text vectors: what a device sends instead of the words, and who can read it."""

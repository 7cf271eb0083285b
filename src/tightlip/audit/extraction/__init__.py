"""What it takes to draw somebody's text out of a model: how many tries, window by window."""

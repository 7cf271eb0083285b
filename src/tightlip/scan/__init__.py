"""One pass of a model over a text, stored once and read by every audit."""

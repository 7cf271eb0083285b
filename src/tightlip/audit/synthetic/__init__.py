"""Generated text beside the documents that it was made from; no model is asked."""

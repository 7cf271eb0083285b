"""What a model keeps of secrets: planted ones, and real ones chosen for the purpose."""

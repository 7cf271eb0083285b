"""Flags to one call. Nothing heavy is imported before a command runs."""

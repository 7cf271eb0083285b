"""Findings to words, tables, plots and one HTML page; no torch."""

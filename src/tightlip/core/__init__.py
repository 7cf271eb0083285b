"""What every stage shares: errors, files, progress. Imports nothing else of tightlip."""

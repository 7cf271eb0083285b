"""Where the work runs: an engine maps a pure function over shards whose results add up."""

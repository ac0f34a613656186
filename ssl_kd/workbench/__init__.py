"""What is done with finished clusters: look at them, curate, name, decide, take them elsewhere."""

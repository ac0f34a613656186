"""Train a student on rows of text, step by step, and find the cause of a fault."""

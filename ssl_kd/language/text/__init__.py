"""Read text, and lay it out in rows of tokens."""

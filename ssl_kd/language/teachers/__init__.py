"""Get the answers of a teacher: a live model, a cache, a server, the student itself, several."""

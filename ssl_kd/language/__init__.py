"""The language mode: a teacher language model teaches a student, token by token."""

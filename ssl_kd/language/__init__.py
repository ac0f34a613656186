"""The language mode: train a student language model on text and on a teacher's distributions."""

"""Load, change and save language models: teachers, students, adapters, mixtures of experts."""

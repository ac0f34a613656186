"""Judge language models by their predictions of held-out tokens and their generated answers."""

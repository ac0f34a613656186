"""Losses of language models as pure functions of tensors, and the divergences they are made of."""

"""The training of heads: pairs of neighbors, the guarded step, the losses, and when to stop."""

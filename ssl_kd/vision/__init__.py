"""The vision mode: embed once, train many heads on the embeddings, judge, and keep the answer."""

"""The tree of levels as nested lists, to be opened one by one."""

from typing import Any


def tree(levels: list[dict[str, Any]], pictures: dict[int, list[Any]]) -> list[dict[str, Any]]:
    """The clusters of the coarsest level, each with what it is made of.

    Args:
        levels: of `metrics.json`, coarsest first.
        pictures: some of each of the answer's clusters, by its number.

    Returns:
        For each cluster `name`, `size`, `pictures` and `parts`, the clusters that it is made of.
        A cluster that is one piece at the next level, too, is shown once, at the finest such level
        or as the answer's.
    """
    below: dict[int, list[dict[str, Any]]] = {}
    for level in reversed(levels):
        answer, nodes = level["column"] == "cluster", {}
        for number, size in zip(level["clusters"], level["sizes"], strict=True):
            parts = below.get(number, [])
            node = {"name": f"{level['column'].replace('_', ' ')}: {number}", "size": size}
            node |= {"parts": parts, "pictures": pictures.get(number, []) if answer else []}
            if len(parts) == 1:
                node = node | {"parts": parts[0]["parts"]} if answer else parts[0]
            nodes[number] = node
        parents = level["parents"] or [0] * len(nodes)
        below = {}
        for number, parent in zip(level["clusters"], parents, strict=True):
            below.setdefault(parent, []).append(nodes[number])
    return below.get(0, []) if levels else []

"""Pair the operations of two recordings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from difflib import SequenceMatcher

from firstnan._recording import Operation


def paired(a: Sequence[Operation], b: Sequence[Operation]) -> list[tuple[Operation, Operation]]:
    """Pair operations of each step with equal keys, in their order; others stay alone.

    Views make no values and are left out; weights are paired by their names.
    """
    pairs = _paired_weights(a, b)
    for step in sorted({x.step for x in a} & {y.step for y in b}):
        of_a, of_b = (
            [x for x in run if x.step == step and not x.is_view and x.op != "weight"]
            for run in (a, b)
        )
        keys_a, keys_b = [x.key for x in of_a], [y.key for y in of_b]
        alike = SequenceMatcher(None, keys_a, keys_b, autojunk=False)
        for i, j, size in alike.get_matching_blocks():
            pairs += zip(of_a[i : i + size], of_b[j : j + size], strict=True)
    return sorted(pairs, key=lambda pair: pair[0].number)


def _paired_weights(
    a: Sequence[Operation], b: Sequence[Operation]
) -> list[tuple[Operation, Operation]]:
    """Pair weights by step and name, and those of several models in their order."""

    def by_name(run: Sequence[Operation]) -> dict[tuple[int, str, int], Operation]:
        count: Counter[tuple[int, str]] = Counter()
        found = {}
        for op in [op for op in run if op.op == "weight"]:
            which = op.step, op.names[0]
            count[which] += 1
            found[(*which, count[which])] = op
        return found

    of_a, of_b = by_name(a), by_name(b)
    return [(x, of_b[which]) for which, x in of_a.items() if which in of_b]


def by_name(a: Sequence[str], b: Sequence[str]) -> list[tuple[int, int]]:
    """Pair weights by name, or where one name is the end of the other after a point."""
    pairs = []
    rest = dict(enumerate(b))
    for i, name in enumerate(a):
        for j, other in rest.items():
            long, short = (name, other) if len(name) >= len(other) else (other, name)
            if long == short or long.endswith(f".{short}"):
                pairs.append((i, j))
                del rest[j]
                break
    return pairs

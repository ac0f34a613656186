"""How a cache keeps a teacher's answers: one module for each CACHE_METHOD."""

from collections.abc import Mapping
from types import MappingProxyType

from ssl_kd.language.kept.hidden import HEADS, LastHidden
from ssl_kd.language.kept.method import Kept, Live
from ssl_kd.language.kept.sampled import Sampled
from ssl_kd.language.kept.top_k import TopK

__all__ = ["HEADS", "KINDS", "Kept", "LastHidden", "Live", "Sampled", "TopK"]

KINDS: Mapping[str, type[Kept]] = MappingProxyType(
    {kind.name: kind for kind in (TopK, Sampled, LastHidden)}
)

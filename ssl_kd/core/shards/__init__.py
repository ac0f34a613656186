"""Store rows of tensors in verified shards that several processes can write, and resume."""

from ssl_kd.core.shards.fingerprint import BaseFingerprint, Fingerprint, FingerprintMismatch
from ssl_kd.core.shards.shards import NonFiniteRow, ShardStore
from ssl_kd.core.shards.writer import ShardWriter

__all__ = [
    "BaseFingerprint",
    "Fingerprint",
    "FingerprintMismatch",
    "NonFiniteRow",
    "ShardStore",
    "ShardWriter",
]

"""Verified caches of embeddings, under the path that users import."""

from ssl_kd.core.shards import *
from ssl_kd.vision.cache import *

"""Explore a finished run in a browser: a map of its samples, and decisions about clusters."""

from ssl_kd_explore.explore.map_layout import map_of
from ssl_kd_explore.explore.page_data import write_site
from ssl_kd_explore.explore.server import serve

__all__ = ["map_of", "serve", "write_site"]

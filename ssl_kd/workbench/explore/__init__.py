"""A finished run to look at: the map of its samples in a browser, and decisions about clusters."""

from ssl_kd.workbench.explore.places import map_of
from ssl_kd.workbench.explore.server import serve
from ssl_kd.workbench.explore.site import write_site

__all__ = ["map_of", "serve", "write_site"]

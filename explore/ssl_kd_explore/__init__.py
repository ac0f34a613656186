"""Work with the finished clusters of `ssl_kd`: explore, curate, compare and export them."""

__version__ = "0.1.0"

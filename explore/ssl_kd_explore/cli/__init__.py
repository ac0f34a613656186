"""The commands `explore`, `curate`, `compare`, `export` and `watch` of `ssl_kd`."""

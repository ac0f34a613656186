"""Clustering heads, under the path that users import: `HEAD = "ssl_kd.heads.TEMIHead"`."""

from ssl_kd.vision.train.heads import *

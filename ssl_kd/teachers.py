"""Image teachers and the base classes of your own, under the path that users import."""

from ssl_kd.vision.teachers import *

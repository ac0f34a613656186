"""Frozen teachers by name: pixels, DINOv2, any timm or torchvision model, a user's features."""

from ssl_kd.teachers.base import Features, Pixels, Teacher, TeacherUnavailable
from ssl_kd.teachers.load import DINOV2_MODELS, load_teacher
from ssl_kd.teachers.network import Network, Transform

__all__ = [
    "DINOV2_MODELS",
    "Features",
    "Network",
    "Pixels",
    "Teacher",
    "TeacherUnavailable",
    "Transform",
    "load_teacher",
]

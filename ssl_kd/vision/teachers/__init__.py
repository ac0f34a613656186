"""Load frozen image teachers: pixels, DINOv2, any timm or torchvision model, or your own class."""

from ssl_kd.core.shards.fingerprint import weights_id
from ssl_kd.vision.teacher_kinds import DINOV2_MODELS
from ssl_kd.vision.teachers.base import Features, Pixels, Teacher, TeacherUnavailable
from ssl_kd.vision.teachers.load import load_teacher
from ssl_kd.vision.teachers.network import Network, Transform

__all__ = [
    "DINOV2_MODELS",
    "Features",
    "Network",
    "Pixels",
    "Teacher",
    "TeacherUnavailable",
    "Transform",
    "load_teacher",
    "weights_id",
]

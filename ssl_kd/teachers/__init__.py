"""Load frozen image teachers: pixels, DINOv2, any timm or torchvision model, or your own class."""

from ssl_kd.teachers.base import Features, Pixels, Teacher, TeacherUnavailable
from ssl_kd.teachers.load import DINOV2_MODELS, load_teacher
from ssl_kd.teachers.network import Network, Transform
from ssl_kd.teachers.weights import weights_id

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

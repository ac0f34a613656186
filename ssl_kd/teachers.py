"""Image teachers and the base classes of your own, under the path that users import."""

from ssl_kd.vision.teachers import (
    DINOV2_MODELS,
    Features,
    Network,
    Pixels,
    Teacher,
    TeacherUnavailable,
    Transform,
    load_teacher,
    weights_id,
)

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

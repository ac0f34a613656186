"""Load a teacher of a user's class by its import path."""

from __future__ import annotations

import inspect

from torch import nn

from ssl_kd.core.errors import InputError
from ssl_kd.core.settings.import_paths import import_class
from ssl_kd.vision.teachers.base import Teacher
from ssl_kd.vision.teachers.request import Request


def load_imported(request: Request) -> Teacher:
    """Build a teacher from its import path, passing the options that its `__init__` accepts."""
    path = request.name
    teacher_class = import_class(path, Teacher, "teacher")
    accepted = inspect.signature(teacher_class).parameters
    names = ("weights", "image_size", "token")
    options = {name: getattr(request, name) for name in names}
    for option, value in options.items():
        if option not in accepted and value not in (None, "class"):
            raise InputError(
                f"teacher {path!r} does not accept {option} {value!r}: leave this setting at its "
                f"default, or add a parameter {option} to the __init__ of the class"
            )
    # None is left out, because the class may have another default.
    teacher = teacher_class(**{k: v for k, v in options.items() if k in accepted and v is not None})
    for attribute, kind in (("dim", int), ("weights_id", str), ("transform_id", str)):
        value = getattr(teacher, attribute, None)
        if not isinstance(value, kind):
            raise InputError(
                f"the attribute {attribute} of the teacher {path!r} is {value!r}; expected "
                f"{kind.__name__}: set self.{attribute} in __init__ (see ssl_kd.teachers.Teacher)"
            )
    has_network = any(isinstance(value, nn.Module) for value in vars(teacher).values())
    if teacher.weights_id == "none" and has_network:
        raise InputError(
            f"teacher {path!r} holds a network, but its weights_id is 'none', so a cache cannot "
            "identify the weights: set self.weights_id = ssl_kd.teachers.weights_id(network), or "
            "derive the class from ssl_kd.teachers.Network"
        )
    own_name = getattr(teacher, "name", None)
    teacher.name = f"{path} ({own_name})" if own_name else path
    return teacher

"""The learned map from the teacher's hidden states to the student's."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class HiddenProjection(nn.Linear):
    """A linear map without bias, in float32 also under autocast.

    It is trained with the student and thrown away after. Hidden states of some teachers hold
    values in the thousands, whose products overflow in float16.

    Args:
        teacher_dim: hidden size of the teacher.
        student_dim: hidden size of the student.
    """

    def __init__(self, teacher_dim: int, student_dim: int) -> None:
        super().__init__(teacher_dim, student_dim, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        """`[..., teacher_dim]` in any floating dtype to `[..., student_dim]` in that of the map."""
        with torch.autocast(input.device.type, enabled=False):
            return super().forward(input.to(self.weight.dtype))

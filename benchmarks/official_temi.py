"""The official TEMI code as a peer: loaded from a checkout that you name, nothing of it is here.

Get it with `git clone https://github.com/HHU-MMBS/TEMI-official-BMVC2023`. Its heads, its loss and
its optimizer step (`train_one_epoch` in its `train_main.py`) run as they are; only the copies to a
GPU, which this comparison does not need, are left out.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class OfficialTEMI:
    """Student, EMA teacher, loss and AdamW of the official code, for two views of embeddings."""

    def __init__(
        self,
        checkout: Path,
        *,
        in_dim: int,
        n_clusters: int,
        n_heads: int,
        batch_size: int,
        learning_rate: float = 1e-4,
        momentum: float = 0.996,
        hidden_dim: int = 512,
        bottleneck_dim: int = 256,
    ) -> None:
        if not (checkout / "losses" / "multihead_losses.py").is_file():
            raise SystemExit(f"{checkout} is not a checkout of the official TEMI code")
        sys.path.insert(0, str(checkout))
        try:
            self._utils = importlib.import_module("utils")
            loss_class = importlib.import_module("losses").TEMI
            # Its package __init__ wants CLIP; the heads alone do not.
            file = checkout / "model_builders" / "multi_head.py"
            spec = importlib.util.spec_from_file_location("official_multi_head", file)
            assert spec is not None and spec.loader is not None
            heads = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(heads)
        finally:
            sys.path.remove(str(checkout))

        def build() -> Any:  # a class of the peer's
            return heads.MultiHeadClassifier(
                "precomputed",
                embed_dim=in_dim,
                out_dim=n_clusters,
                nlayers=2,
                hidden_dim=hidden_dim,
                bottleneck_dim=bottleneck_dim,
                num_heads=n_heads,
            )

        self.student, self.teacher = build(), build()
        self.teacher.load_state_dict(self.student.state_dict())
        for p in self.teacher.parameters():
            p.requires_grad = False
        self.loss = loss_class(
            num_heads=n_heads,
            beta=0.6,
            out_dim=n_clusters,
            batchsize=batch_size,
            warmup_teacher_temp=0.1,
            teacher_temp=0.1,
            warmup_teacher_temp_epochs=1,
            nepochs=1000,
        )
        groups = self._utils.get_params_groups(self.student.head)
        groups[0]["weight_decay"] = 1e-4
        self.optimizer = torch.optim.AdamW(groups, lr=learning_rate)
        self.momentum = momentum
        self.head_losses = torch.zeros(n_heads)

    def step(self, views: Tensor) -> Tensor:
        """One step on views `[2, batch, dim]`; returns the loss of each head."""
        images = list(views)
        teacher_out, student_out = self.teacher(images), self.student(images)
        self.head_losses = self.loss(student_out, teacher_out, epoch=0)
        loss = self.head_losses.mean()
        if not torch.isfinite(loss).item():
            raise FloatingPointError(f"the official code's loss is {loss.item()}: it stops here")
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        with torch.no_grad():
            pairs = zip(self.student.head.parameters(), self.teacher.head.parameters(), strict=True)
            for q, k in pairs:
                k.data.mul_(self.momentum).add_((1 - self.momentum) * q.detach().data)
        return self.head_losses.detach()

    @torch.no_grad()
    def predict(self, x: Tensor, head_losses: Tensor) -> Tensor:
        """Clusters by the head of lowest loss, as the official evaluation does."""
        self.teacher.head.set_losses(head_losses)
        self.teacher.eval()
        clusters = self.teacher(x).argmax(-1)
        self.teacher.train()
        return clusters

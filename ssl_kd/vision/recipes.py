"""The recipes of the vision mode: settings of publications, a few lines of data each."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ssl_kd.core.settings.recipes import Paper, Recipe

_TEMI_PAPER = Paper(
    "Adaloglou, Michels, Kalisch, Kollmann",
    "Exploring the Limits of Deep Image Clustering using Pretrained Models",
    2023,
    "2303.17896",
)
_DINO_PAPER = Paper(
    "Caron et al.", "Emerging Properties in Self-Supervised Vision Transformers", 2021, "2104.14294"
)
_DINOV2_PAPER = Paper(
    "Oquab et al.",
    "DINOv2: Learning Robust Visual Features without Supervision",
    2023,
    "2304.07193",
)
# Shared by all data sets. The official code multiplies the learning rate of 1e-4 by
# batch size / 256, which is done here in each recipe.
_TEMI: Mapping[str, Any] = {
    "teacher": "timm:vit_base_patch16_224.dino",
    "pca_dim": None,
    "n_neighbors": 50,
    "method": "heads",
    "n_heads": 50,
    "hidden_dim": 512,
    "loss": "temi",
    "beta": 0.6,
    "student_temp": 0.1,
    "teacher_temp": 0.1,
    "instance_weight": "mean",
    "learning_rate": 2e-4,
    "clip_grad": None,
    "batch_size": 512,
    "epochs": 200,
}
_TEMI_SOURCE = (
    "Table 10 of the paper as quoted by hyw1008/VLM4Cluster, docs/method_hyperparameters.md"
    " (heads, neighbors, batch size, epochs, learning rate, beta); main_args.py and train_main.py"
    " of HHU-MMBS/TEMI-official-BMVC2023 (head, temperatures, no clipping, scaled learning rate)"
)
_BOARD = "the paper's entry on a leaderboard, hyper.ai/en/papers/2303.17896, not its own table"
_USER = "a user of the official README's command, which has other values, got {} %: its issue 1"
_TEMI_DIFFERS = (
    "Heads start from partitions of the neighbor graph here, in the paper from random weights.",
    "A pair here is of mutual neighbors, in the paper of any of the nearest ones.",
    "The EMA teacher follows with 0.9 a step, in the paper with 0.996; the learning rate falls to 0"
    " along a cosine, in the paper it stays after the warm-up.",
    "The answer here is a vote of the better half of the heads, by a criterion without labels, and"
    " all heads then learn it for as many epochs again; the official code evaluates the head of the"
    " lowest loss at each checkpoint, and reports the best accuracy of all checkpoints on held-out"
    " labels.",
    "An image is resized to 248 pixels here and cropped to 224, timm's values for this teacher; the"
    " official code resizes it to 224, or for ImageNet to 256 with a crop.",
    "Not run here: neither the data nor the weights were available.",
)


def _temi(
    dataset: str, n_clusters: int, expected: str, reported: str = _BOARD, **values: Any
) -> Recipe:
    return Recipe(
        "train",
        _TEMI_PAPER,
        {"dataset": dataset, "n_clusters": n_clusters, **_TEMI, **values},
        expected,
        reported,
        _TEMI_SOURCE,
        _TEMI_DIFFERS,
    )


# The scores of `ssl_kd evaluate` are of samples of large sets.
_SAMPLED = (
    "k-NN here classifies 10,000 random held-out samples by 100,000 random training samples, the"
    " official code all 50,000 by all 1.28 million."
)
_NOT_RUN = "Not run here: neither ImageNet nor the weights were available."
_KNN = "k = 20, temperature 0.07 and the class token at unit length, as ssl_kd evaluate has them"

RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "temi-cifar10": _temi(
            "cifar10",
            10,
            "94.5 % accuracy, NMI 88.6, ARI 88.5",
            f"{_BOARD}; {_USER.format(87.6)}",
        ),
        "temi-cifar100": _temi(
            "cifar100",
            100,
            "67.1 % accuracy, NMI 76.9, ARI 53.3",
            f"{_BOARD}; {_USER.format(64.2)}",
        ),
        "temi-stl10": _temi(
            "stl10",
            10,
            "not stated",
            "no text with this number was found",
            epochs=800,
        ),
        "temi-imagenet": _temi(
            "imagenet",
            1000,
            "58.0 % accuracy, NMI 81.4, ARI 45.9",
            n_neighbors=25,
            batch_size=1024,
            learning_rate=4e-4,
        ),
        "dino-knn": Recipe(
            "evaluate",
            _DINO_PAPER,
            {"dataset": "imagenet", "teacher": "timm:vit_base_patch16_224.dino"},
            "76.1 % k-NN accuracy",
            "README of facebookresearch/dino, ViT-B/16; ViT-S/16 has 74.5",
            f"facebookresearch/dino, eval_knn.py: {_KNN}",
            (
                "An image is resized to 248 pixels here, there to 256, and cropped to 224.",
                _SAMPLED,
                _NOT_RUN,
            ),
        ),
        "dinov2-knn": Recipe(
            "evaluate",
            _DINOV2_PAPER,
            {"dataset": "imagenet", "teacher": "dinov2_vitb14"},
            "82.1 % k-NN accuracy",
            "README of facebookresearch/dinov2, ViT-B/14; ViT-S has 79.0, ViT-L and ViT-g 83.5",
            f"facebookresearch/dinov2, dinov2/eval/knn.py: {_KNN}",
            (_SAMPLED, _NOT_RUN),
        ),
        "dinov2-linear": Recipe(
            "evaluate",
            _DINOV2_PAPER,
            {"dataset": "imagenet", "teacher": "dinov2_vitb14", "token": "last4"},
            "84.5 % accuracy of a linear probe",
            "README of facebookresearch/dinov2, ViT-B/14; ViT-S has 81.1, ViT-L 86.3, ViT-g 86.5",
            "facebookresearch/dinov2, dinov2/eval/linear.py",
            (
                "The official code trains on random crops; here there is one view of each image.",
                "At most 100,000 random training samples are used here, all 1.28 million there.",
                "The official code trains on four inputs (class token of the last layer or of the"
                " last four, with and without the mean patch) and reports the best of 4 times 13"
                " classifiers on the evaluated images; the input here is the last four class tokens"
                " with the mean patch, and the learning rate is chosen on training data (--out also"
                " records the best on the evaluated images, as_dinov2).",
                _NOT_RUN,
            ),
            {"probe": "sgd"},
        ),
    }
)

"""What a run leaves behind: the chosen heads, and how their votes become one answer."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import PyTorchModelHubMixin
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from typing_extensions import Self

from ssl_kd.errors import InputError, UserError
from ssl_kd.files import CorruptFileError, sha256_file
from ssl_kd.guard.precision import default_torch_state
from ssl_kd.heads import OWN_HEADS, HeadBank, TEMIHead, head_maker
from ssl_kd.losses import log_probabilities
from ssl_kd.settings.import_paths import path_of_file
from ssl_kd.vision.confidence import tempered
from ssl_kd.vision.new_clusters import NewClusters, comparable, find_new_clusters
from ssl_kd.vision.novelty import Novelty, is_dead
from ssl_kd.vision.projection import Projection
from ssl_kd.vision.splits import Splits
from ssl_kd.vision.tree import Tree

TILE = 64  # rows that products take at a time, or a divisor
ROWS_PER_BLOCK = 4096
DIGEST = "model_sha256"  # of model.safetensors, in the config.json beside it


class ClusterModel(nn.Module, PyTorchModelHubMixin):
    """Trained heads that vote: embeddings in, probabilities of clusters out.

    `p(c | x) = mean_h sum_k p_h(k | x) p_h(c | k)`: each head says how sure it is of each of its
    own clusters, and a table says which cluster of the consensus that one stands for. One
    temperature makes the vote as sure as the partition is stable (`ssl_kd.vision.confidence`).
    Training and held-out samples go through the same function.
    `ClusterModel.from_pretrained(folder)` loads what `save_pretrained(folder)` wrote, a run folder
    too; a tensor with a NaN is refused by its name.

    Args:
        in_dim: width of the embeddings.
        head_dim: width that the heads see of them, after the projection.
        n_clusters: number of clusters K.
        n_heads: number of heads H.
        head: import path of the head's class.
        hidden_dim: its width, if it has such an argument.
        bottleneck_dim: its width, if it has such an argument.
        temperature: of the heads' probabilities.
        answer_temperature: of the vote; above 1 it is less sure than the heads are.
        n_reference: training samples kept to compare new ones with; 0: no outlier scores.
        n_new: clusters that were offered later, numbered K, K + 1, ...
        n_new_rows: samples kept to know these by.
        levels: clusters of each level of the tree around these, finest first; None: there is none.
        n_splits: planes that give clusters a part which the vote alone would leave empty.

    Attributes:
        n_clusters: all of them, K + n_new.
    """

    weights: Tensor
    votes: Tensor

    def __init__(
        self,
        in_dim: int,
        head_dim: int,
        n_clusters: int,
        n_heads: int,
        head: str = f"{TEMIHead.__module__}.{TEMIHead.__qualname__}",
        hidden_dim: int = 512,
        bottleneck_dim: int = 256,
        temperature: float = 0.1,
        answer_temperature: float = 1.0,
        n_reference: int = 0,
        n_new: int = 0,
        n_new_rows: int = 0,
        levels: list[int] | None = None,
        n_splits: int = 0,
    ) -> None:
        super().__init__()
        self.n_clusters, self.temperature = n_clusters + n_new, temperature
        self.options = {
            "in_dim": in_dim,
            "head_dim": head_dim,
            "n_clusters": n_clusters,
            "n_heads": n_heads,
            "head": head,
            "hidden_dim": hidden_dim,
            "bottleneck_dim": bottleneck_dim,
            "temperature": temperature,
            "answer_temperature": answer_temperature,
            "n_reference": n_reference,
            "n_new": n_new,
            "n_new_rows": n_new_rows,
            "levels": levels,
            "n_splits": n_splits,
        }
        make = head_maker(
            head, head_dim, n_clusters, hidden_dim=hidden_dim, bottleneck_dim=bottleneck_dim
        )
        self.bank = HeadBank(make, n_heads)
        self.register_buffer("weights", torch.zeros(n_heads, self.bank.n_parameters))
        self.register_buffer("votes", torch.zeros(n_heads, n_clusters, n_clusters))
        self.projection = Projection(in_dim, head_dim)
        self.novelty = Novelty(head_dim, n_reference) if n_reference else None
        self.tree = Tree(head_dim, levels, n_clusters) if levels else None
        self.offers = NewClusters(head_dim + 1, n_new_rows) if n_new else None
        self.splits = Splits(head_dim, n_splits) if n_splits else None

    @classmethod
    def from_pretrained(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls, folder: str | Path, *, head: str | None = None, **options: Any
    ) -> Self:
        """Load what `save_pretrained` wrote, a run folder, or a model of the Hugging Face hub.

        Args:
            folder: the folder, or the model's name on the hub.
            head: import path of the head's class. Only this library's own head is imported because
                the folder names it; any other has to be named here, for an import runs code.
            **options: of `PyTorchModelHubMixin.from_pretrained`.

        Raises:
            CorruptFileError: config.json or model.safetensors is damaged, or they do not fit; a
                digest in config.json is compared (this class's `save_pretrained` writes none).
            ValueError: a head that is not this library's and was not named.
        """
        if Path(folder).is_dir():
            _check_digest(Path(folder) / "model.safetensors", read_config(folder).get(DIGEST))
        return super().from_pretrained(folder, own_head=head, **options)

    @classmethod
    def _from_pretrained(
        cls, *, model_id: str, own_head: str | None = None, strict: bool = True, **options: Any
    ) -> Any:
        if "head" in options:
            options["head"] = path_of_file(
                options["head"],
                own_head,
                OWN_HEADS,
                what="head",
                file=f"config.json of {model_id}",
                way=f"from_pretrained(..., head={options['head']!r})",
            )
        try:
            shapes = _shapes(Path(model_id) / "model.safetensors")
            _check_options(options, shapes)
            # The mixin prints, and passes over tensors that a file lacks or this model does not
            # know.
            with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
                model = super()._from_pretrained(model_id=model_id, strict=strict, **options)
        except UserError:
            raise
        except (SafetensorError, RuntimeError, TypeError, ValueError) as error:
            raise CorruptFileError(
                f"{Path(model_id) / 'model.safetensors'} cannot be loaded as the config.json "
                f"beside it describes it: {' '.join(str(error).split())[:300]}. One of the two is "
                "damaged or of another model: copy both again"
            ) from error
        return _sound(model, Path(model_id) / "model.safetensors")

    @classmethod
    def _load_as_safetensor(
        cls, model: Any, model_file: str, map_location: str, strict: bool
    ) -> Any:
        # Loading would convert others silently.
        kinds = {torch.float32: "F32", torch.float64: "F64", torch.int64: "I64"}
        state = model.state_dict()
        with safe_open(model_file, framework="pt") as file:
            for name in state.keys() & file.keys():
                if (kind := file.get_slice(name).get_dtype()) != kinds[state[name].dtype]:
                    raise ValueError(f"{name} is {kind}, expected {kinds[state[name].dtype]}")
        return super()._load_as_safetensor(model, model_file, map_location, strict)

    def forward(self, x: Tensor) -> Tensor:
        """Embeddings `[batch, in_dim]` -> probabilities `[batch, cluster]`, float32.

        Where a sample is of an offered cluster, that one has the share of the nearest rows that are
        of it, and the others share the rest; all other rows are as if nothing had been offered.
        """
        projected = self.projection(x)
        old = self.answer(projected)
        if self.offers is None:
            return old
        novelty = self._novelty()
        cluster, share = self.offers.claims(novelty.polar(projected), novelty.reference)
        share = torch.where(cluster >= 0, share, 0.0).unsqueeze(1)
        new = torch.zeros(len(x), self.options["n_new"], device=old.device)
        new.scatter_(1, cluster.clamp(min=0).unsqueeze(1), share)
        return torch.cat([old * (1 - share), new], 1)

    def head_probabilities(self, projected: Tensor) -> Tensor:
        """Projected embeddings `[batch, head_dim]` -> each head's own `[head, batch, cluster]`."""
        logits = self.bank(self.bank.unflatten(self.weights), projected)
        return log_probabilities(logits, self.temperature).exp()

    def vote(self, projected: Tensor) -> Tensor:
        """Projected embeddings `[batch, head_dim]` -> the heads' mean vote `[batch, cluster]`.

        Its largest entry is how far the heads agree on that sample, before `answer_temperature`.
        """
        return torch.bmm(self.head_probabilities(projected), self.votes).mean(0)

    def answer(self, projected: Tensor) -> Tensor:
        """The vote, tempered; beyond a plane of `splits` the two clusters swap probabilities."""
        old = tempered(self.vote(projected), self.options["answer_temperature"])
        if self.splits is None:
            return old
        likeliest = old.argmax(-1)
        last = self.splits(projected, likeliest)
        pair = torch.stack([likeliest, last], 1)
        swapped = old.gather(1, pair.flip(1))
        # Votes are often equal to the bit: the swapped one is to be the only largest.
        more = swapped[:, 1].nextafter(torch.full_like(swapped[:, 1], 2.0))
        swapped[:, 1] = torch.where(last == likeliest, swapped[:, 1], more)
        return old.scatter(1, pair, swapped)

    @default_torch_state()
    @torch.inference_mode()
    def predict_proba(self, x: Tensor) -> Tensor:
        """`forward` in blocks, without gradients, on the model's device; the result on the CPU."""
        return self._in_blocks(self, x)

    @default_torch_state()
    @torch.inference_mode()
    def predict(self, x: Tensor) -> Tensor:
        """Embeddings `[n, in_dim]` -> clusters `[n]` int64; a mapped file is read in blocks."""
        return self._in_blocks(lambda block: self(block).argmax(-1), x)

    @default_torch_state()
    @torch.inference_mode()
    def likeliest(self, x: Tensor, most: int) -> tuple[Tensor, Tensor]:
        """The likeliest clusters of each row, sorted on the model's device, never all of them kept.

        Args:
            x: embeddings `[n, in_dim]`.
            most: how many, 1 ... n_clusters.

        Returns:
            Clusters `[n, most]` int32, the likeliest first (among equals the lower number), and
            their probabilities `[n, most]` float32; on the CPU.
        """
        clusters, probabilities = [], []
        for block in x.split(ROWS_PER_BLOCK):
            found = self._in_tiles(self, block).sort(stable=True, dim=-1, descending=True)
            # Copies, which do not keep the probabilities of all clusters alive.
            clusters.append(found.indices[:, :most].int().cpu())
            probabilities.append(found.values[:, :most].clone().cpu())
        return torch.cat(clusters), torch.cat(probabilities)

    @default_torch_state()
    @torch.no_grad()
    def extended(self, read: Callable[[Tensor], Tensor], n: int) -> ClusterModel:
        """This model with the clusters that new samples offer; itself where they offer none.

        Its numbers keep their meaning: offered clusters are `n_clusters`, `n_clusters + 1`, ...

        Args:
            read: the embeddings of some of the new samples, `[b]` integers -> `[b, in_dim]`.
            n: how many there are, at least 1.

        Raises:
            InputError: the model keeps no samples to compare with.
        """
        novelty = self._novelty()
        reference, old = novelty.reference, self.answer(novelty.rows).argmax(-1)
        if self.offers is not None:
            reference = torch.cat([reference, self.offers.rows])
            old = torch.cat([old, self.options["n_clusters"] + self.offers.clusters])

        def polar(x: Tensor) -> Tensor:
            return novelty.polar(self.projection(x.to(self.weights.device)))

        blocks = [self.predict(read(rows)) for rows in torch.arange(n).split(ROWS_PER_BLOCK)]
        joined = torch.cat(blocks)
        rows = comparable(old.cpu(), joined)
        new = torch.cat([polar(read(part)) for part in rows.split(ROWS_PER_BLOCK)])
        groups = find_new_clusters(reference.cpu(), old.cpu(), new.cpu(), joined[rows])
        if not (groups >= 0).any():
            return self

        tensors, n_new = self.state_dict(), self.options["n_new"]
        known = {"offers.rows": new[groups >= 0], "offers.clusters": n_new + groups[groups >= 0]}
        for name, tensor in known.items():
            before = [tensors[name]] if name in tensors else []
            tensors[name] = torch.cat([*before, tensor.to(self.weights.device)])
        grown = {"n_new": n_new + int(groups.max()) + 1, "n_new_rows": len(tensors["offers.rows"])}
        model = type(self)(**self.options | grown)
        model.load_state_dict(tensors)
        return model.to(self.weights.device)

    @default_torch_state()
    @torch.inference_mode()
    def predict_levels(self, x: Tensor, clusters: Tensor | None = None) -> Tensor:
        """Embeddings `[n, in_dim]` -> clusters of each level of `options["levels"]`, `[n, level]`.

        Args:
            x: the embeddings.
            clusters: `[n]` int64, what `predict` says of them, where that is known.

        Raises:
            InputError: the model has no tree: its heads found the clusters themselves.
        """
        tree = self.tree
        if tree is None:
            raise InputError(
                "this model holds no tree of levels: train it with METHOD graph (the default)"
            )
        blocks = x.split(ROWS_PER_BLOCK)
        given = (self.predict(x) if clusters is None else clusters).split(ROWS_PER_BLOCK)
        device = self.weights.device
        found = [
            tree(self.projection(block.to(device)), own.to(device)).cpu()
            for block, own in zip(blocks, given, strict=True)
        ]
        return torch.cat(found)

    @default_torch_state()
    @torch.inference_mode()
    def outlier_scores(self, x: Tensor) -> Tensor:
        """Embeddings `[n, in_dim]` -> the share of training samples less far out, `[n]` in [0, 1].

        For one of an offered cluster the training samples are no measure: it has the share of its
        nearest five that are not of that cluster, where this is less. A dead input has 1, whatever
        was trained on: a row of zeros, or of one value in 8 columns or more.

        Raises:
            InputError: the model keeps none.
        """
        novelty = self._novelty()

        def score(block: Tensor) -> Tensor:
            projected = self.projection(block)
            scores = novelty.score(projected)
            if self.offers is not None:
                cluster, share = self.offers.claims(novelty.polar(projected), novelty.reference)
                scores = torch.where(cluster >= 0, scores.minimum(1 - share), scores)
            return scores.masked_fill(is_dead(block), 1)

        return self._in_blocks(score, x)

    def _novelty(self) -> Novelty:
        if self.novelty is None:
            raise InputError(
                "this model holds no outlier scores (n_reference 0). Train it again with the "
                "settings of its config.json"
            )
        return self.novelty

    def _in_blocks(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        blocks = x.split(ROWS_PER_BLOCK) if len(x) else [x]
        return torch.cat([self._in_tiles(function, block).cpu() for block in blocks])

    def _in_tiles(self, function: Callable[[Tensor], Tensor], block: Tensor) -> Tensor:
        """Of whole tiles: the last bit of a row's result then does not depend on its place."""
        whole = nn.functional.pad(block, (0, 0, 0, -len(block) % TILE))
        return function(whole.to(self.weights.device))[: len(block)]


def read_config(folder: str | Path) -> dict[str, Any]:
    """The `config.json` of a run folder, or of one that `save_pretrained` wrote.

    Raises:
        FileNotFoundError: it is not there.
        CorruptFileError: it is not JSON, or not an object.
    """
    config = _read_object(path := Path(folder) / "config.json")
    if not isinstance(config.get("settings", {}), dict):
        raise CorruptFileError(f"{path} is damaged (its settings are no object): copy it again")
    return config


def read_metrics(folder: str | Path) -> dict[str, Any]:
    """The `metrics.json` of a finished run.

    Raises:
        FileNotFoundError: it is not there.
        CorruptFileError: it is not JSON, or not an object.
    """
    return _read_object(Path(folder) / "metrics.json")


def has_pictures(metrics: Mapping[str, Any]) -> bool:
    """Whether the `metrics.json` of a run says that its samples, or some of them, have pictures."""
    return metrics.get("dataset", {}).get("pictured", False)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"{path} is damaged ({error}): copy it again") from error
    if not isinstance(found, dict):
        raise CorruptFileError(f"{path} is damaged (not an object): copy it again")
    return found


# Which dimension of which tensor an option of config.json says.
_SIZES = {
    "in_dim": ("projection.mean", 0),
    "n_clusters": ("votes", 1),
    "n_heads": ("weights", 0),
    "n_reference": ("novelty.reference", 0),
    "n_new_rows": ("offers.rows", 0),
}
_WIDTHS = ("head_dim", "hidden_dim", "bottleneck_dim")


def _shapes(file: Path) -> dict[str, list[int]]:
    """Return the shapes of a file's tensors, which are not read; none of a model of the hub."""
    if not file.is_file():
        return {}
    with safe_open(file, framework="pt") as tensors:
        return {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}


def _check_digest(file: Path, expected: Any) -> None:
    """Raise CorruptFileError where a file is not the one that config.json describes; None: any."""
    if expected is not None and file.is_file() and expected != (digest := sha256_file(file)):
        raise CorruptFileError(
            f"{file} has the sha256 {digest}, expected {expected} ({DIGEST} in config.json): one "
            "of the two is damaged or of another model. Copy both again, or train again"
        )


def _check_options(options: Mapping[str, Any], shapes: Mapping[str, list[int]]) -> None:
    """Raise ValueError where config.json says what cannot be, before memory is taken for it.

    A head's layers have at most as many weights as the file holds for a head.
    """
    for name in ("temperature", "answer_temperature"):
        value = options.get(name, 1.0)
        if type(value) not in (int, float) or not 0.01 <= value <= 100:
            raise ValueError(f"{name} is {value!r}, expected a number from 0.01 to 100")
    levels = options.get("levels") or []
    counts = {name: options[name] for name in (*_SIZES, *_WIDTHS, "n_new") if name in options}
    for name, value in [*counts.items(), *(("levels", level) for level in levels)]:
        if type(value) is not int or not 0 <= value < 1 << 31:
            raise ValueError(f"{name} is {value!r}, expected a whole number below 2^31")
    for name, (tensor, axis) in _SIZES.items():
        if shapes and counts.get(name, 0) != (shape := shapes.get(tensor, [0, 0]))[axis]:
            raise ValueError(f"{name} is {counts.get(name)}, but {tensor} has the shape {shape}")
    most = shapes.get("weights", [0, 0])[1]
    widest = counts.get("hidden_dim", 1) * max(
        counts.get(n, 1) for n in ("head_dim", "bottleneck_dim")
    )
    if most and options.get("head") in (None, *OWN_HEADS) and widest > most:
        raise ValueError(f"layers of {widest} weights, but model.safetensors has {most} for a head")
    if shapes and levels and (len(levels), levels[0]) != tuple(shapes.get("tree.parents", ())):
        raise ValueError(f"levels are {levels}, but the tree has {shapes.get('tree.parents')}")


def _sound(model: ClusterModel, file: Path) -> ClusterModel:
    """Return the model, which would say cluster 0 to whatever comes if it held a NaN.

    Raises:
        CorruptFileError: it does, or a cluster that is not there; names the tensor.
    """
    state = model.state_dict()
    for name, tensor in state.items():
        if bad := int((~tensor.isfinite()).sum()):
            raise CorruptFileError(
                f"{file}: {bad} of {tensor.numel()} values of {name} are "
                "NaN or infinite, expected finite ones: take another copy, or train again"
            )
    sizes = torch.tensor(model.options["levels"] or [0]).unsqueeze(1)
    below = {
        "offers.clusters": model.options["n_new"],
        "tree.owners": model.options["n_clusters"],
        "tree.parents": sizes,
    }
    odd = [n for n, most in below.items() if n in state and not _within(state[n].cpu(), most)]
    odd += [n for n in ("projection.scale", "novelty.length") if n in state and state[n] <= 0]
    odd += ["votes"] if not _within(state["votes"].cpu(), 1.001) else []
    if odd:
        raise CorruptFileError(
            f"{file}: values of {odd[0]} are out of range: take another copy, or train again"
        )
    return model


def _within(values: Tensor, below: Tensor | float) -> bool:
    return bool(((values >= 0) & (values < below)).all())

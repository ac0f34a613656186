"""Predict clusters by the vote of trained heads; save and load the model."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from typing_extensions import Self

from ssl_kd.core.errors import InputError, brief
from ssl_kd.core.files import CorruptFileError, atomic_write_bytes, atomic_write_json, sha256_file
from ssl_kd.core.precision import default_torch_state
from ssl_kd.core.settings.import_paths import check_installed, path_of_file
from ssl_kd.vision.model_parts import Projection, Splits, Tree
from ssl_kd.vision.new_clusters import NewClusters, comparable, find_new_clusters
from ssl_kd.vision.novelty import Novelty, is_dead
from ssl_kd.vision.train.heads import OWN_HEADS, HeadBank, head_maker, import_head
from ssl_kd.vision.train.losses import log_probabilities

TILE = 64  # rows are padded to a multiple of this, so that matrix products give the same bits
ROWS_PER_BLOCK = 4096
MODEL_FILES = ("config.json", "model.safetensors")
DIGEST = "model_sha256"  # key of config.json: the sha256 of model.safetensors
_EXPECTED = "expected the folder of a finished run, or a folder that save_pretrained wrote"


class ClusterModel(nn.Module):
    """Map embeddings to cluster probabilities by the mean vote of trained heads.

    `p(c | x) = mean_h sum_k p_h(k | x) p_h(c | k)`: each head h gives probabilities to its own
    clusters k, and a table `p_h(c | k)` translates these to the common clusters c. A temperature
    calibrates the confidence of the vote.
    """

    weights: Tensor
    votes: Tensor

    def __init__(
        self,
        in_dim: int,  # width of the embeddings
        head_dim: int,  # their width after the projection
        n_clusters: int,  # K
        n_heads: int,
        head: str = OWN_HEADS[0],  # import path
        hidden_dim: int = 512,
        bottleneck_dim: int = 256,
        temperature: float = 0.1,  # of the heads
        answer_temperature: float = 1.0,  # of the vote; above 1 lowers the confidence
        n_reference: int = 0,  # stored training samples for outlier scores; 0: no scores
        n_new: int = 0,  # clusters that were added after the training, numbered from K
        n_new_rows: int = 0,  # stored samples that define the added clusters
        levels: list[int] | None = None,  # clusters of each tree level, finest first
        n_splits: int = 0,  # planes that split clusters to fill empty ones
        standardized: bool = False,  # whether each column has a scale of its own
    ) -> None:
        arguments = dict(locals())
        super().__init__()
        self.options = {
            name: arguments[name] for name in inspect.signature(ClusterModel).parameters
        }
        self.n_clusters = n_clusters + n_new  # all clusters
        self.temperature = temperature
        make = head_maker(
            head, head_dim, n_clusters, hidden_dim=hidden_dim, bottleneck_dim=bottleneck_dim
        )
        self.bank = HeadBank(make, n_heads)
        self.register_buffer("weights", torch.zeros(n_heads, self.bank.n_parameters))
        self.register_buffer("votes", torch.zeros(n_heads, n_clusters, n_clusters))
        self.projection = Projection(in_dim, head_dim, standardized)
        self.novelty = Novelty(head_dim, n_reference) if n_reference else None
        self.tree = Tree(head_dim, levels, n_clusters) if levels else None
        self.offers = NewClusters(head_dim + 1, n_new_rows) if n_new else None
        self.splits = Splits(head_dim, n_splits) if n_splits else None

    def save_tensors(self, folder: Path) -> Path:
        """Write the tensors to `model.safetensors` in a folder, and return the path."""
        tensors = {name: tensor.contiguous() for name, tensor in self.state_dict().items()}
        atomic_write_bytes(folder / "model.safetensors", safetensors.torch.save(tensors))
        return folder / "model.safetensors"

    def save_pretrained(self, folder: str | Path, **config: Any) -> None:
        """Write `model.safetensors` and `config.json`, with the entries `config`, to a folder."""
        if (folder := Path(folder)).exists() and not folder.is_dir():
            raise InputError(
                f"{folder} is a file; expected a folder: pass another path to save_pretrained"
            )
        folder.mkdir(parents=True, exist_ok=True)
        digest = sha256_file(self.save_tensors(folder))
        atomic_write_json(folder / "config.json", {**self.options, **config, DIGEST: digest})

    @classmethod
    def from_pretrained(cls, folder: str | Path, *, head: str | None = None) -> Self:
        """Load a model from a folder, or from the Hugging Face Hub by its name `user/name`.

        `head` is the import path of the heads' class, required for a class outside this library.
        """
        folder = folder_of(folder)
        config, file = read_config(folder), folder / "model.safetensors"
        if not file.is_file():
            raise FileNotFoundError(f"{folder} has no {file.name}: {_EXPECTED}")
        expected = config.get(DIGEST)
        if expected is not None and expected != (digest := sha256_file(file)):
            raise CorruptFileError(
                f"{file} has the sha256 {digest}, expected {expected} ({DIGEST} in config.json): "
                "one of the two files is damaged or of another model. Copy both files again"
            )
        names = inspect.signature(cls).parameters
        options = {name: config[name] for name in names if name in config}
        if "head" in options:
            named, place = options["head"], f"config.json of {folder}"
            way = f"from_pretrained(..., head={named!r})"
            about = {"what": "head", "file": place, "way": way}
            options["head"] = path_of_file(named, head, OWN_HEADS, **about)
            import_head(options["head"])  # before the try: a wrong `head` is not a damaged file
        try:
            for name in ("temperature", "answer_temperature"):
                value = options.get(name, 1.0)
                if type(value) not in (int, float) or not 0.01 <= value <= 100:
                    raise ValueError(f"{name} is {value!r}, expected a number from 0.01 to 100")
            # On the meta device, wrong sizes in config.json allocate no memory.
            is_ours = options.get("head", OWN_HEADS[0]) in OWN_HEADS
            with torch.device("meta" if is_ours else "cpu"):
                model = cls(**options)
            tensors = safetensors.torch.load_file(file)
            for name, tensor in model.state_dict().items():
                if name in tensors and tensors[name].dtype != tensor.dtype:
                    raise ValueError(f"{name} is {tensors[name].dtype}, expected {tensor.dtype}")
            model.load_state_dict(tensors, assign=True)
        except (SafetensorError, RuntimeError, TypeError, ValueError, OverflowError) as error:
            raise CorruptFileError(
                f"{file} does not fit the config.json in the same folder: "
                f"{brief(error, 300)}. One of the two files is damaged or belongs "
                "to another model: copy both files again"
            ) from error
        if fault := model._fault():
            raise CorruptFileError(f"{file}: {fault}: copy both files again, or train again")
        return model

    def _fault(self) -> str | None:
        """Describe a loaded tensor with a value that is NaN or out of range; None if all fit."""
        state = self.state_dict()
        for name, tensor in state.items():
            if bad := int((~tensor.isfinite()).sum()):
                return (
                    f"{bad} of {tensor.numel()} values of {name} are NaN or infinite; expected "
                    "finite values"
                )
        upper_bounds = {
            "offers.clusters": self.options["n_new"],
            "tree.owners": self.options["n_clusters"],
            "tree.parents": torch.tensor(self.options["levels"] or [0]).unsqueeze(1),
            "votes": 1.001,
        }
        for name, bound in upper_bounds.items():
            if name in state and not ((state[name] >= 0) & (state[name] < bound)).all():
                return f"a value of {name} is below 0 or above what config.json allows"
        for name in ("projection.scale", "novelty.length"):
            if name in state and (least := float(state[name].min())) <= 0:
                return f"{name} is {least}; expected a positive number"
        return None

    def forward(self, x: Tensor) -> Tensor:
        """Map embeddings `[batch, in_dim]` to cluster probabilities `[batch, cluster]`, float32.

        If a sample belongs to an added cluster, the probability of that cluster is the share of the
        sample's nearest stored rows that belong to it; the other clusters share the rest. Added
        clusters do not change the probabilities of other samples.
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

    def vote(self, projected: Tensor) -> Tensor:
        """Map projected embeddings `[batch, head_dim]` to the mean vote `[batch, cluster]`.

        `answer_temperature` and `splits` are not applied.
        """
        logits = self.bank(self.bank.unflatten(self.weights), projected)
        probabilities = log_probabilities(logits, self.temperature).exp()
        return torch.bmm(probabilities, self.votes).mean(0)

    def answer(self, projected: Tensor) -> Tensor:
        """Return the calibrated vote, with two entries swapped where `splits` moves a sample."""
        old = tempered(self.vote(projected), self.options["answer_temperature"])
        if self.splits is None:
            return old
        likeliest = old.argmax(-1)
        last = self.splits(projected, likeliest)
        pair = torch.stack([likeliest, last], 1)
        swapped = old.gather(1, pair.flip(1))
        # Two votes are often equal: raise the swapped one, so that it alone is the largest.
        more = swapped[:, 1].nextafter(torch.full_like(swapped[:, 1], 2.0))
        swapped[:, 1] = torch.where(last == likeliest, swapped[:, 1], more)
        return old.scatter(1, pair, swapped)

    @default_torch_state()
    @torch.inference_mode()
    def predict_proba(self, x: Tensor) -> Tensor:
        """Compute `forward` in blocks, without gradients, and return the result on the CPU."""
        return self._in_blocks(self, x)

    @default_torch_state()
    @torch.inference_mode()
    def predict(self, x: Tensor) -> Tensor:
        """Return the most probable cluster of each embedding, `[n]` int64 on the CPU."""
        return self._in_blocks(lambda block: self(block).argmax(-1), x)

    @default_torch_state()
    @torch.inference_mode()
    def likeliest(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the k most probable clusters and their probabilities, `[n, k]`, on the CPU.

        Of equal probabilities, that of the lower cluster index comes first.
        """
        clusters, probabilities = [], []
        for block in x.split(ROWS_PER_BLOCK):
            values, indices = self._in_tiles(self, block).sort(dim=-1, descending=True, stable=True)
            # Copy, because a view would keep the probabilities of all clusters in memory.
            clusters.append(indices[:, :k].int().cpu())
            probabilities.append(values[:, :k].clone().cpu())
        return torch.cat(clusters), torch.cat(probabilities)

    @default_torch_state()
    @torch.no_grad()
    def extended(self, read: Callable[[Tensor], Tensor], n: int) -> ClusterModel:
        """Return a model with additional clusters for new samples that are unlike all known ones.

        Existing clusters keep their indices; added clusters are numbered from `n_clusters`. If the
        n samples, which `read` returns by row, form no new cluster, return the model itself.
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
        added = {"offers.rows": new[groups >= 0], "offers.clusters": n_new + groups[groups >= 0]}
        for name, tensor in added.items():
            before = [tensors[name]] if name in tensors else []
            tensors[name] = torch.cat([*before, tensor.to(self.weights.device)])
        sizes = {"n_new": n_new + int(groups.max()) + 1, "n_new_rows": len(tensors["offers.rows"])}
        model = type(self)(**self.options | sizes)
        model.load_state_dict(tensors)
        return model.to(self.weights.device)

    @default_torch_state()
    @torch.inference_mode()
    def predict_levels(self, x: Tensor, clusters: Tensor | None = None) -> Tensor:
        """Return the cluster of each embedding at every tree level, `[n, level]`, finest first.

        `clusters` is the result of `predict(x)`, if it is already computed.
        """
        tree, device = self.tree, self.weights.device
        if tree is None:
            raise InputError(
                "this model has no tree of levels: train it with METHOD consensus (the default)"
            )
        clusters = self.predict(x) if clusters is None else clusters
        blocks = zip(x.split(ROWS_PER_BLOCK), clusters.split(ROWS_PER_BLOCK), strict=True)
        levels = [
            tree(self.projection(block.to(device)), of_block.to(device)).cpu()
            for block, of_block in blocks
        ]
        return torch.cat(levels)

    @default_torch_state()
    @torch.inference_mode()
    def outlier_scores(self, x: Tensor) -> Tensor:
        """Return the outlier score of each embedding, `[n]` in [0, 1] (see `novelty.Novelty`).

        In an added cluster the score is at most the share of the sample's nearest five stored rows
        outside that cluster. A row of zeros, or of 8 or more equal values, always scores 1.
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
                "this model has no outlier scores, because it stores no training samples "
                "(n_reference is 0): train it again with the settings of its config.json"
            )
        return self.novelty

    def _in_blocks(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        blocks = x.split(ROWS_PER_BLOCK) if len(x) else [x]
        return torch.cat([self._in_tiles(function, block).cpu() for block in blocks])

    def _in_tiles(self, function: Callable[[Tensor], Tensor], block: Tensor) -> Tensor:
        """Apply a function to tiles of rows, so that no result depends on the number of rows."""
        padded = nn.functional.pad(block, (0, 0, 0, -len(block) % TILE))
        return function(padded.to(self.weights.device))[: len(block)]


def tempered(probabilities: Tensor, temperature: float) -> Tensor:
    """Return `p_k^(1/T) / sum_l p_l^(1/T)` for probabilities `[..., K]`; unchanged for T = 1."""
    if temperature == 1:
        return probabilities
    return torch.softmax(logits_of(probabilities) / temperature, -1).to(probabilities.dtype)


def logits_of(probabilities: Tensor) -> Tensor:
    """Return the logarithms of probabilities in float64, finite for an exact 0."""
    return probabilities.clamp(min=torch.finfo(torch.float32).tiny).double().log()


def folder_of(name: str | Path) -> Path:
    """Return a folder; if `user/name` is not one, download the model of that name from the Hub."""
    if Path(name).exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", str(name)):
        return Path(name)
    check_installed(["huggingface_hub"], "hub", f"There is no folder {name}, and the Hub")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(snapshot_download(str(name), allow_patterns=list(MODEL_FILES)))
    except (HfHubHTTPError, OSError) as error:
        raise FileNotFoundError(
            f"there is no folder {name}, and the Hugging Face Hub has no such model: {brief(error)}"
        ) from error


def read_config(folder: str | Path) -> dict[str, Any]:
    """Read the `config.json` of a run, or of a model that `save_pretrained` wrote."""
    if not (path := Path(folder) / "config.json").is_file():
        raise FileNotFoundError(f"{folder} has no config.json: {_EXPECTED}")
    config = read_object(path)
    if not isinstance(config.get("settings", {}), dict):
        raise CorruptFileError(f"{path} is damaged (`settings` is not an object): copy it again")
    return config


def has_pictures(metrics: Mapping[str, Any]) -> bool:
    """Return True if samples of a run have pictures, according to its `metrics.json`."""
    return metrics.get("dataset", {}).get("pictured", False)


def read_object(path: Path) -> dict[str, Any]:
    """Read a file that holds a JSON object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"{path} is damaged ({error}): copy it again") from error
    if not isinstance(content, dict):
        raise CorruptFileError(f"{path} is damaged (it does not hold a JSON object): copy it again")
    return content

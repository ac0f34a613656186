"""An objective of a user's own: targets that are balanced over the clusters, as in SwAV."""

from ssl_kd import losses
from ssl_kd.vision.objectives import Sharpened


class Sinkhorn(Sharpened):
    """`Sharpened` with balanced instead of centred targets."""

    def targets(self, logits, marginal):
        return losses.sinkhorn_targets(logits, self._temperature), logits.float().mean((1, 2))


SINKHORN = f"{__name__}.Sinkhorn"

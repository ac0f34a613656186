"""An objective of a user's own: targets that are balanced over the clusters, as in SwAV."""

from ssl_kd.vision.objectives import Sharpened


class Sinkhorn(Sharpened):
    """`Sharpened` with balanced instead of centred targets."""

    def targets(self, logits, marginal):
        log_q = (logits.float() / self._temperature).flatten(1, -2)
        for _ in range(3):
            log_q = log_q - log_q.logsumexp(1, keepdim=True)  # every cluster the same mass
            log_q = log_q.log_softmax(2)  # every sample mass one
        return log_q.exp().view(logits.shape), logits.float().mean((1, 2))


SINKHORN = f"{__name__}.Sinkhorn"

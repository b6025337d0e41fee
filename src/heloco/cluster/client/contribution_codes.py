"""The codes of this machine's contributions: an encoder for each worker whose rounds it does, with what the codes left out.

What is left out stays in the memory of a machine while it is joined. When its process ends it is lost, and the machine's next
contribution is encoded without it.
"""

from collections.abc import Mapping

from torch import Tensor

from heloco.cluster.protocol.messages import Joined, RoundKey
from heloco.errors import UserError
from heloco.wire import blocks
from heloco.wire.encoder import ContributionEncoder
from heloco.wire.formats import FORMATS, find_format
from heloco.wire.link_options import LinkOptions

RESIDUALS_KEPT = 4
"""Of at most this number of workers, the last ones, what the codes left out is kept: each is as large as the model in float32."""


class ContributionCodes:
    """Encodes the contributions of one machine in one run."""

    def __init__(self, joined: Joined) -> None:
        terms = joined.terms
        if terms.wire not in FORMATS:
            raise UserError(
                f"Contributions to this run travel in the format {terms.wire!r}, which this version of heloco does not have: "
                "install the version that serves the run."
            )
        self._run, self._terms = joined.run, terms
        self._format = find_format(terms.wire)
        self._options = LinkOptions(
            wire=terms.wire,  # type: ignore[arg-type]  # one of FORMATS
            rounding=terms.rounding, error_feedback=terms.error_feedback, feedback_decay=terms.feedback_decay,
        )  # fmt: skip
        self._encoders: dict[int, ContributionEncoder] = {}
        """Worker -> its encoder, in the order in which they were used last."""

    def fit(self, joined: Joined) -> bool:
        """Whether they are for this run and its terms. A machine that comes back to another run needs new ones."""
        return (joined.run, joined.terms) == (self._run, self._terms)

    def encode(self, key: RoundKey, tensors: Mapping[str, Tensor], *, last_accepted: int) -> dict[str, Tensor]:
        """The tensors of a contribution as they travel. `last_accepted`: the worker's last accepted round if it was done here."""
        encoder = self._encoders.pop(key.worker, None) or ContributionEncoder(
            self._format, self._options, seed=self._terms.seed, worker=key.worker
        )
        self._encoders[key.worker] = encoder
        if len(self._encoders) > RESIDUALS_KEPT:
            del self._encoders[next(iter(self._encoders))]
        pseudo_gradient = blocks.blocks_of(blocks.PSEUDO_GRADIENT, tensors)
        codes = encoder.encode(key.round, pseudo_gradient, last_accepted=last_accepted)
        return codes | {name: tensor for name, tensor in tensors.items() if blocks.is_of_kind(blocks.BUFFER, name)}

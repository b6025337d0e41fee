"""A task that is not language: small images of shapes, drawn by code in several styles, one style a shard.

The classes are the same everywhere and the styles differ (non-IID inputs). The network has BatchNorm, so that buffers matter.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from heloco.corpus.sharding import EpochOrder
from heloco.seeds import derive
from heloco.task.base import Positions, Scores, ShardInfo

SIZE = 16
CLASSES = ("disc", "ring", "square", "frame", "cross", "triangle")
STYLES = ("plain", "inverted", "noisy", "striped", "blurred")

Images = npt.NDArray[np.float32]


def _shapes(labels: npt.NDArray[np.int64], draw: np.random.Generator) -> Images:
    """Soft-edged shapes at random places and sizes, values in 0…1."""
    n = len(labels)
    x, y = np.meshgrid(np.arange(SIZE), np.arange(SIZE))
    centre = draw.uniform(6, 9, size=(2, n, 1, 1))
    radius = draw.uniform(3, 5.5, size=(n, 1, 1))
    dx, dy = x - centre[0], y - centre[1]
    round_, square = np.hypot(dx, dy), np.maximum(abs(dx), abs(dy))
    inside = [
        radius - round_,
        1.2 - abs(round_ - radius),
        0.85 * radius - square,
        1.1 - abs(square - 0.85 * radius),
        np.minimum(1.3 - np.minimum(abs(dx), abs(dy)), radius - square),
        np.minimum(0.6 * radius - dy, radius + dy - 1.6 * abs(dx)),
    ]
    signed = np.choose(labels[:, None, None], inside)
    return np.clip(signed + 0.5, 0, 1).astype(np.float32)


def _render(style: str, shapes: Images, draw: np.random.Generator) -> Images:
    noise = draw.normal(0, 0.1, shapes.shape)
    if style == "inverted":
        image = 1 - shapes + noise
    elif style == "noisy":
        image = shapes + 4 * noise
    elif style == "striped":
        image = shapes + 0.5 * np.sin(np.arange(SIZE) * 1.6)[:, None] + noise
    elif style == "blurred":
        image = sum(np.roll(shapes, (i, j), (1, 2)) for i in (-1, 0, 1) for j in (-1, 0, 1)) / 9 + noise
    else:
        image = shapes + noise
    return image.astype(np.float32)


class ShapesNet(nn.Sequential):
    """A small convolutional network with BatchNorm."""

    def __init__(self, width: int = 16) -> None:
        super().__init__(
            nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(2 * width * (SIZE // 4) ** 2, len(CLASSES)),
        )  # fmt: skip


class ImagesTask:
    """Classifies shapes. Each shard holds images of one style, drawn from the seed."""

    unit = "images"

    def __init__(self, *, seed: int, images: int = 2000, val_images: int = 400) -> None:
        self.seed = seed
        self.shards = tuple(ShardInfo(style, images) for style in STYLES)
        self.digest = f"images-{derive(seed, 'images'):016x}-{images}-{val_images}"
        self._orders = [EpochOrder(images, seed, i) for i in range(len(STYLES))]
        self._train = [self._draw(style, "train", images) for style in STYLES]
        self.validation = [self._draw(style, "val", val_images) for style in STYLES]

    def _draw(self, style: str, split: str, count: int) -> tuple[Tensor, Tensor]:
        draw = np.random.default_rng(derive(self.seed, "images", style, split))
        labels = draw.integers(len(CLASSES), size=count)
        images = _render(style, _shapes(labels, draw), draw)
        return torch.from_numpy(images).unsqueeze(1), torch.from_numpy(labels)

    def build_model(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(derive(self.seed, "model"))
            return ShapesNet()

    def batch(self, shard: int, positions: Positions) -> tuple[Tensor, Tensor]:
        indices = torch.from_numpy(self._orders[shard].locate(positions))
        images, labels = self._train[shard]
        return images[indices], labels[indices]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def units(self, batch: tuple[Tensor, Tensor]) -> int:
        return len(batch[1])

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> Scores:
        device = next(model.parameters()).device
        training = model.training
        model.eval()
        scores: Scores = {}
        for style, (images, labels) in zip(STYLES, self.validation, strict=True):
            logits, labels = model(images.to(device)), labels.to(device)
            accuracy = (logits.argmax(1) == labels).float().mean()
            scores[style] = {"loss": float(F.cross_entropy(logits, labels)), "accuracy": float(accuracy)}
        model.train(training)
        return scores

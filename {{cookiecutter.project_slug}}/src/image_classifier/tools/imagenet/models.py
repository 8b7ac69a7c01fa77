"""A plain vision transformer that learns well from ImageNet alone.

https://arxiv.org/abs/2205.01580: fixed positions, the mean over all patches in place of a class
token, a linear head, no dropout. The original is in https://github.com/google-research/big_vision.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from ...config import ModelConfig
from ...errors import UserError

PATCH = 16  # side of a patch, in pixels
WIDTH, DEPTH, HEADS, MLP_RATIO = 384, 12, 6, 4  # ViT-S
LONGEST_WAVE = 10_000  # of the positions, in patches over 2 pi
EPS = 1e-6  # of norms, as in the original


class ViT(nn.Module):
    """Patch embedding, transformer blocks, global average pooling and a linear head."""

    def __init__(
        self, num_classes: int, image_size: int, channels: int, drop_path: float = 0.0
    ) -> None:
        """For images of `image_size`; at other sizes the positions are interpolated.

        In training the share `drop_path` of the images skips the branches of the last block.
        """
        super().__init__()
        self.side = image_size // PATCH  # in patches
        self.patches = nn.Conv2d(channels, WIDTH, PATCH, stride=PATCH)
        self.register_buffer("positions", positions(self.side, self.side), persistent=False)
        rates = (drop_path * number / (DEPTH - 1) for number in range(DEPTH))
        self.blocks = nn.Sequential(*map(TransformerBlock, rates))
        self.norm = nn.LayerNorm(WIDTH, eps=EPS)
        self.head = nn.Linear(WIDTH, num_classes)
        # LeCun's initialization: embeddings have the variance of a pixel.
        nn.init.normal_(self.patches.weight, std=(channels * PATCH**2) ** -0.5)
        nn.init.zeros_(self.patches.bias)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, channels, side, side) -> (batch, num_classes).

        Sides are multiples of `PATCH`.
        """
        side = images.shape[2] // PATCH
        places = self.positions
        if side * PATCH != images.shape[2]:
            raise UserError(f"vit_s takes images of multiples of {PATCH}, not {images.shape[2]}")
        if side != self.side:
            places = positions(side, self.side, places.device)
        tokens = self.patches(images).flatten(2).mT + places  # (batch, patches, WIDTH)
        return self.head(self.norm(self.blocks(tokens)).mean(1))


class TransformerBlock(nn.Module):
    """Attention and an MLP, each a residual branch with a LayerNorm first."""

    def __init__(self, drop_path: float) -> None:
        from torchvision.ops import StochasticDepth

        super().__init__()
        self.drop_path = StochasticDepth(drop_path, "row")
        self.attention = Attention()
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH, eps=EPS),
            nn.Linear(WIDTH, MLP_RATIO * WIDTH),
            nn.GELU("tanh"),
            nn.Linear(MLP_RATIO * WIDTH, WIDTH),
        )
        for layer in (self.mlp[1], self.mlp[3]):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.normal_(layer.bias, std=1e-6)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, patches, WIDTH), in and out."""
        tokens = tokens + self.drop_path(self.attention(tokens))
        return tokens + self.drop_path(self.mlp(tokens))


class Attention(nn.Module):
    """Multi-head self-attention with a LayerNorm first."""

    def __init__(self) -> None:
        """`HEADS` heads, in one fused kernel where the device has one."""
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, eps=EPS)
        self.queries_keys_values = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        # Three matrices in one tensor: each is initialized by itself.
        for weight in (*self.queries_keys_values.weight.chunk(3), self.out.weight):
            nn.init.xavier_uniform_(weight)
        for layer in (self.queries_keys_values, self.out):
            nn.init.zeros_(layer.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, patches, WIDTH), in and out."""
        # (3, batch, heads, patches, WIDTH / HEADS)
        parts = self.queries_keys_values(self.norm(tokens)).unflatten(2, (3, HEADS, -1))
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(queries, keys, values)
        return self.out(mixed.transpose(1, 2).flatten(2))


def positions(side: int, trained_side: int, device: torch.device | str | None = None) -> Tensor:
    """2-D sine-cosine position embeddings: (side x side, WIDTH) float32.

    Coordinates are those of an image that is `trained_side` patches wide, whatever `side` is.
    """
    waves = LONGEST_WAVE ** -torch.linspace(0, 1, WIDTH // 4, device=device)
    # The center of a patch has the same coordinates, however many patches there are.
    centers = (torch.arange(side, device=device) + 0.5) * (trained_side / side) - 0.5
    y, x = torch.meshgrid(centers, centers, indexing="ij")
    angles = [axis.flatten()[:, None] * waves for axis in (x, y)]
    return torch.cat([wave for angle in angles for wave in (angle.sin(), angle.cos())], dim=1)


def vit_s(model: ModelConfig, num_classes: int, image_size: int, channels: int) -> nn.Module:
    """ViT-S/16: 22 million weights.

    Raises:
        UserError: if the images can't be cut into patches.
    """
    if image_size % PATCH:
        raise UserError(f"vit_s takes a --data.image-size in steps of {PATCH}, not {image_size}")
    return ViT(num_classes, image_size, channels, model.drop_path)


MODELS = {"vit_s": vit_s}

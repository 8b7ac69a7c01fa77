"""How `prepare` writes images."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """How images are prepared."""

    format: str = "raw"  # raw, jpeg, or tar: as they are
    side: int = 256  # of the shorter side in pixels, where an image is not smaller
    quality: int = 85  # of jpeg, from 1 to 100
    channels: int = 3
    bits: int = 8  # of each number

    def __str__(self) -> str:
        """The recipe in words."""
        form = "raw" if self.format == "raw" else f"JPEG of quality {self.quality}"
        kind = (self.channels, self.bits)
        kind = "" if kind == (3, 8) else f" of {self.channels} channels of {self.bits} bits"
        return f"{form}{kind}, shorter side {self.side}"

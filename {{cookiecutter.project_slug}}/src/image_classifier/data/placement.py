"""Where images are kept, and how far ahead they are decoded: as asked for, or as memory allows."""

from ..config import AugmentConfig, DataConfig, UserError
from ..runtime.distributed import World
from ..runtime.machine import device_memory_bytes, host_memory_bytes
from .datasets.source import Source
from .decode import image_size
from .stream import num_slots, ring_bytes

MEMORY_SHARE = 0.4  # of the free memory that resident images may take


def choose_where(
    data: DataConfig, augment: AugmentConfig, source: Source, side: int | None, world: World
) -> tuple[str, str]:
    """Where the training images live (device, host or stream), and why."""
    if data.where != "auto":
        return data.where, "as --data.where says"
    if augment.policy != "none":
        return "stream", f"{augment.policy} works on single images"
    # Never by memory where it would change the pixels: the device cuts crops otherwise.
    if augment.crop == "resized" or side is None:
        return "stream", "crops are cut from the whole image"
    needed = len(source) * side**2 * 3
    megabytes = f"{len(source):,} images of {side} x {side} take {needed / 2**20:,.0f} MB"
    if world.all_true(fits_device(needed, world)):
        return "device", megabytes
    if world.all_true(needed < MEMORY_SHARE * host_memory_bytes() / world.local_size):
        return "host", f"{megabytes}, too much for the device"
    return "stream", f"{megabytes}, too much for memory"


def fits_device(needed_bytes: int, world: World) -> bool:
    """Whether so much may be resident; processes share the memory of a CPU, not that of a GPU."""
    sharers = world.local_size if world.device.type == "cpu" else 1
    return needed_bytes < MEMORY_SHARE * device_memory_bytes(world.device) / sharers


def choose_depth(data: DataConfig, workers: int, world: World) -> tuple[int, str]:
    """Batches to decode ahead: as many as are asked for and memory holds; and why, if fewer.

    Training and evaluation each have a ring of their own.

    Raises:
        UserError: if there is no memory for a single one.
    """
    share = max(1, data.batch_size // world.size)

    def needed(depth: int) -> int:
        slots = num_slots(workers, depth)
        sizes = data.image_size, data.eval_size
        return world.local_size * sum(ring_bytes(share, size, slots) for size in sizes)

    free, depth = host_memory_bytes(), data.prefetch_batches
    while depth > 1 and needed(depth) > MEMORY_SHARE * free:
        depth -= 1
    if needed(depth) > free:
        raise UserError(
            f"batches of {data.batch_size} images of {data.image_size} x {data.image_size} need "
            f"{needed(depth) / 2**20:,.0f} MB of memory, {free / 2**20:,.0f} MB are free: "
            "lower --data.batch-size or --data.image-size"
        )
    if depth == data.prefetch_batches:
        return depth, ""
    wanted = f"{needed(data.prefetch_batches) / 2**20:,.0f} MB for {data.prefetch_batches}"
    batches = "1 batch" if depth == 1 else f"{depth} batches"
    return depth, f"; {batches} ahead: {wanted} are too many of {free / 2**20:,.0f} MB"


def common_side(source: Source, probes: int = 256) -> int | None:
    """The side in pixels if all images seem to be squares of one size, else None."""
    if source.pixels is not None:
        height, width = source.pixels.shape[1:3]
        return height if height == width else None
    if source.prepared is not None:
        height, width = source.prepared.sizes[0].tolist()
        return height if (source.prepared.sizes == height).all() else None
    assert source.paths is not None
    count = len(source)
    picked = {count * probe // probes for probe in range(probes)}
    sizes = {image_size(source.paths[index]) for index in sorted(picked)} - {None}
    if len(sizes) != 1:
        return None
    height, width = sizes.pop()  # type: ignore[misc]
    return height if height == width else None


def check_batch_size(batch_size: int, count: int, processes: int, accumulate: int) -> None:
    """Refuse a batch that `count` images don't fill or that can't be divided equally."""
    if batch_size > count:
        raise UserError(
            f"--data.batch-size {batch_size} is more than there are training images: {count}"
        )
    parts = processes * accumulate
    if batch_size % parts:
        below = batch_size // parts * parts
        near = " or ".join(str(size) for size in (below, below + parts) if size)
        raise UserError(
            f"--data.batch-size {batch_size} can't be divided into {parts} equal parts "
            f"({processes} processes x --optim.accumulate {accumulate}); take {near}"
        )

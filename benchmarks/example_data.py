"""Small random data sets in the formats, and at the places, where Lightning's example scripts look for theirs."""

import importlib
import io
import pickle
import random
import shutil
import struct
import zipfile
from pathlib import Path
from typing import Any

_SEED = 5
_MNIST = (("train", 60000), ("t10k", 10000))
_NUM_CIFAR = 40
_NUM_WORDS, _NUM_LINES, _WORDS_PER_LINE = 1500, 9000, 25


def make_data(root: Path) -> None:
    """Write everything below `root`, once: `Datasets`, `data` and `torch` (TORCH_HOME)."""
    if (root / "complete").exists():
        return
    shutil.rmtree(root, ignore_errors=True)
    for name in ("Datasets", "data"):
        _mnist(root / name / "MNIST" / "raw")
    _cifar(root / "Datasets" / "cifar-10-batches-py")
    _text(root / "data" / "wikitext-2.txt")
    _images(root / "data")
    _weights(root / "torch" / "hub" / "checkpoints")
    (root / "complete").touch()


def _mnist(directory: Path) -> None:
    directory.mkdir(parents=True)
    draw = random.Random(_SEED)
    for part, number in _MNIST:
        pixels, labels = draw.randbytes(number * 28 * 28), bytes(draw.choices(range(10), k=number))
        head = struct.pack(">4i", 0x803, number, 28, 28)
        (directory / f"{part}-images-idx3-ubyte").write_bytes(head + pixels)
        (directory / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 0x801, number) + labels)


def _cifar(directory: Path) -> None:
    """CIFAR-10; torchvision fetches the real one instead where it knows the checksums of its files."""
    import numpy as np

    directory.mkdir(parents=True)
    draw = random.Random(_SEED)
    for part in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        pixels = np.frombuffer(draw.randbytes(_NUM_CIFAR * 3072), np.uint8).reshape(_NUM_CIFAR, 3072)
        content = {"data": pixels, "labels": draw.choices(range(10), k=_NUM_CIFAR)}
        (directory / part).write_bytes(pickle.dumps(content))
    (directory / "batches.meta").write_bytes(pickle.dumps({"label_names": [str(i) for i in range(10)]}))


def _text(path: Path) -> None:
    draw = random.Random(_SEED)
    words = [f"w{i}" for i in range(_NUM_WORDS)]
    path.write_text("".join(" ".join(draw.choices(words, k=_WORDS_PER_LINE)) + "\n" for _ in range(_NUM_LINES)))


def _image(draw: random.Random, side: int) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.frombytes("RGB", (side, side), draw.randbytes(3 * side * side)).save(file, "PNG")
    return file.getvalue()


def _images(data: Path) -> None:
    """The archive of computer_vision_fine_tuning.py, and folders for imagenet.py."""
    draw = random.Random(_SEED)
    with zipfile.ZipFile(data / "cats_and_dogs_filtered.zip", "w") as archive:
        for part, number in (("train", 10), ("validation", 4)):
            for kind in ("cats", "dogs"):
                for i in range(number):
                    archive.writestr(f"cats_and_dogs_filtered/{part}/{kind}/{i}.png", _image(draw, 64))
    for part, number in (("train", 16), ("val", 6)):
        for kind in ("n01", "n02", "n03"):
            directory = data / "imagenet" / part / kind
            directory.mkdir(parents=True)
            for i in range(number):
                (directory / f"{i}.png").write_bytes(_image(draw, 64))


def _weights(directory: Path) -> None:
    """Random weights under the names of the pretrained ones: a file that is there is loaded, not fetched."""
    import torch

    models: Any = importlib.import_module("torchvision.models")
    directory.mkdir(parents=True)
    torch.manual_seed(_SEED)
    networks: list[tuple[Any, Any]] = [
        (models.resnet18, models.ResNet18_Weights.DEFAULT),
        (models.resnet50, models.ResNet50_Weights.DEFAULT),
    ]
    for network, weights in networks:
        torch.save(network().state_dict(), directory / Path(weights.url).name)

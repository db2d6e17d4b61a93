"""The demo's network: two convolutions and two linear layers, about 105,000 parameters."""

from __future__ import annotations

import torch
from torch import nn


def digit_network(seed: int) -> nn.Module:
    """(N, 1, 28, 28) float32 to (N, 10) logits; the same initial parameters for the same ``seed``."""
    torch.manual_seed(seed)
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 5 * 5, 128), nn.ReLU(), nn.Linear(128, 10)),
    )

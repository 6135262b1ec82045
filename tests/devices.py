"""Where tests of GPU kernels run: on the CUDA device, or in Triton's interpreter without one."""

from __future__ import annotations

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

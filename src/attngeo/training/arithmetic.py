"""How the numbers of a run are computed: device, precision of the forward pass, layout of images in memory."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from attngeo.errors import UserError

Autocast = Literal["none", "bfloat16", "float16"]

# Half precision with 5 bits of exponent needs a scaled loss, which is meant for GPUs; CPUs have bfloat16.
FLOAT16_DEVICES = ("cuda",)


@dataclass(frozen=True)
class Arithmetic:
    """Settings of a run; UserError for float16 where it is not meant to run.

    Autocast lowers matrix products and convolutions of the model; weights, optimizer, kernels and solvers stay float32.
    """

    device: str = "cpu"
    autocast: Autocast = "none"
    channels_last: bool = False

    def __post_init__(self) -> None:
        """Refuse what the device should not do."""
        if self.autocast == "float16" and self.device_type not in FLOAT16_DEVICES:
            raise UserError(
                f"autocast float16 needs a GPU, and the run is on {self.device}",
                "set autocast: bfloat16 or none in the recipe, or resources.train.device: cuda in config.yaml",
            )

    @property
    def device_type(self) -> str:
        """cpu or cuda."""
        return torch.device(self.device).type

    def place_model(self, model: nn.Module) -> nn.Module:
        """Move the model, in place, to the device and layout."""
        return model.to(self.device).to(memory_format=self._layout)

    def place(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """A batch on the device, images in the layout."""
        on_gpu = self.device_type == "cuda"
        images = images.to(self.device, memory_format=self._layout, non_blocking=on_gpu)
        return images, labels.to(self.device, non_blocking=on_gpu)

    def forward(self, model: nn.Module, images: Tensor) -> Tensor:
        """Logits [B, classes] in float32, computed in the precision of the run."""
        dtype = torch.float16 if self.autocast == "float16" else torch.bfloat16
        with torch.autocast(self.device_type, dtype, enabled=self.autocast != "none"):
            logits: Tensor = model(images)
        return logits.float()

    def loss_scaler(self) -> "torch.amp.GradScaler":
        """Scales the loss so that small gradients survive float16; for other precisions it does nothing."""
        return torch.amp.GradScaler(self.device_type, enabled=self.autocast == "float16")

    def describe(self) -> dict[str, Any]:
        """For the record of a run."""
        return {"autocast": self.autocast, "channels_last": self.channels_last}

    @property
    def _layout(self) -> torch.memory_format:
        # preserve_format would keep a loader's strides; what follows is the same whatever the loader hands out.
        return torch.channels_last if self.channels_last else torch.contiguous_format

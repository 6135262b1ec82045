"""A stack of fully connected layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from hotbed.errors import TableError
from hotbed.nn.widths import check_counts, check_layers
from hotbed.ops.autocast import autocast_dtype
from hotbed.ops.mlp import has_kernels, relu_layers

__all__ = ["MLP"]

# ReLU works in place: a layer's output before it is needed by nobody, and a fresh output of a
# large batch costs more in page faults than the comparison.
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu_,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "gelu": nn.functional.gelu,
    "silu": nn.functional.silu,
    "leaky_relu": nn.functional.leaky_relu,
}


class MLP(nn.Module):
    """Linear layers with an activation between them: (…, in_features) → (…, layers[-1]).

    On a CUDA device kernels do the layers that ReLU follows, in float32, float16 or bfloat16. Bias,
    ReLU and dropout are then part of the product, and the backward reads one bit an element of
    them; its gradient cannot be differentiated again. Hooks on layers, and layers of other classes,
    keep the MLP to torch's operations.

    Args:
        in_features: columns of the input.
        layers: the width of every layer, the last one being the output's.
        activation: follows every layer but the last: "relu", "sigmoid", "tanh", "gelu", "silu",
            "leaky_relu", any function of a tensor (a module is registered), or None.
        final_activation: follows the last layer; as ``activation``.
        dropout: the share of values set to zero after each inner activation while training.
        bias: whether layers add a bias.

    Raises:
        TableError: a width is not positive, the dropout is outside [0, 1), or the name of an
            activation is unknown.
    """

    def __init__(
        self,
        in_features: int,
        layers: Sequence[int] = (512, 256, 1),
        activation: str | Callable[[Tensor], Tensor] | None = "relu",
        final_activation: str | Callable[[Tensor], Tensor] | None = None,
        dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        super().__init__()
        check_counts("MLP", in_features=in_features)
        check_layers("MLP", layers)
        if not 0 <= dropout < 1:
            raise TableError(f"MLP: dropout is {dropout}. Pass a share in [0, 1).")
        self._widths = widths = (in_features, *layers)
        self.layers = nn.ModuleList(
            nn.Linear(width, following, bias=bias)
            for width, following in zip(widths[:-1], widths[1:], strict=True)
        )
        self.dropout = dropout
        self.activation = _activation(activation)
        self.final_activation = _activation(final_activation)

    @property
    def in_features(self) -> int:
        """Columns of the input."""
        return self._widths[0]

    @property
    def out_features(self) -> int:
        """Columns of the output."""
        return self._widths[-1]

    def forward(self, x: Tensor) -> Tensor:
        """Maps (…, in_features) to (…, out_features)."""
        last = len(self.layers) - 1
        done = self._layers_of_kernels(x)
        if done:
            x = self._by_kernels(x, done)
        for position, layer in enumerate(self.layers[done:], done):
            x = layer(x)
            function = self.final_activation if position == last else self.activation
            if function is not None:
                x = function(x)
            if self.dropout and position < last:
                x = nn.functional.dropout(x, self.dropout, self.training)
        return x

    def _layers_of_kernels(self, x: Tensor) -> int:
        """How many layers, from the first, kernels can do on `x`."""
        if self.activation is not torch.relu_ or x.dim() == 0 or x.shape[-1] != self.in_features:
            return 0
        count = len(self.layers) - (self.final_activation is not torch.relu_)
        layers = [layer for layer in self.layers[:count] if type(layer) is nn.Linear]
        if len(layers) < count or any(x._forward_hooks or x._forward_pre_hooks for x in layers):
            return 0
        weights = [layer.weight for layer in layers]
        if torch.is_autocast_enabled(x.device.type):
            fits = has_kernels(x, [x]) and all(has_kernels(w, [w]) for w in weights)
        else:
            fits = has_kernels(x, weights)
        return count if fits else 0

    def _by_kernels(self, x: Tensor, count: int) -> Tensor:
        dtype = autocast_dtype(x, x.dtype)
        weights, biases = [], []
        for layer in self.layers[:count]:
            assert isinstance(layer, nn.Linear)
            weights.append(layer.weight.to(dtype))
            bias = layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias
            biases.append(bias.to(dtype))
        dropped = min(count, len(self.layers) - 1) if self.training else 0
        rows = x.to(dtype).reshape(-1, self.in_features)
        with torch.autocast(x.device.type, enabled=False):
            out = relu_layers(rows, weights, biases, self.dropout, dropped)
        return out.reshape(*x.shape[:-1], out.shape[-1])


def _activation(
    chosen: str | Callable[[Tensor], Tensor] | None,
) -> Callable[[Tensor], Tensor] | None:
    if not isinstance(chosen, str):
        return chosen
    if chosen not in _ACTIVATIONS:
        raise TableError(
            f"MLP: activation {chosen!r} is unknown. Pass one of {', '.join(_ACTIVATIONS)}, "
            "a function or None."
        )
    return _ACTIVATIONS[chosen]

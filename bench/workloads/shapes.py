"""Layer shapes and floating point operations of known architectures, computed, not recorded.

A layer here is what has one weight matrix: the norm and bias beside it count as its parameters.
Layers are in forward order. Operations are those of one forward pass on one sample (a
multiply-add counts as two); their unit does not matter, only their ratio does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

__all__ = ["ARCHITECTURES", "Architecture", "Layer"]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layer:
    """One layer.

    Attributes:
        name: its name, a Python identifier.
        shapes: shapes of its parameters by name.
        flops: operations of its forward; the backward has twice as many.
    """

    name: str
    shapes: dict[str, Shape]
    flops: float


@dataclass(frozen=True)
class Architecture:
    """A model as a list of layers.

    Attributes:
        name: its name.
        layers: its layers, made when needed.
        default_mb: gradient to emulate by default, in MB (1e6 bytes, fp32); None: the true size.
    """

    name: str
    layers: Callable[[], list[Layer]]
    default_mb: float | None

    def true_mb(self) -> float:
        """Size of the real model's gradient in MB (1e6 bytes, fp32)."""
        return sum(4e-6 * prod(s) for layer in self.layers() for s in layer.shapes.values())


def _conv(name: str, c_in: int, c_out: int, kernel: int, side: int, norm: bool) -> Layer:
    """A convolution with output `side` x `side`; batch norm's affine or a bias beside it."""
    shapes: dict[str, Shape] = {"weight": (c_out, c_in, kernel, kernel)}
    shapes |= {"norm_weight": (c_out,), "norm_bias": (c_out,)} if norm else {"bias": (c_out,)}
    return Layer(name, shapes, 2.0 * c_in * c_out * kernel**2 * side**2)


def _linear(
    name: str, n_in: int, n_out: int, rows: int = 1, norm: int = 0, extra_flops: float = 0.0
) -> Layer:
    """A linear layer applied to `rows` vectors; with `norm` the layer norm of that width."""
    shapes: dict[str, Shape] = {"norm_weight": (norm,), "norm_bias": (norm,)} if norm else {}
    shapes |= {"weight": (n_out, n_in), "bias": (n_out,)}
    return Layer(name, shapes, 2.0 * n_in * n_out * rows + extra_flops)


def resnet50() -> list[Layer]:
    """ResNet-50 (He et al. 2015, v1.5: the 3x3 convolution has the stride), 224 x 224."""
    layers = [_conv("conv1", 3, 64, 7, 112, norm=True)]
    c_in, side = 64, 56
    for stage, (width, blocks) in enumerate([(64, 3), (128, 4), (256, 6), (512, 3)], start=1):
        for block in range(blocks):
            stride = 2 if stage > 1 and block == 0 else 1
            name, out = f"stage{stage}_{block}", side // stride
            layers += [
                _conv(f"{name}_conv1", c_in, width, 1, side, norm=True),
                _conv(f"{name}_conv2", width, width, 3, out, norm=True),
                _conv(f"{name}_conv3", width, 4 * width, 1, out, norm=True),
            ]
            if block == 0:
                layers.append(_conv(f"{name}_down", c_in, 4 * width, 1, out, norm=True))
            c_in, side = 4 * width, out
    return [*layers, _linear("fc", 2048, 1000)]


def vgg16() -> list[Layer]:
    """VGG-16 (Simonyan and Zisserman 2014, configuration D), 224 x 224."""
    layers: list[Layer] = []
    c_in, side = 3, 224
    for stage, (width, count) in enumerate([(64, 2), (128, 2), (256, 3), (512, 3), (512, 3)]):
        for index in range(count):
            layers.append(_conv(f"conv{stage}_{index}", c_in, width, 3, side, norm=False))
            c_in = width
        side //= 2
    sizes = [(512 * 7 * 7, 4096), (4096, 4096), (4096, 1000)]
    return [*layers, *(_linear(f"fc{i}", a, b) for i, (a, b) in enumerate(sizes))]


def _block(name: str, width: int, tokens: int) -> list[Layer]:
    """One transformer block; the operations of attention itself go to its output projection."""
    attention = 4.0 * tokens**2 * width
    return [
        _linear(f"{name}_qkv", width, 3 * width, tokens, norm=width),
        _linear(f"{name}_proj", width, width, tokens, extra_flops=attention),
        _linear(f"{name}_fc1", width, 4 * width, tokens, norm=width),
        _linear(f"{name}_fc2", 4 * width, width, tokens),
    ]


def bert_base() -> list[Layer]:
    """BERT-base (Devlin et al. 2018) with pooler, 128 tokens."""
    width, tokens = 768, 128
    embeddings: dict[str, Shape] = {
        "word": (30522, width),
        "position": (512, width),
        "segment": (2, width),
        "norm_weight": (width,),
        "norm_bias": (width,),
    }
    layers = [Layer("embeddings", embeddings, 10.0 * tokens * width)]
    for index in range(12):
        layers += _block(f"block{index}", width, tokens)
    return [*layers, _linear("pooler", width, width)]


def gpt2() -> list[Layer]:
    """GPT-2 small (Radford et al. 2019), 1024 tokens.

    The token embedding is the output matrix too: it computes last in forward, yet its gradient
    is complete only at the end of backward, and the next forward needs it first. So its
    parameters are in the first layer and its operations in the last one.
    """
    width, tokens, words = 768, 1024, 50257
    embeddings: dict[str, Shape] = {"token": (words, width), "position": (tokens, width)}
    layers = [Layer("embeddings", embeddings, 2.0 * tokens * width)]
    for index in range(12):
        layers += _block(f"block{index}", width, tokens)
    norm: dict[str, Shape] = {"norm_weight": (width,), "norm_bias": (width,)}
    return [*layers, Layer("head", norm, 2.0 * width * words * tokens)]


ARCHITECTURES: dict[str, Architecture] = {
    "resnet50": Architecture("resnet50", resnet50, None),
    "vgg16": Architecture("vgg16", vgg16, 128.0),
    "bert": Architecture("bert", bert_base, 110.0),
    "gpt2": Architecture("gpt2", gpt2, 124.0),
}

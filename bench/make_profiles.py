"""Makes the profiles in commsched/profiles/: true layer sizes, compute times from public figures.

    python bench/make_profiles.py            writes all of them
    python bench/make_profiles.py --check    exit 1 where a file is not what would be written

A model's parameters have the names, shapes and order of the library named in its source text. Its
step time is a public figure. How a step divides is computed:

* The optimizer takes what its traffic to memory takes: bytes an element (SGD with momentum reads
  weight, gradient and momentum and writes two of them: 20; Adam with weight decay: 28) over the
  memory bandwidth of the GPU's data sheet.
* Of the rest, forward gets one third and backward two: for each product of forward, backward
  computes two of the same size, the gradients of its input and of its weight.
* Layers share both in proportion to floating point operations, counted from the shapes. Norms,
  activations and lookups, which are bound by memory, are not counted: they are taken to be spread
  as the products are.

Gradients become ready layer by layer in backward, the last layer first. Buckets are torch's own
(`_compute_bucket_assignment_by_size`) for DDP's defaults: 1 MiB for the first, 25 MiB for others.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

if __name__ == "__main__":  # run as a file: make the repository root importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

from commsched.layout import BucketSpec, Layout, ParamSpec
from commsched.profile import Link, ParamTimes, Profile

__all__ = ["MODELS", "Layer", "Model", "built", "profile_of", "text_of"]

FOLDER = Path(__file__).resolve().parents[1] / "commsched" / "profiles"
CAPS_BYTES = [2**20, 25 * 2**20]  # of DDP's first bucket, and of the others
DIGITS = 9  # of a time in seconds

# 16 machines on 10 Gbit/s Ethernet. Latency of one all-reduce as fitted by the authors of MG-WFBP:
# github.com/HKBU-HPML/MG-WFBP, distributed_optimizer.py, table for 10 Gbit/s, 16 workers.
WORLD_SIZE = 16
LINK = Link(alpha_s=908.1e-6, beta_s=8e-10)
LINK_TEXT = (
    "Link: 16 ranks at 10 Gbit/s; 908 us a collective, as MG-WFBP's authors fitted for 16 workers "
    "on 10 Gbit/s Ethernet (github.com/HKBU-HPML/MG-WFBP, distributed_optimizer.py)."
)

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layer:
    """What computes at once: its parameters by full name, and its forward's operations a sample."""

    shapes: dict[str, Shape]
    flops: float


@dataclass(frozen=True)
class Model:
    """A model with its public figure.

    Attributes:
        layers: in forward order.
        step_s: seconds of one whole step on one GPU.
        memory_gbs: of the GPU's data sheet, 1e9 bytes a second.
        optimizer_bytes: bytes to and from memory for one element's update.
        source: where all that comes from.
    """

    layers: Callable[[], Iterator[Layer]]
    step_s: float
    memory_gbs: float
    optimizer_bytes: int
    source: str


def _conv_bn(conv: str, norm: str, shape: Shape, side: int) -> Layer:
    width = (shape[0],)
    shapes = {f"{conv}.weight": shape, f"{norm}.weight": width, f"{norm}.bias": width}
    return Layer(shapes, 2.0 * prod(shape) * side**2)


def _dense(name: str, shape: Shape, outputs: int, rows: int, extra: float = 0.0) -> Layer:
    """A matrix with a bias, applied to `rows` vectors."""
    shapes = {f"{name}.weight": shape, f"{name}.bias": (outputs,)}
    return Layer(shapes, 2.0 * prod(shape) * rows + extra)


def _norm(name: str, width: int) -> Layer:
    return Layer({f"{name}.weight": (width,), f"{name}.bias": (width,)}, 0.0)


def resnet50() -> Iterator[Layer]:
    """torchvision.models.resnet50, 224 x 224."""
    yield _conv_bn("conv1", "bn1", (64, 3, 7, 7), 112)
    inputs, side = 64, 56
    for stage, (width, blocks) in enumerate([(64, 3), (128, 4), (256, 6), (512, 3)], start=1):
        for block in range(blocks):
            name = f"layer{stage}.{block}"
            out = side // 2 if stage > 1 and block == 0 else side
            yield _conv_bn(f"{name}.conv1", f"{name}.bn1", (width, inputs, 1, 1), side)
            yield _conv_bn(f"{name}.conv2", f"{name}.bn2", (width, width, 3, 3), out)
            yield _conv_bn(f"{name}.conv3", f"{name}.bn3", (4 * width, width, 1, 1), out)
            if block == 0:
                down = f"{name}.downsample"
                yield _conv_bn(f"{down}.0", f"{down}.1", (4 * width, inputs, 1, 1), out)
            inputs, side = 4 * width, out
    yield _dense("fc", (1000, 2048), 1000, 1)


def vgg16() -> Iterator[Layer]:
    """torchvision.models.vgg16 (no batch norm), 224 x 224."""
    inputs, side, place = 3, 224, 0
    for width, count in [(64, 2), (128, 2), (256, 3), (512, 3), (512, 3)]:
        for _ in range(count):
            yield _dense(f"features.{place}", (width, inputs, 3, 3), width, side**2)
            inputs, place = width, place + 2  # its ReLU has a place of its own
        side, place = side // 2, place + 1  # and so has the pooling
    for at, (outputs, columns) in enumerate([(4096, 25088), (4096, 4096), (1000, 4096)]):
        yield _dense(f"classifier.{3 * at}", (outputs, columns), outputs, 1)


def bert_base() -> Iterator[Layer]:
    """transformers.BertModel of bert-base-uncased, with its pooler; 128 tokens."""
    width, tokens = 768, 128
    tables = {"word": 30522, "position": 512, "token_type": 2}
    shapes = {f"embeddings.{name}_embeddings.weight": (n, width) for name, n in tables.items()}
    yield Layer(shapes, 0.0)
    yield _norm("embeddings.LayerNorm", width)
    for index in range(12):
        layer = f"encoder.layer.{index}"
        for name in ("query", "key", "value"):
            yield _dense(f"{layer}.attention.self.{name}", (width, width), width, tokens)
        attention = 4.0 * tokens**2 * width  # of queries with keys, and of weights with values
        out = f"{layer}.attention.output"
        yield _dense(f"{out}.dense", (width, width), width, tokens, attention)
        yield _norm(f"{out}.LayerNorm", width)
        yield _dense(f"{layer}.intermediate.dense", (4 * width, width), 4 * width, tokens)
        yield _dense(f"{layer}.output.dense", (width, 4 * width), width, tokens)
        yield _norm(f"{layer}.output.LayerNorm", width)
    yield _dense("pooler.dense", (width, width), width, 1)


def gpt2() -> Iterator[Layer]:
    """transformers.GPT2LMHeadModel of gpt2 (small), 1024 tokens.

    The output matrix is the token table: its operations come last in forward, but its gradient is
    complete only when backward is, and the next forward reads it first.
    """
    width, tokens, words = 768, 1024, 50257
    table = {"transformer.wte.weight": (words, width), "transformer.wpe.weight": (tokens, width)}
    yield Layer(table, 0.0)
    for index in range(12):
        block = f"transformer.h.{index}"
        yield _norm(f"{block}.ln_1", width)
        yield _dense(f"{block}.attn.c_attn", (width, 3 * width), 3 * width, tokens)
        attention = 4.0 * tokens**2 * width
        yield _dense(f"{block}.attn.c_proj", (width, width), width, tokens, attention)
        yield _norm(f"{block}.ln_2", width)
        yield _dense(f"{block}.mlp.c_fc", (width, 4 * width), 4 * width, tokens)
        yield _dense(f"{block}.mlp.c_proj", (4 * width, width), width, tokens)
    yield _norm("transformer.ln_f", width)
    yield Layer({}, 2.0 * width * words * tokens)


_SPLIT = (
    "Optimizer: its memory traffic at the data sheet's bandwidth. The rest is forward and backward "
    "as 1:2, and layers share it by their operations; see bench/make_profiles.py."
)

MODELS = {
    "resnet50": Model(
        resnet50,
        112 / 367,
        900,
        20,
        "ResNet-50, parameters of torchvision.models.resnet50 (25,557,032). Compute: 367 images/s, "
        "fp32, one V100 16 GB, batch 112: github.com/NVIDIA/DeepLearningExamples, "
        "PyTorch/Classification/ConvNets: resnet50v1.5/README.md (DGX-1 16GB, 1 GPU, FP32) and "
        "configs.yml (batch). SGD with momentum, 900 GB/s.",
    ),
    "vgg16": Model(
        vgg16,
        64 / 154,
        732,
        20,
        "VGG-16, parameters of torchvision.models.vgg16 (138,357,544). Compute: 154 images/s, "
        "fp32, one P100, batch 64, synthetic data: tensorflow.org/performance/benchmarks "
        "(github.com/tensorflow/docs, site/en/r1/guide/performance/benchmarks.md, DGX-1, 1 GPU). "
        "The figure is of plain SGD; SGD with momentum is counted, 732 GB/s.",
    ),
    "bert_base": Model(
        bert_base,
        64 / 147.71,
        900,
        28,
        "BERT-base, parameters of transformers.BertModel (bert-base-uncased with pooler, without "
        "heads: 109,482,240). Compute: 147.71 sentences/s, fp32, one V100 16 GB, batch 64, 128 "
        "tokens, fine-tuning on NER: github.com/NVIDIA/DeepLearningExamples, "
        "TensorFlow/LanguageModeling/BERT/biobert/README.md (DGX-1 16G, 1 GPU, FP32). Adam, "
        "900 GB/s.",
    ),
    "gpt2": Model(
        gpt2,
        0.562 / 5,
        1555,
        28,
        "GPT-2 small, parameters of transformers.GPT2LMHeadModel (124,439,808; the output matrix "
        "is the token table). Compute: 562 ms for 5 micro-batches of 12 x 1024 tokens on each of 8 "
        "A100 (40 GB assumed), bf16 or fp16 autocast with fp32 gradients, so 112 ms each: "
        "github.com/karpathy/nanoGPT/issues/110. The figure includes one all-reduce over NVLink "
        "for five micro-batches, so computing is a little less. Adam, 1555 GB/s.",
    ),
}


def profile_of(model: Model) -> Profile:
    """The profile of one model on `WORLD_SIZE` ranks, one GPU each."""
    layers = list(model.layers())
    numel = sum(prod(shape) for layer in layers for shape in layer.shapes.values())
    element_s = model.optimizer_bytes / (model.memory_gbs * 1e9)
    return built(layers, (model.step_s - numel * element_s) / 3, element_s, WORLD_SIZE, LINK)


def built(
    layers: list[Layer], forward_s: float, element_s: float, world_size: int, link: Link
) -> Profile:
    """A profile with DDP's default buckets.

    Args:
        layers: in forward order.
        forward_s: of all of them; backward takes twice as long.
        element_s: the optimizer's time for one element.
        world_size: how many ranks.
        link: theirs.
    """
    specs, times = _params(layers, forward_s, element_s)
    by_name = {param.name: param for param in times}
    buckets, ready_s = [], []
    for bucket in _buckets(specs):
        buckets.append(BucketSpec(tuple(bucket), "float32"))
        own_s = max(by_name[param.name].ready_s for param in bucket)
        ready_s.append(max([own_s, *ready_s[-1:]]))
    params = tuple(by_name[param.name] for bucket in buckets for param in bucket.params)
    return Profile(
        layout=Layout(tuple(buckets)),
        world_size=world_size,
        ready_s=tuple(ready_s),
        params=params,
        forward_s=round(forward_s, DIGITS),
        backward_s=round(2 * forward_s, DIGITS),
        other_s=0.0,
        link=link,
    )


def _params(
    layers: list[Layer], forward_s: float, element_s: float
) -> tuple[list[ParamSpec], list[ParamTimes]]:
    """All parameters in the order in which their gradients become ready."""
    total = sum(layer.flops for layer in layers)
    specs, times = [], []
    left = total
    for layer in reversed(layers):
        left -= layer.flops
        begin_s = max(0.0, left / total) * forward_s
        for name, shape in reversed(layer.shapes.items()):
            ready_s = 2 * (forward_s - begin_s)
            own_s = prod(shape) * element_s
            specs.append(ParamSpec(name, prod(shape), shape))
            times.append(ParamTimes(name, *(round(t, DIGITS) for t in (ready_s, begin_s, own_s))))
    return specs, times


def _buckets(specs: list[ParamSpec]) -> list[list[ParamSpec]]:
    """As DDP rebuilds them after the first step."""
    tensors = [torch.empty(1).expand(spec.numel) for spec in specs]
    places = list(range(len(specs)))
    found, _ = dist._compute_bucket_assignment_by_size(
        tensors, CAPS_BYTES, [False] * len(specs), places
    )
    return [[specs[place] for place in bucket] for bucket in found]


def text_of(name: str) -> str:
    """The file of a shipped profile."""
    model = MODELS[name]
    document = {
        "name": name,
        "source": " ".join([model.source, _SPLIT, LINK_TEXT]),
        "profile": json.loads(profile_of(model).to_json()),
    }
    return json.dumps(document, separators=(",", ":")) + "\n"


def main() -> int:
    """Writes the files, or compares them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    check = parser.parse_args().check
    stale = 0
    for name in MODELS:
        path, text = FOLDER / f"{name}.json", text_of(name)
        if not check:
            path.write_text(text)
            print(f"{path.name}: {len(text)} bytes")
        elif not path.exists() or path.read_text() != text:
            print(f"{path.name} is not what this script makes: run it without --check")
            stale = 1
    return stale


if __name__ == "__main__":
    sys.exit(main())

"""The models of HAP's evaluation (table 1), in its shapes, as plain JAX losses on shapes alone.

VGG19 on 32 x 32 images with an adaptive pool to 7 x 7, ViT on 4 x 4 patches, BERT with an untied
head, and BERT-MoE, which replaces the dense half of every second layer: 768 wide, 12 heads, ReLU,
norms last.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

WIDTH, HIDDEN, HEADS, TOKENS, VOCABULARY = 768, 3072, 12, 128, 30522
_VGG19 = (64, 64, 0, 128, 128, 0, 256, 256, 256, 256, 0, 512, 512, 512, 512, 0, 512, 512, 512, 512)


@dataclass(frozen=True)
class HapModel:
    """A model: its loss, and the shapes of its parameters and of a batch.

    Args:
        name: what it is called.
        loss: from parameters and batch to the mean loss.
        parameters: pytree of shapes.
        batch: pytree of shapes.
    """

    name: str
    loss: Callable[[Any, Any], Any]
    parameters: Any
    batch: Any


def initial(model: HapModel) -> tuple[Any, Any]:
    """Random parameters of a model and a random batch, always the same.

    Args:
        model: the model.

    Returns:
        Both, as arrays: norms' scales near 1, the rest small. Each is drawn by its name, experts
        one after another: idle ones change nothing of the others.
    """
    rng = np.random.default_rng(0)

    def parameter(path: Any, shape: jax.ShapeDtypeStruct) -> np.ndarray:
        name, sizes = jax.tree_util.keystr(path), shape.shape
        inputs = math.prod(sizes[:-1]) if len(sizes) != 3 else sizes[1]
        own = np.random.default_rng(zlib.crc32(name.encode()))
        drawn = own.normal(size=sizes) / math.sqrt(inputs)
        return (drawn + ("scale" in name)).astype(np.float32)

    def rows(path: Any, shape: jax.ShapeDtypeStruct) -> np.ndarray:
        if jnp.issubdtype(shape.dtype, jnp.integer):
            return rng.integers(0, 10, shape.shape, dtype=np.int32)
        return rng.normal(size=shape.shape).astype(np.float32)

    with_path = jax.tree_util.tree_map_with_path
    return with_path(parameter, model.parameters), with_path(rows, model.batch)


def _shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def _indices(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.int32)


def _entropy(logits: Any, labels: Any) -> Any:
    chosen = jax.nn.one_hot(labels, logits.shape[-1], dtype=logits.dtype)
    return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * chosen, -1))


def vgg19(examples: int, size: int = 32, hidden: int = 4096, narrower: int = 1) -> HapModel:
    """VGG19 with ten classes.

    Args:
        examples: in a batch.
        size: of the images.
        hidden: width of its dense layers.
        narrower: by what its channels are divided.
    """
    convolutions, width = [], 3
    all_channels = [channels // narrower for channels in _VGG19]
    for channels in all_channels:
        if channels:
            convolutions.append((_shape(3, 3, width, channels), _shape(channels)))
            width = channels
    dense = [(49 * width, hidden), (hidden, hidden), (hidden, 10)]
    parameters = {
        "convolutions": convolutions,
        "dense": [(_shape(*shape), _shape(shape[1])) for shape in dense],
    }

    def loss(parameters: Any, batch: Any) -> Any:
        x, left = batch["image"], iter(parameters["convolutions"])
        for channels in all_channels:
            if channels:
                kernel, bias = next(left)
                numbers = ("NHWC", "HWIO", "NHWC")
                x = jax.lax.conv_general_dilated(
                    x, kernel, (1, 1), "SAME", dimension_numbers=numbers
                )
                x = jax.nn.relu(x + bias)
            elif x.shape[1] > 1:
                window = (1, 2, 2, 1)
                x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, window, "VALID")
        # An adaptive pool from fewer points to 7 x 7 repeats them.
        times = math.ceil(7 / x.shape[1])
        x = jnp.repeat(jnp.repeat(x, times, 1), times, 2)[:, :7, :7]
        x = x.reshape(x.shape[0], -1)
        first, second, last = parameters["dense"]
        for kernel, bias in (first, second):
            x = jax.nn.relu(x @ kernel + bias)
        return _entropy(x @ last[0] + last[1], batch["label"])

    batch = {"image": _shape(examples, size, size, 3), "label": _indices(examples)}
    return HapModel("VGG19", loss, parameters, batch)


def _block_shapes(width: int, hidden: int, experts: int = 0, padded: int = 0) -> dict[str, Any]:
    square, vector = _shape(width, width), _shape(width)
    shapes = dict.fromkeys(("query", "key", "value", "out"), square)
    shapes |= {f"{name}_bias": vector for name in ("query", "key", "value", "out", "down")}
    shapes |= {f"norm{i}_{name}": vector for i in (1, 2) for name in ("scale", "bias")}
    lead = (max(experts, padded),) if experts else ()
    shapes |= {"up": _shape(*lead, width, hidden), "down": _shape(*lead, hidden, width)}
    if experts:
        del shapes["down_bias"]
        return {**shapes, "route": _shape(width, experts)}
    return {**shapes, "up_bias": _shape(hidden)}


def _norm(x: Any, scale: Any, bias: Any) -> Any:
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.mean(centred**2, -1, keepdims=True) + 1e-6) * scale + bias


def _attention(p: Any, x: Any, heads: int) -> Any:
    examples, tokens, width = x.shape
    shape = (examples, tokens, heads, width // heads)
    query, key, value = (
        (x @ p[name] + p[f"{name}_bias"]).reshape(shape) for name in ("query", "key", "value")
    )
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / math.sqrt(width // heads)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), value)
    return mixed.reshape(examples, tokens, width) @ p["out"] + p["out_bias"]


def _dense(p: Any, x: Any) -> Any:
    return jax.nn.relu(x @ p["up"] + p["up_bias"]) @ p["down"] + p["down_bias"]


def _experts(p: Any, x: Any) -> Any:
    """Top-2 routing of each example's tokens to experts of a capacity (GShard).

    Where there are more experts than are routed to, the others get nothing and compute all the
    same.
    """
    tokens, experts = x.shape[1], p["route"].shape[1]
    capacity = max(1, math.ceil(tokens / experts * 2.5))
    gates = jax.nn.softmax(x @ p["route"], -1)
    taken, combine, full = jnp.zeros_like(gates), 0.0, jnp.zeros((x.shape[0], 1, experts), x.dtype)
    for _ in range(2):
        chosen = jax.nn.one_hot(jnp.argmax(gates - taken * 2, -1), experts, dtype=x.dtype)
        taken = taken + chosen
        place = (jnp.cumsum(chosen, 1) - 1 + full) * chosen
        full = full + jnp.sum(chosen, 1, keepdims=True)
        slot = jax.nn.one_hot(place.astype(jnp.int32), capacity, dtype=x.dtype)
        combine = combine + (gates * chosen)[..., None] * slot * chosen[..., None]
    idle = p["up"].shape[0] - experts
    combine = jnp.pad(combine, ((0, 0), (0, 0), (0, idle), (0, 0)))
    dispatch = jnp.asarray(combine > 0, x.dtype)
    inputs = jnp.einsum("btec,btw->ebcw", dispatch, x)
    hidden = jax.nn.relu(jnp.einsum("ebcw,ewh->ebch", inputs, p["up"]))
    outputs = jnp.einsum("ebch,ehw->ebcw", hidden, p["down"])
    return jnp.einsum("btec,ebcw->btw", combine, outputs)


def _block(p: Any, x: Any, heads: int) -> Any:
    x = _norm(x + _attention(p, x, heads), p["norm1_scale"], p["norm1_bias"])
    mixed = _experts(p, x) if "route" in p else _dense(p, x)
    return _norm(x + mixed, p["norm2_scale"], p["norm2_bias"])


def vit(
    examples: int, layers: int = 8, width: int = WIDTH, hidden: int = HIDDEN, heads: int = HEADS
) -> HapModel:
    """ViT on 32 x 32 images, in patches of 4 x 4, with ten classes.

    Args:
        examples: in a batch.
        layers: how many blocks.
        width: of a token.
        hidden: of the dense half of a block.
        heads: of attention.
    """
    parameters = {
        "patches": _shape(48, width),
        "class": _shape(1, 1, width),
        "positions": _shape(1, 65, width),
        "blocks": [_block_shapes(width, hidden) for _ in range(layers)],
        "head": _shape(width, 10),
        "head_bias": _shape(10),
    }

    def loss(parameters: Any, batch: Any) -> Any:
        x = batch["patches"] @ parameters["patches"]
        first = jnp.broadcast_to(parameters["class"], (x.shape[0], 1, width))
        x = jnp.concatenate([first, x], 1) + parameters["positions"]
        for p in parameters["blocks"]:
            x = _block(p, x, heads)
        return _entropy(x[:, 0] @ parameters["head"] + parameters["head_bias"], batch["label"])

    batch = {"patches": _shape(examples, 64, 48), "label": _indices(examples)}
    return HapModel("ViT", loss, parameters, batch)


def bert(
    examples: int,
    layers: int = 12,
    experts: int = 0,
    tokens: int = TOKENS,
    width: int = WIDTH,
    hidden: int = HIDDEN,
    heads: int = HEADS,
    vocabulary: int = VOCABULARY,
    padded: int = 0,
) -> HapModel:
    """BERT as a language model, whose head is not its embedding; with experts, BERT-MoE.

    Args:
        examples: in a batch.
        layers: how many blocks.
        experts: in every second block; 0 for none.
        tokens: in an example.
        width: of a token.
        hidden: of the dense half of a block.
        heads: of attention.
        vocabulary: how many tokens there are.
        padded: to how many experts there are others that nothing is routed to.
    """
    parameters = {
        "embedding": _shape(vocabulary, width),
        "positions": _shape(1, tokens, width),
        "blocks": [
            _block_shapes(width, hidden, experts if i % 2 else 0, padded) for i in range(layers)
        ],
        "head": _shape(width, vocabulary),
        "head_bias": _shape(vocabulary),
    }

    def loss(parameters: Any, batch: Any) -> Any:
        x = parameters["embedding"][batch["tokens"]] + parameters["positions"]
        for p in parameters["blocks"]:
            x = _block(p, x, heads)
        return _entropy(x @ parameters["head"] + parameters["head_bias"], batch["label"])

    batch = {"tokens": _indices(examples, tokens), "label": _indices(examples, tokens)}
    return HapModel("BERT-MoE" if experts else "BERT", loss, parameters, batch)

"""Sizes in bytes of the float32 parameters of well-known networks, in the order of their layers.

They are computed from the published shapes.
"""

from __future__ import annotations


def _resnet50() -> list[int]:
    found, inside = [64 * 3 * 49, 64, 64], 64
    for blocks, mid, out in ((3, 64, 256), (4, 128, 512), (6, 256, 1024), (3, 512, 2048)):
        for block in range(blocks):
            found += [inside * mid, mid, mid, mid * mid * 9, mid, mid, mid * out, out, out]
            found += [inside * out, out, out] if block == 0 else []
            inside = out
    return [*found, 2048 * 1000, 1000]


def _vgg16() -> list[int]:
    found, inside = [], 3
    for out in (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512):
        found += [inside * out * 9, out]
        inside = out
    return [*found, 25088 * 4096, 4096, 4096 * 4096, 4096, 4096 * 1000, 1000]


def _bert_large() -> list[int]:
    h = 1024
    layer = [*[h * h, h] * 4, h, h, 4 * h * h, 4 * h, 4 * h * h, h, h, h]
    return [30522 * h, 512 * h, 2 * h, h, h, *layer * 24, h * h, h]


def _gpt2() -> list[int]:
    h = 768
    layer = [h, h, 3 * h * h, 3 * h, h * h, h, h, h, 4 * h * h, 4 * h, 4 * h * h, h]
    return [50257 * h, 1024 * h, *layer * 12, h, h]


RESNET50, VGG16, BERT_LARGE, GPT2 = (
    [4 * n for n in made()] for made in (_resnet50, _vgg16, _bert_large, _gpt2)
)
MODELS = {"resnet50": RESNET50, "vgg16": VGG16, "bert-large": BERT_LARGE, "gpt2": GPT2}

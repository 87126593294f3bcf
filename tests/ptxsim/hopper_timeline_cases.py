"""Hopper's projections and weight gradient as cases of `python -m ptxsim timeline … --chip h200`."""

import contextlib
import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from hopper_projection import launch, make_problem
from hopper_weight_grad import normal, offsets_of, weight_grad

import ptxsim
from pma.kernels.device_facts import SM90
from pma.kernels.projection.hopper_spec import HopperGemmQuantizeSpec, HopperGemmSpec, HopperProjectionSpec
from pma.kernels.weight_grad.hopper_spec import HopperWeightGradSpec

Options = dict[str, Any]
I64 = torch.int64


def gemm_quantize_384(options: Options) -> None:
    """1,536 rows in two segments, twelve row tiles or more of one CTA."""
    _project(HopperGemmQuantizeSpec(384, 384, I64), options)


def gemm_quantize_384_transposed(options: Options) -> None:
    _project(HopperGemmQuantizeSpec(384, 384, I64, writes_transposed=True), options)


def gemm_quantize_512_heads_of_64(options: Options) -> None:
    _project(HopperGemmQuantizeSpec(512, 512, I64, in_columns_per_scale=64, columns_per_scale=64), options)


def gemm_384(options: Options) -> None:
    _project(HopperGemmSpec(384, 384, I64), options)


def weight_grad_384(options: Options) -> None:
    """3,000 tokens of two segments, a tile of 128 × 384."""
    _weight_grad(384, options)


def weight_grad_256(options: Options) -> None:
    _weight_grad(256, options)


def _project(spec: HopperProjectionSpec, options: Options) -> None:
    p = make_problem(spec, (700, 836))
    with _gpu(importlib.import_module("pma.kernels.projection.sm90"), options):
        launch(spec, p)


def _weight_grad(columns: int, options: Options) -> None:
    offsets = offsets_of((1300, 1700))
    dout, x = normal(128, offsets, 0), normal(columns, offsets, 1)
    with _gpu(importlib.import_module("pma.kernels.weight_grad.sm90"), options):
        weight_grad(HopperWeightGradSpec(128, columns, I64), dout, x, offsets)


@contextlib.contextmanager
def _gpu(sm90: ModuleType, options: Options) -> Iterator[None]:
    """A launcher of ours in the simulator, on one multiprocessor."""
    with (
        ptxsim.simulate(num_sms=1, **options),
        mock.patch.object(sm90, "device_facts", lambda device: SM90),
        mock.patch.object(sm90, "num_multiprocessors", lambda device: 1),
        mock.patch.object(torch.cuda, "device", lambda device: contextlib.nullcontext()),
    ):
        yield

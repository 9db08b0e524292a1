"""Batch normalisation over the batches of all workers, on the CPU or a GPU."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from bpsx.errors import ConfigError
from bpsx.plugin import adapter
from bpsx.torch.all_gather import all_gather_async
from bpsx.torch.dynamo import eager
from bpsx.torch.ops import push_pull
from bpsx.torch.tensors import check_tensor

_numbers = itertools.count()


class SyncBatchNorm(_BatchNorm):  # type: ignore[misc]
    """Batch normalisation with mean and variance over all workers' batches in training.

    Input: floating point of shape (N, C, …). N and the dimensions after C may differ between
    workers; N may be 0. Arguments are those of ``torch.nn.BatchNorm2d``. In evaluation, and with
    one worker, it behaves like that module. Weight and bias get this worker's gradients, as all
    parameters do: ``DistributedOptimizer`` averages them. The gradient of the input is that of the
    sum of all workers' losses. So all workers or none must run the module forward in training mode,
    and backward.

    Workers match modules by name. The name is the module's position in the model if
    :meth:`convert_sync_batchnorm` has created it. Otherwise it is the module's number in the order
    of creation, which must be the same on all workers. Raises :class:`ValueError` for a wrong
    number of dimensions, or if all batches together have one value per channel;
    :class:`~bpsx.torch.UnsupportedTensor`, :class:`~bpsx.errors.ConfigError` in asynchronous
    training, and as :func:`bpsx.torch.synchronize`. Backward is not differentiable.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        _check_group(process_group)
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype
        )
        self.wire_name = f"SyncBatchNorm.{next(_numbers)}"

    @classmethod
    def convert_sync_batchnorm(
        cls, module: torch.nn.Module, process_group: None = None
    ) -> torch.nn.Module:
        """Replace every ``BatchNorm*d`` in ``module``, and PyTorch's own ``SyncBatchNorm``.

        Each replacement shares the parameters and buffers of the module that it replaces. Returns
        ``module``, or its replacement if ``module`` itself is replaced. The optimizer may be
        created before or after, since the parameters are the same. ``process_group``: only None,
        all workers.
        """
        _check_group(process_group)
        if not isinstance(module, torch.nn.Module):
            raise ConfigError(
                f"convert_sync_batchnorm: module is a {type(module).__name__}; expected a"
                " torch.nn.Module"
            )
        return cls._converted(module, "")

    @classmethod
    def _converted(cls, module: torch.nn.Module, path: str) -> torch.nn.Module:
        if isinstance(module, _BatchNorm) and not isinstance(module, cls):
            return cls._from(module, path)
        for name, child in list(module.named_children()):
            converted = cls._converted(child, f"{path}.{name}" if path else name)
            if converted is not child:
                setattr(module, name, converted)
        return module

    @classmethod
    def _from(cls, old: Any, path: str) -> torch.nn.Module:
        new = cls(
            old.num_features,
            old.eps,
            old.momentum,
            affine=False,
            track_running_stats=old.track_running_stats,
        )
        new.wire_name = f"SyncBatchNorm.{path}"
        new.affine, new.weight, new.bias = old.affine, old.weight, old.bias
        new.running_mean, new.running_var, new.num_batches_tracked = (
            old.running_mean,
            old.running_var,
            old.num_batches_tracked,
        )
        new.training = old.training
        return new

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise ValueError(
                f"SyncBatchNorm: expected (N, {self.num_features}, …), got {tuple(input.shape)}"
            )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise ``input``; in training mode also update the running statistics."""
        self._check_input_dim(input)
        if not self.training or adapter.session().size == 1:
            result: torch.Tensor = super().forward(input)
            return result
        return self._synchronised(input)

    @eager
    def _synchronised(self, input: torch.Tensor) -> torch.Tensor:
        if adapter.session().config.asynchronous:
            raise ConfigError(
                "SyncBatchNorm cannot be used with BYTEPS_ENABLE_ASYNC=1: workers that do not wait"
                " for each other have no common batch"
            )
        check_tensor(input, f"input of SyncBatchNorm {self.wire_name!r}")
        statistics = _joined(input.detach(), self.wire_name)
        count, mean, variance = statistics
        if count <= 1:
            raise ValueError(
                f"SyncBatchNorm {self.wire_name!r}: all workers together give {count} values per"
                " channel; training needs more than one"
            )
        if self.track_running_stats and self.running_mean is not None:
            self._track(count, mean, variance)
        result: torch.Tensor = _Normalise.apply(
            input, self.weight, self.bias, statistics, self.eps, self.wire_name
        )
        return result

    def _track(self, count: int, mean: torch.Tensor, variance: torch.Tensor) -> None:
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            weight = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            for running, now in (
                (self.running_mean, mean),
                (self.running_var, variance * (count / (count - 1))),
            ):
                running.copy_(running.double() * (1 - weight) + now * weight)


def _check_group(process_group: object) -> None:
    if process_group is not None:
        raise ConfigError(
            f"SyncBatchNorm: process_group={process_group!r}: expected None, all workers"
        )


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for computation: float32 for half types."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _joined(input: torch.Tensor, name: str) -> tuple[int, torch.Tensor, torch.Tensor]:
    """Return values per channel, mean and variance (float64) over all workers' inputs.

    The result is bitwise the same on all workers. It is computed from each worker's count, mean and
    sum of squared differences from that mean. These are added in the order of ranks, by the method
    of Chan, Golub and LeVeque (Updating Formulae and a Pairwise Algorithm for Computing Sample
    Variances, 1979). So large numbers are never subtracted from each other.
    """
    channels = input.shape[1]
    mine = torch.zeros(2 * channels + 1, dtype=torch.float64, device=input.device)
    values = input.numel() // channels
    if values:
        variance, mean = torch.var_mean(
            input.to(_wide(input.dtype)), [0, *range(2, input.dim())], correction=0
        )
        mine[0], mine[1 : channels + 1], mine[channels + 1 :] = (
            values,
            mean,
            variance.double() * values,
        )
    parts = all_gather_async(
        [torch.empty_like(mine) for _ in range(adapter.session().size)], mine, name
    ).wait()
    count, mean, squares = 0, mine.new_zeros(channels), mine.new_zeros(channels)
    for part in parts:
        n = int(part[0])
        if n:
            away = part[1 : channels + 1] - mean
            squares += part[channels + 1 :] + away * away * (count * n / (count + n))
            mean += away * (n / (count + n))
            count += n
    return count, mean, squares / max(count, 1)


class _Normalise(torch.autograd.Function):  # type: ignore[misc]
    """y = (x - mean) / sqrt(variance + eps) * weight + bias.

    Mean and variance depend on every worker's x.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        statistics: tuple[int, torch.Tensor, torch.Tensor],
        eps: float,
        name: str,
    ) -> torch.Tensor:
        """Return the normalised input, in ``x``'s dtype."""
        count, mean, variance = statistics
        dtype = _wide(x.dtype)
        shape = (1, -1) + (1,) * (x.dim() - 2)
        scale = (variance + eps).rsqrt()
        ctx.save_for_backward(x, weight, mean.to(dtype), scale.to(dtype))
        ctx.count, ctx.name, ctx.shape, ctx.bias_dtype = (
            count,
            name,
            shape,
            bias.dtype if bias is not None else None,
        )
        y = (x.to(dtype) - mean.to(dtype).reshape(shape)) * scale.to(dtype).reshape(shape)
        if weight is not None:
            y = y * weight.to(dtype).reshape(shape)
        if bias is not None:
            y = y + bias.to(dtype).reshape(shape)
        return y.to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, given: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of input, weight and bias.

        Let g be the gradient of the output and h the normalised input. The gradient of the input is
        weight * scale * (g - mean of g - h * mean of g * h). Means are over all workers.
        """
        x, weight, mean, scale = ctx.saved_tensors
        g = given.to(mean.dtype)
        h = (x.to(mean.dtype) - mean.reshape(ctx.shape)) * scale.reshape(ctx.shape)
        over = [0, *range(2, x.dim())]
        sums = torch.stack([g.sum(over), (g * h).sum(over)])
        for_x = None
        if ctx.needs_input_grad[0]:
            means = push_pull(sums, average=False, name=f"{ctx.name}.grad") / ctx.count
            factor = scale if weight is None else scale * weight.to(mean.dtype)
            of_g, of_gh = (m.reshape(ctx.shape) for m in means)
            for_x = (factor.reshape(ctx.shape) * (g - of_g - h * of_gh)).to(x.dtype)
        for_weight = (
            sums[1].to(weight.dtype) if weight is not None and ctx.needs_input_grad[1] else None
        )
        for_bias = sums[0].to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        return for_x, for_weight, for_bias, None, None, None

"""Sums of sparse tensors: values and indices travel; their number may differ by worker."""

from __future__ import annotations

import torch

from bpsx.plugin import adapter
from bpsx.plugin.framework import UnsupportedTensor
from bpsx.torch.all_gather import RowGathering
from bpsx.torch.compression import Compressor
from bpsx.torch.tensors import check_device, summable, unnamed

_HALVES = (torch.float16, torch.bfloat16)
#: Kind that a worker sends if its tensor is dense while others' are sparse.
DENSE = "a dense"
_SPARSE = "a sparse"


class SparseSum:
    """The sum or average of a ``torch.sparse_coo`` tensor in flight, used like a handle.

    ``tensor`` need not be coalesced. It is copied and may change at once. Raises as
    :func:`push_pull_sparse`.
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        average: bool,
        name: str,
        compression: type[Compressor],
        kind: str = _SPARSE,
    ) -> None:
        whole = tensor.detach().coalesce()
        self._shape, self._dtype, self._sparse_dim, self._average = (
            whole.shape,
            whole.dtype,
            whole.sparse_dim(),
            average,
        )
        self._compression = compression
        self.dense = kind == DENSE  # on this worker, and on all workers if the exchange succeeds
        wire, self._ctx = compression.compress(whole.values())
        kind = (
            f"{kind} tensor of shape {tuple(self._shape)} with {self._sparse_dim} sparse"
            " dimensions:"
        )
        self._rows = RowGathering([whole.indices().t(), wire], name, kind)
        #: The gradient that it sums, for the wait to find out whether the script has replaced it.
        self.given: torch.Tensor | None = None

    def done(self) -> bool:
        """Return whether both exchanges have ended, successfully or not, without blocking."""
        return self._rows.done()

    def advance(self) -> None:
        """Wait for the numbers of values and start to move the values.

        :meth:`wait` raises the failure, if any.
        """
        self._rows.advance()

    def wait(self) -> torch.Tensor:
        """Return the result as a new, coalesced tensor.

        Raises :class:`~bpsx.errors.MismatchError` on all workers if shapes, dtypes or layouts
        differ.
        """
        indices, wires = self._rows.wait()
        values = self._compression.decompress(torch.cat(wires), self._ctx)
        # Half types are summed in float32 and rounded once.
        wide = values.float() if values.dtype in _HALVES else values
        total = torch.sparse_coo_tensor(
            torch.cat(indices).t(), wide, self._shape, check_invariants=True, device=wide.device
        ).coalesce()
        result = total.values()
        if self._average:
            size = adapter.session().size
            result = (
                result / size
                if result.is_floating_point()
                else result.div(size, rounding_mode="floor")
            )
        return torch.sparse_coo_tensor(
            total.indices(),
            result.to(self._dtype),
            self._shape,
            is_coalesced=True,
            check_invariants=False,
            device=result.device,
        )


def empty_like(dense: torch.Tensor, sparse_dim: int = 1) -> torch.Tensor:
    """Return a sparse tensor without values, with the shape and dtype of ``dense``.

    A worker without a gradient sends it.
    """
    indices = torch.zeros(sparse_dim, 0, dtype=torch.int64, device=dense.device)
    values = dense.detach().new_zeros((0, *dense.shape[sparse_dim:]))
    return torch.sparse_coo_tensor(
        indices, values, dense.shape, check_invariants=False, device=dense.device
    )


def check_sparse(tensor: torch.Tensor, what: str) -> None:
    """Raise an error if a sparse tensor cannot be gathered.

    The error is :class:`UnsupportedTensor` or :class:`~bpsx.dtypes.UnsupportedDType`.
    """
    check_device(tensor, what)
    summable(tensor, what)
    if tensor.sparse_dim() == 0:
        raise UnsupportedTensor(
            f"{what}: a sparse tensor without sparse dimensions cannot be sent; give"
            " tensor.to_dense()"
        )


def push_pull_sparse(
    tensor: torch.Tensor, average: bool, name: str | None, compression: type[Compressor]
) -> torch.Tensor:
    """Implement :func:`bpsx.torch.push_pull` of sparse tensors.

    Raises as :func:`check_sparse`, and :class:`UnsupportedTensor` if a gradient is required.
    """
    what = f"push_pull of {name!r}" if name else "push_pull"
    check_sparse(tensor, what)
    if tensor.requires_grad and torch.is_grad_enabled():
        raise UnsupportedTensor(
            f"{what}: push_pull of a sparse tensor has no derivative; give tensor.detach(), or a"
            " dense tensor"
        )
    if adapter.session().config.asynchronous:
        raise UnsupportedTensor(
            f"{what}: sparse tensors cannot be sent with BYTEPS_ENABLE_ASYNC=1, because servers"
            " add each push to a value of a fixed shape"
        )
    wire = name or unnamed("push_pull.sparse", tensor)
    return SparseSum(tensor, average, wire, compression).wait()

"""Linear layers with little overhead, in sampler and trainer alike.

What surrounds the matrix products of a small batch costs as much as they do: a call for each of q,
k and v, and in each LoRA layer copies of input and output in the adapter's precision. Here layers
that read the same input run as one product over their weights laid side by side, and their LoRA
matrices as one beside it, in the precision of the input. The sums are the same but for rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import peft
import torch
from torch import nn
from torch.nn.functional import linear

#: Layers of one module that read the same input, by their names in transformers.
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
#: Up to this many tokens, weights x tokens is faster than tokens x weights in fp32 on a CPU:
#: libraries keep the left matrix in place and copy the right one.
_FEW = 64


@contextmanager
def lean_layers(model: Any, fixed: bool) -> Iterator[None]:
    """Run `model`'s linear layers leanly inside.

    `fixed`: the weights do not change meanwhile, so that they are put together once. What is not
    a plain linear layer, with or without plain LoRA, runs as ever (quantised layers, DoRA, dropout,
    tensor subclasses).
    """
    changed: list[Any] = []
    try:
        for group in list(_groups(model, fixed)):
            lean = _Lean(group, fixed)
            for index, module in enumerate(group):
                module.forward = lean.forward_of(index)
                changed.append(module)
        yield
    finally:
        for module in changed:
            del module.forward  # the class's own comes back


def _groups(model: Any, fixed: bool) -> Iterator[list[Any]]:
    """Lists of plain linear layers that read the same input; of one layer where it has LoRA."""
    for parent in model.modules():
        children = {name: child for name, child in parent.named_children() if _is_plain(child)}
        for names in _TOGETHER:
            weights = [_base(children[name]).weight for name in names if name in children]
            whole = len(weights) == len(names) and len({(w.dtype, w.device) for w in weights}) == 1
            # Weights that get gradients of their own stay apart.
            if whole and (fixed or not any(w.requires_grad for w in weights)):
                yield [children.pop(name) for name in names]
        yield from ([m] for m in children.values() if fixed or m is not _base(m))


def _is_plain(module: Any) -> bool:
    """Whether the layer does what `linear` does, with sums of plain LoRA adapters."""
    if "forward" in module.__dict__:
        return False
    if type(module) is nn.Linear:
        return type(module.weight) is nn.Parameter
    return (
        type(module) is peft.tuners.lora.Linear
        and _is_plain(module.base_layer)
        and not (module.base_layer._forward_hooks or module.base_layer._forward_pre_hooks)
        and not (module.merged or module.lora_variant)
        and all(isinstance(dropout, nn.Identity) for dropout in module.lora_dropout.values())
        and all(up.bias is None for up in module.lora_B.values())
    )


def _base(module: Any) -> Any:
    return module.base_layer if isinstance(module, peft.tuners.lora.LoraLayer) else module


class _Lean:
    """Layers with one input, as one."""

    def __init__(self, modules: Sequence[Any], fixed: bool):
        self.modules = modules
        self.bases = [_base(module) for module in modules]
        self.sizes = [base.out_features for base in self.bases]
        self.fixed = fixed
        self.weight: Any = None
        self.adapters: tuple[Any, Any] | None = None
        self.last: Any = None
        self.outputs: Any = ()

    def forward_of(self, index: int) -> Any:
        """The forward of one of the layers. The first that sees an input computes all of them."""
        if len(self.modules) == 1:
            return self._product
        final = len(self.modules) - 1

        def forward(x: Any) -> Any:
            if self.last is not x:
                self.last, self.outputs = x, self._product(x).split(self.sizes, -1)
            output = self.outputs[index]
            if index == final:
                self.last, self.outputs = None, ()
            return output

        return forward

    def _product(self, x: Any) -> Any:
        """(…, all outputs)"""
        if _are_few(x):
            return self._exchanged(x)
        output = linear(x, self._weight(), self._bias())
        down, up = self._adapters(x.dtype, output.dtype)
        if down is None:
            return output
        inner = linear(x, down).flatten(0, -2)  # (tokens, ranks)
        flat = output.flatten(0, -2)
        if torch.is_grad_enabled():
            return torch.addmm(flat, inner, up.t()).view(output.shape)
        flat.addmm_(inner, up.t())
        return output

    def _exchanged(self, x: Any) -> Any:
        """`_product` with its operands exchanged."""
        columns = x.reshape(-1, x.shape[-1]).contiguous().t()  # (in, tokens)
        output = torch.mm(self._weight(), columns)  # (all outputs, tokens)
        down, up = self._adapters(x.dtype, x.dtype)
        if down is not None:
            output.addmm_(up, torch.mm(down, columns))
        rows = output.t().contiguous().view(*x.shape[:-1], -1)
        bias = self._bias()
        return rows if bias is None else rows.add_(bias)

    def _weight(self) -> Any:
        if len(self.bases) == 1:
            return self.bases[0].weight
        if self.weight is None:
            self.weight = _side_by_side([base.weight for base in self.bases])
        return self.weight

    def _bias(self) -> Any:
        if all(base.bias is None for base in self.bases):
            return None
        if len(self.bases) == 1:
            return self.bases[0].bias
        zero = self.bases[0].weight.new_zeros
        return torch.cat([zero(b.out_features) if b.bias is None else b.bias for b in self.bases])

    def _adapters(self, dtype: torch.dtype, out_dtype: torch.dtype) -> tuple[Any, Any]:
        """`down` (ranks, in) and `up` (out, ranks, block by block), the scaling in `up`; Nones
        where no adapter is active."""
        if self.adapters is None or not self.fixed:
            parts = [
                _lora(module, base) for module, base in zip(self.modules, self.bases, strict=True)
            ]
            downs = [down for down, _ in parts if down is not None]
            if downs:
                up = torch.block_diag(*(up for _, up in parts)) if len(parts) > 1 else parts[0][1]
                self.adapters = torch.cat(downs).to(dtype), up.to(out_dtype)
            else:
                self.adapters = None, None
        return self.adapters


def _are_few(x: Any) -> bool:
    """Whether `x` holds the few tokens of a decoding step, in fp32 on a CPU."""
    tokens = x.numel() // x.shape[-1]
    here = x.device.type == "cpu" and x.dtype == torch.float32
    plain = not (torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"))
    return here and plain and tokens <= _FEW


def _lora(module: Any, base: Any) -> tuple[Any, Any]:
    """`down` and scaled `up` of the layer's active adapters; None and no columns without any."""
    names = [] if module is base or module.disable_adapters else module.active_adapters
    names = [name for name in names if name in module.lora_A]
    if not names:
        return None, base.weight.new_zeros(base.out_features, 0)
    downs = [module.lora_A[name].weight for name in names]
    ups = [module.lora_B[name].weight * module.scaling[name] for name in names]
    return torch.cat(downs), torch.cat(ups, 1)


def _side_by_side(weights: Sequence[Any]) -> Any:
    """The weights as one matrix. They become views of it, so that it takes no memory of its own
    and follows what training does to them."""
    first = weights[0].data
    rows = sum(w.shape[0] for w in weights)
    if not _are_adjacent(weights):
        first = torch.cat([w.data for w in weights])
        for weight, part in zip(weights, first.split([w.shape[0] for w in weights]), strict=True):
            weight.data = part
    return first.as_strided((rows, first.shape[1]), first.stride())


def _are_adjacent(weights: Sequence[Any]) -> bool:
    storage, at = weights[0].untyped_storage().data_ptr(), weights[0].storage_offset()
    for weight in weights:
        if weight.untyped_storage().data_ptr() != storage or weight.storage_offset() != at:
            return False
        at += weight.numel()
    return all(weight.is_contiguous() for weight in weights)

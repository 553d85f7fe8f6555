"""Writes golden/{auto_gptq,gptqmodel,autoawq}.safetensors with those libraries' own packing and unpacking.

For each case it holds what went in (codes, scales, zero points, order), the tensors that the library made of them, and
the weight that the library reads back. The libraries need environments of their own (`tests/interop/setup.sh`), which
have no need of this project. Run it there by hand when a layout changes:

    python tests/formats/make_golden_integers.py auto_gptq
"""

import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

FOLDER = Path(__file__).parent / "golden"
ROWS, COLUMNS = 32, 64
LIBRARIES = {"auto_gptq": "auto-gptq", "gptqmodel": "gptqmodel", "autoawq": "autoawq"}


def cases(library: str) -> dict[str, tuple[int, bool, int, bool]]:
    """(bits, symmetric, group_size, act-order) by name."""
    if library == "autoawq":
        return {"int4-asym-32": (4, False, 32, False), "int4-sym-32": (4, True, 32, False)}
    found = {
        f"int{bits}-{'sym' if symmetric else 'asym'}-{group if group > 0 else 'channel'}": (
            bits,
            symmetric,
            group,
            False,
        )
        for bits in (2, 3, 4, 8)
        for symmetric in (True, False)
        for group in (32, -1)
    }
    return {**found, "int4-sym-32-order": (4, True, 32, True)}


def inputs(bits: int, symmetric: bool, group: int, order: bool) -> dict[str, Tensor]:
    """Unsigned codes uint8 [O, I] and zero points [O, G], float16 scales [O, G], the columns' groups int32 [I]."""
    generator = torch.Generator().manual_seed(bits)
    size = group if group > 0 else COLUMNS
    codes_OI = torch.randint(0, 1 << bits, (ROWS, COLUMNS), generator=generator, dtype=torch.int32)
    zero_OG = torch.randint(1, 1 << bits, (ROWS, COLUMNS // size), generator=generator, dtype=torch.int32)
    if symmetric:
        zero_OG.fill_(1 << (bits - 1))
    scale_OG = (torch.rand(ROWS, COLUMNS // size, generator=generator) / 8 + 1 / 64).bfloat16().half()
    g_idx_I = torch.arange(COLUMNS, dtype=torch.int32) // size
    if order:
        g_idx_I = g_idx_I[torch.randperm(COLUMNS, generator=generator)]
    return {
        "codes": codes_OI.to(torch.uint8), "zero": zero_OG.to(torch.uint8), "scale": scale_OG, "g_idx": g_idx_I
    }  # fmt: skip


def linear_of(given: dict[str, Tensor]) -> nn.Linear:
    g_I = given["g_idx"].long()
    weight_OI = (given["codes"].float() - given["zero"].float()[:, g_I]) * given["scale"].float()[:, g_I]
    linear = nn.Linear(COLUMNS, ROWS, bias=False)
    linear.weight.data = weight_OI
    return linear


def auto_gptq(given: dict[str, Tensor], bits: int, group: int) -> dict[str, Tensor]:
    from auto_gptq.nn_modules.qlinear.qlinear_cuda import QuantLinear

    layer: Any = QuantLinear(bits, group, COLUMNS, ROWS, False)
    layer.pack(linear_of(given), given["scale"].clone(), given["zero"].float(), given["g_idx"])
    layer.use_cuda_fp16 = False
    layer.half()
    with torch.no_grad():
        weight_IO = layer(torch.eye(COLUMNS, dtype=torch.float16))
    return {**_gptq_tensors(layer), "weight": weight_IO.t().half().contiguous()}


def gptqmodel(given: dict[str, Tensor], bits: int, group: int) -> dict[str, Tensor]:
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    layer: Any = TorchLinear(
        bits=bits, group_size=group, sym=True, desc_act=False, in_features=COLUMNS, out_features=ROWS, bias=False,
        pack_dtype=torch.int32, register_buffers=True,
    )  # fmt: skip
    layer.pack_original(linear_of(given), given["scale"].clone(), given["zero"].float(), given["g_idx"])
    weight_IO = layer.dequantize_weight()
    convert_gptq_v2_to_v1_format_module(layer, layer)  # as it is saved; of the second it reads two attributes
    return {**_gptq_tensors(layer), "weight": weight_IO.t().half().contiguous()}


def _gptq_tensors(layer: Any) -> dict[str, Tensor]:
    return {name: getattr(layer, name).clone() for name in ("qweight", "qzeros", "scales", "g_idx")}


def autoawq(given: dict[str, Tensor], bits: int, group: int) -> dict[str, Tensor]:
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    layer = WQLinear_GEMM.from_linear(
        linear_of(given),
        bits,
        group,
        scales=given["scale"].t().contiguous(),
        zeros=given["zero"].t().half().contiguous(),
    )
    weight_IO = dequantize_gemm(layer.qweight, layer.qzeros, layer.scales, bits, group)
    tensors = {name: getattr(layer, name).clone() for name in ("qweight", "qzeros", "scales")}
    return {**tensors, "weight": weight_IO.t().half().contiguous()}


def main(library: str) -> None:
    from safetensors.torch import save_file

    make = {"auto_gptq": auto_gptq, "gptqmodel": gptqmodel, "autoawq": autoawq}[library]
    tensors: dict[str, Tensor] = {}
    for name, (bits, symmetric, group, order) in cases(library).items():
        given = inputs(bits, symmetric, group, order)
        for part, tensor in {**given, **make(given, bits, group)}.items():
            tensors[f"{name}.{part}"] = tensor.contiguous()
    made = {"made_by": f"{LIBRARIES[library]} {version(LIBRARIES[library])}"}
    save_file(tensors, FOLDER / f"{library}.safetensors", metadata=made)


if __name__ == "__main__":
    main(sys.argv[1])

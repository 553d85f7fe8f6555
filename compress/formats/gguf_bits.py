"""How codes, scales and small integers lie in the bytes of GGUF's blocks; N blocks at a time, uint8."""

import torch
from torch import Tensor


def number(block_NB: Tensor) -> tuple[Tensor, Tensor]:
    """The float16 in front of a block as float32 [N, 1], and the rest."""
    return block_NB[:, :2].contiguous().view(torch.float16).float(), block_NB[:, 2:].contiguous()


def numbers(*parts_N2: Tensor) -> Tensor:
    """float16 numbers side by side, each uint8 [N, 2], as float32."""
    return torch.cat([part.contiguous().view(torch.float16).float() for part in parts_N2], 1)


def halves(code_NC: Tensor, width: int) -> Tensor:
    """4-bit codes, two a byte: the low halves of `width` bytes hold the first `width` codes, the high ones the next."""
    low_high = code_NC.reshape(len(code_NC), -1, 2, width)
    return (low_high[:, :, 0] | low_high[:, :, 1] << 4).flatten(1)


def unhalve(byte_NB: Tensor, width: int) -> Tensor:
    """Undoes `halves`."""
    byte = byte_NB.reshape(len(byte_NB), -1, width)
    return torch.stack([byte & 15, byte >> 4], 2).flatten(1)


def quarters(code_NC: Tensor) -> Tensor:
    """2-bit codes, four a byte: each 32 bytes hold 128 codes, the first 32 in their lowest bits."""
    part = code_NC.reshape(len(code_NC), -1, 4, 32)
    return (part[:, :, 0] | part[:, :, 1] << 2 | part[:, :, 2] << 4 | part[:, :, 3] << 6).flatten(1)


def unquarter(byte_NB: Tensor) -> Tensor:
    """Undoes `quarters`."""
    byte = byte_NB.reshape(len(byte_NB), -1, 32)
    return torch.stack([(byte >> shift) & 3 for shift in (0, 2, 4, 6)], 2).flatten(1)


def planes(bit_NC: Tensor, count: int, *, transposed: bool = False) -> Tensor:
    """Single bits, eight a byte: bit k of byte j is the code 32k + j, or transposed the code 8j + k."""
    bits = (
        bit_NC.reshape(len(bit_NC), -1, count).transpose(1, 2) if transposed else bit_NC.reshape(len(bit_NC), count, -1)
    )
    total = torch.zeros_like(bits[:, 0])
    for k in range(count):
        total |= bits[:, k] << k
    return total


def unplane(byte_NB: Tensor, count: int, *, transposed: bool = False) -> Tensor:
    """Undoes `planes`."""
    bits = torch.stack([(byte_NB >> k) & 1 for k in range(count)], 2 if transposed else 1)
    return bits.flatten(1)


def scales_of_4(count_NG: Tensor, least_NG: Tensor) -> Tensor:
    """Eight pairs of 6-bit numbers in twelve bytes, as Q4_K and Q5_K have them."""
    first, last = (part[:, :4] for part in (count_NG, least_NG)), (part[:, 4:] for part in (count_NG, least_NG))
    (count, least), (count_4, least_4) = first, last
    low = (count_4 & 15) | (least_4 & 15) << 4
    return torch.cat([count | count_4 >> 4 << 6, least | least_4 >> 4 << 6, low], 1)


def unscale_of_4(byte_N12: Tensor) -> tuple[Tensor, Tensor]:
    """Undoes `scales_of_4`."""
    count, least, low = torch.split(byte_N12, 4, 1)
    return (
        torch.cat([count & 63, (low & 15) | count >> 6 << 4], 1),
        torch.cat([least & 63, low >> 4 | least >> 6 << 4], 1),
    )


def scales_of_3(count_NG: Tensor) -> Tensor:
    """Sixteen 6-bit numbers in twelve bytes, as Q3_K has them."""
    low, high = count_NG & 15, (count_NG >> 4).view(-1, 4, 4)
    return torch.cat(
        [low[:, :8] | low[:, 8:] << 4, high[:, 0] | high[:, 1] << 2 | high[:, 2] << 4 | high[:, 3] << 6], 1
    )


def unscale_of_3(byte_N12: Tensor) -> Tensor:
    """Undoes `scales_of_3`."""
    low, high = byte_N12[:, :8], byte_N12[:, 8:]
    return torch.cat([low & 15, low >> 4], 1) | torch.cat([(high >> k) & 3 for k in (0, 2, 4, 6)], 1) << 4

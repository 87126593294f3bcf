"""MXFP8: the format, the bit-exact quantiser, the tile layouts of its scales."""

from pma.layouts.mxfp8 import BLOCK, MXFP8Tensor, decode_scales
from pma.layouts.quantize import dequantize, quantize, quantize_blocks
from pma.layouts.scale_tiles import gather_scales, scatter_scales, tile_shape
from pma.layouts.transposed import transpose_payload

__all__ = [
    "BLOCK",
    "MXFP8Tensor",
    "decode_scales",
    "dequantize",
    "gather_scales",
    "quantize",
    "quantize_blocks",
    "scatter_scales",
    "tile_shape",
    "transpose_payload",
]

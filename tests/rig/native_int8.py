"""Stand-ins for the entry points of LLM.int8() in bitsandbytes' native CUDA library, 0.43 to 0.45.

0.45 keeps matrices row-major. Before, they were stored in tiles: ``col32`` (activations and products) in strips of 32
columns, ``turing`` and ``ampere`` (weights) in strips of 32 columns that are filled up to 8 or 32 rows. The order
inside a tile differs from the hardware's; only these functions and bitsandbytes' own ``undo_layout`` ever see it.
"""

from __future__ import annotations

import torch

from .native_memory import at, matrix

_TILE_ROWS = {"col32": 1, "turing": 8, "ampere": 32}
_TILE_COLUMNS = 32


def vector_quant(A, out, row_stats, threshold, rows, columns, *stream):
    values, _ = _without_outliers(matrix(A, rows, columns, torch.float16), threshold)
    scale = values.abs().amax(1)
    at(row_stats, rows, torch.float32).copy_(scale)
    matrix(out, rows, columns, torch.int8).copy_(_to_int8(values, scale[:, None]))


def matmul(context, m, n, k, A, B, C, row_scale, lda, ldb, ldc, *stream):
    # cuBLAS is column-major: A is the weight [ldc, lda], B the activations [n, ldb], C their product [n, ldc].
    _int8_product(
        matrix(B, n, ldb, torch.int8), matrix(A, ldc, lda, torch.int8), matrix(C, n, ldc, torch.int32)
    )
    return 0


def dequantize(A, row_stats, column_stats, out, *rest):
    if len(rest) == 5:  # before 0.45: new statistics, which nobody reads, and a product in tiles
        _, _, bias, rows, columns = rest
        product = _from_tiles(A, rows, columns, torch.int32, "col32")
    else:
        bias, rows, columns = rest[:3]
        product = matrix(A, rows, columns, torch.int32)
    scale = at(row_stats, rows, torch.float32)[:, None] * at(column_stats, columns, torch.float32) / 127**2
    values = product.float() * scale
    if bias:
        values = values + at(bias, columns, torch.float16).float()
    matrix(out, rows, columns, torch.float16).copy_(values)


# ---- before 0.45


def row_and_column_stats(A, row_stats, column_stats, outlier_counts, threshold, rows, columns):
    values, outliers = _without_outliers(matrix(A, rows, columns, torch.float16), threshold)
    at(row_stats, rows, torch.float32).copy_(values.abs().amax(1))
    at(column_stats, columns, torch.float32).copy_(values.abs().amax(0))
    if outlier_counts:  # per tile of 16 x 256; the caller sums them up and reads the total at the end
        tiles = ((rows + 15) // 16 * 16) * ((columns + 255) // 256)
        at(outlier_counts, tiles + 1, torch.int32)[-1] = int(outliers.sum())


def row_and_column_quant(
    A, row_stats, column_stats, out_columns, out_rows, row_index, column_index, outlier_values, counts,
    threshold, rows, columns,
):  # fmt: skip
    source = matrix(A, rows, columns, torch.float16)
    values, outliers = _without_outliers(source, threshold)
    row_scale = at(row_stats, rows, torch.float32)[:, None]
    matrix(out_rows, rows, columns, torch.int8).copy_(_to_int8(values, row_scale))
    matrix(out_columns, rows, columns, torch.int8).copy_(
        _to_int8(values, at(column_stats, columns, torch.float32))
    )
    if row_index:
        found = outliers.nonzero().int()
        at(row_index, len(found), torch.int32).copy_(found[:, 0])
        at(column_index, len(found), torch.int32).copy_(found[:, 1])
        at(outlier_values, len(found), torch.float16).copy_(source[outliers])


def transform(A, out, rows, columns, *, layout, transposed):
    source = matrix(A, rows, columns, torch.int8)
    _to_tiles(source.t() if transposed else source, out, layout)


def undo_transform(A, out, rows, columns, *, layout):
    matrix(out, rows, columns, torch.int8).copy_(_from_tiles(A, rows, columns, torch.int8, layout))


def matmul_in_tiles(context, m, n, k, A, B, C, row_scale, lda, ldb, ldc, *, layout):
    product = torch.empty(m, n, dtype=torch.int32)
    activations = _from_tiles(A, m, k, torch.int8, "col32")
    _int8_product(activations, _from_tiles(B, n, k, torch.int8, layout), product)
    _to_tiles(product, C, "col32")
    return 0


def extract_outliers(A, indices, out, count, rows, columns, *, layout):
    chosen = at(indices, count, torch.int32).long()
    matrix(out, rows, count, torch.int8).copy_(_from_tiles(A, rows, columns, torch.int8, layout)[:, chosen])


def _padded(rows: int, columns: int, layout: str) -> tuple[int, int]:
    return rows + -rows % _TILE_ROWS[layout], columns + -columns % _TILE_COLUMNS


def _to_tiles(source: torch.Tensor, address: int, layout: str) -> None:
    rows, columns = _padded(*source.shape, layout)
    padded = torch.zeros(rows, columns, dtype=source.dtype)
    padded[: source.shape[0], : source.shape[1]] = source
    tiles = padded.view(-1, _TILE_ROWS[layout], columns // _TILE_COLUMNS, _TILE_COLUMNS).permute(2, 0, 1, 3)
    at(address, rows * columns, source.dtype).copy_(tiles.reshape(-1))


def _from_tiles(address: int, rows: int, columns: int, dtype: torch.dtype, layout: str) -> torch.Tensor:
    all_rows, all_columns = _padded(rows, columns, layout)
    tiles = at(address, all_rows * all_columns, dtype)
    tiles = tiles.view(all_columns // _TILE_COLUMNS, -1, _TILE_ROWS[layout], _TILE_COLUMNS)
    return tiles.permute(1, 2, 0, 3).reshape(all_rows, all_columns)[:rows, :columns]


def _without_outliers(values: torch.Tensor, threshold: float) -> tuple[torch.Tensor, torch.Tensor]:
    outliers = values.abs() >= threshold if threshold > 0 else torch.zeros_like(values, dtype=torch.bool)
    return values.float().masked_fill(outliers, 0.0), outliers


def _to_int8(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (values * (127.0 / scale.clamp_min(1e-30))).round().clamp(-127, 127).to(torch.int8)


def _int8_product(activations: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(activations.double() @ weight.double().t())  # exact: the sums stay far below 2**53


ENTRY_POINTS = {
    r"cint8_vector_quant": vector_quant,
    r"cigemmlt_32": matmul,
    r"cdequant_mm_int32_fp16": dequantize,
    r"cget_col_row_stats": row_and_column_stats,
    r"cdouble_rowcol_quant": row_and_column_quant,
    r"ctransform_row2(?P<layout>col32|turing|ampere)(?P<transposed>T?)": transform,
    r"ctransform_(?P<layout>turing|ampere)2row": undo_transform,
    r"cigemmlt_(?P<layout>turing|ampere)_32": matmul_in_tiles,
    r"cextractOutliers_(?P<layout>turing|ampere)": extract_outliers,
}

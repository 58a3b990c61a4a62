"""Products: exact sums of 8-bit numbers, float sums that no neighbour changes, layouts that can be undone."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import KernelError
from paceline.kernels import library, reference
from paceline.targets.linear import (
    MAX_INT8_INPUTS,
    Linear,
    hadamard,
    pack_embedding,
    pack_linear,
    packed_bytes,
    rotate,
    unpack_linear,
)
from tests.decoders import paths

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.targets.linear import Format

FORMATS: tuple[Format, ...] = ("fp32", "bf16", "int8")


def native_sums(path: str, weights: Tensor, inputs: Tensor) -> Tensor:
    """Sums [R, N] of unsigned weights [N, K] and signed inputs [R, K] by the library."""
    n, k = weights.shape
    k_padded, n_padded = -(-k // 64) * 64, -(-n // 16) * 16
    weights = torch.nn.functional.pad(weights, (0, k_padded - k, 0, n_padded - n))
    inputs = torch.nn.functional.pad(inputs, (0, k_padded - k)).contiguous()
    packed = weights.reshape(-1, 16, k_padded // 4, 4).transpose(1, 2).contiguous()
    out = torch.empty(inputs.shape[0], n_padded, dtype=torch.int32)
    found = library()
    assert found is not None
    found.c.pl_path_int8_sums(
        *(ctypes.c_void_p(found.path(path)), ctypes.c_void_p(packed.data_ptr())),
        *(ctypes.c_void_p(inputs.data_ptr()), inputs.shape[0], n, k_padded, ctypes.c_void_p(out.data_ptr())),
    )
    return out[:, :n]


@pytest.mark.parametrize("path", paths())
@pytest.mark.parametrize("n", [1, 3, 17, 33, 100])
@pytest.mark.parametrize("k", [4, 8, 60, 96, 576, 1536])
def test_int8_sums_are_exact(path: str, n: int, k: int) -> None:
    generator = torch.Generator().manual_seed(n * k)
    weights = torch.randint(0, 256, (n, k), generator=generator, dtype=torch.uint8)
    inputs = torch.randint(-128, 128, (11, k), generator=generator, dtype=torch.int8)
    weights[0], inputs[0], inputs[1], inputs[2] = 255, -128, 127, torch.tensor([127, -128]).repeat(k // 2)
    expected = inputs.long() @ weights.long().T
    for rows in (1, 2, 3, 5, 8, 11):
        assert torch.equal(native_sums(path, weights, inputs[:rows]).long(), expected[:rows])


@pytest.mark.parametrize("path", paths())
def test_the_widest_int8_sum_fits(path: str) -> None:
    k = MAX_INT8_INPUTS
    weights = torch.full((2, k), 255, dtype=torch.uint8)
    inputs = torch.tensor([[127], [-127]], dtype=torch.int8).expand(2, k).contiguous()
    expected = 255 * 127 * k
    assert native_sums(path, weights, inputs).tolist() == [[expected] * 2, [-expected] * 2]


def test_reference_sums_are_exact() -> None:
    k = 5000
    inputs, weights = torch.full((1, k), -127.0), torch.full((1, k), 127.0)
    assert reference.int8_sums(inputs, weights).item() == -127 * 127 * k


def test_too_many_int8_inputs_are_refused() -> None:
    with pytest.raises(KernelError, match=str(MAX_INT8_INPUTS)):
        pack_linear(torch.zeros(1, MAX_INT8_INPUTS + 1), None, "int8")


@pytest.mark.parametrize("path", [*paths(), "torch reference"])
@pytest.mark.parametrize("form", FORMATS)
@settings(max_examples=8, deadline=None)
@given(n=st.integers(1, 130), k=st.sampled_from([1, 4, 60, 64, 96, 200]), seed=st.integers(0, 99))
def test_no_neighbour_changes_a_row(path: str, form: Format, n: int, k: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight, bias = torch.randn(n, k, generator=generator), torch.randn(n, generator=generator)
    rows = torch.randn(33, k, generator=generator)
    linear = Linear(n, k, form, pack_linear(weight, bias, form), threads=1 + seed % 3, path=path)
    alone = torch.cat([linear(row[None]) for row in rows])
    for count in (2, 3, 5, 8, 9, 33):
        assert torch.equal(linear(rows[:count]), alone[:count])
    exact = rows.double() @ weight.double().T + bias
    bound = {"fp32": 1e-6, "bf16": 4e-3, "int8": 1.6e-2}[form] * (k * rows.square().sum(1, keepdim=True)).sqrt()
    assert ((alone - exact).abs() <= bound * weight.abs().amax() + 1e-6).all()


@pytest.mark.parametrize("form", FORMATS)
def test_threads_change_no_bit(form: Format) -> None:
    weight, rows = torch.randn(201, 130), torch.randn(9, 130)
    packed = pack_linear(weight, None, form)
    found = [Linear(201, 130, form, packed, threads=threads)(rows) for threads in (1, 2, 3, 5, 7)]
    assert all(torch.equal(found[0], other) for other in found)


@pytest.mark.parametrize("path", paths())
@pytest.mark.parametrize("form", FORMATS)
def test_products_are_close_to_the_reference(path: str, form: Format) -> None:
    for seed in range(40):  # a tie that is rounded otherwise moves an input by a whole step, about once in 100 rows
        generator = torch.Generator().manual_seed(seed)
        weight, rows, bias = (torch.randn(shape, generator=generator) for shape in ((77, 300), (20, 300), (77,)))
        packed = pack_linear(weight, bias, form)
        ours = Linear(77, 300, form, packed, path=path)(rows)
        theirs = Linear(77, 300, form, packed, path="torch reference")(rows)
        assert torch.equal(ours, theirs) if form == "int8" else torch.allclose(ours, theirs, atol=1e-4)


def test_a_row_of_zeros_and_a_row_that_is_huge() -> None:
    weight = torch.randn(20, 64)
    weight[3] = 0
    rows = torch.stack([torch.zeros(64), torch.full((64,), 1e30)])
    out = Linear(20, 64, "int8", pack_linear(weight, None, "int8"))(rows)
    assert out.isfinite().all()
    assert not out[0].any()
    assert not out[:, 3].any()


def test_rows_of_another_type_are_refused() -> None:
    linear = Linear(16, 64, "fp32", pack_linear(torch.randn(16, 64), None, "fp32"))
    with pytest.raises(KernelError, match="float32"):
        linear(torch.randn(2, 64).double())
    with pytest.raises(KernelError, match="64"):
        linear(torch.randn(2, 63))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (17, 60), (48, 128)])
def test_layouts_can_be_undone(form: Format, n: int, k: int) -> None:
    weight = torch.randn(n, k)
    packed = pack_linear(weight, None, form)
    found = unpack_linear(packed, n, k, form)
    assert sum(tensor.nbytes for tensor in packed.values()) == packed_bytes(n, k, form)
    if form == "int8":
        assert ((found * packed["scale"][:n, None] - rotate(weight)).abs() <= packed["scale"][:n, None] * 0.501).all()
    else:
        assert torch.equal(found, weight if form == "fp32" else weight.bfloat16().float())


def test_the_rotation_is_orthonormal() -> None:
    assert torch.equal(hadamard() @ hadamard().T, torch.eye(64))
    rows = torch.randn(3, 100)
    assert torch.allclose(rotate(rotate(rows))[:, :100], rows, atol=1e-5)


@pytest.mark.parametrize("path", paths())
def test_the_library_rotates_as_the_matrix_does(path: str) -> None:
    found = library()
    assert found is not None
    row = torch.randn(192)
    out = torch.empty(192)
    found.c.pl_path_rotate(
        ctypes.c_void_p(found.path(path)), ctypes.c_void_p(row.data_ptr()), ctypes.c_void_p(out.data_ptr()), 192
    )
    assert torch.allclose(out, rotate(row[None])[0], atol=1e-5)


def test_embeddings_keep_their_rows() -> None:
    weight = torch.randn(7, 40)
    assert torch.equal(pack_embedding(weight, "fp32")["data"], weight)
    assert torch.equal(pack_embedding(weight, "bf16")["data"], weight.bfloat16())
    small = pack_embedding(weight, "int8")
    assert torch.allclose(small["data"] * small["scale"][:, None], weight, atol=float(weight.abs().amax()) / 250)


@pytest.mark.parametrize("path", paths())
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
def test_activations_do_not_depend_on_the_width(path: str, kind: str) -> None:
    found = library()
    assert found is not None
    gate = torch.cat([torch.linspace(-30, 30, 970), torch.linspace(-0.6, 0.6, 53)])
    up = torch.linspace(-2, 3, 1023)

    def run(n: int) -> Tensor:
        out = torch.empty(n)
        pointers = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (gate, up, out))
        number = {"silu": 0, "gelu": 1, "gelu_tanh": 2}[kind]
        assert found is not None
        found.c.pl_path_activate(ctypes.c_void_p(found.path(path)), number, *pointers, n)
        return out

    whole = run(1023)
    assert torch.allclose(whole, reference.activate(kind, gate, up), atol=3e-6, rtol=3e-6)
    for n in (1, 5, 15, 16, 17, 31, 33, 100, 577):
        assert torch.equal(run(n), whole[:n])

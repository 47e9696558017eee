from __future__ import annotations

import numpy as np
import pytest
import torch

from cairn.errors import PageError
from cairn.memory.landmarks import LandmarkPool, LandmarkShape
from cairn.memory.pages import NULL_PAGE

CPU = torch.device("cpu")
LAYERS, HEADS, WIDTH, PAGES = (1, 4), 3, 5, 6


def shape(
    *, has_bias: bool = True, dtype: torch.dtype = torch.float32, units: int = 1
) -> LandmarkShape:
    return LandmarkShape(LAYERS, HEADS, WIDTH, has_bias, dtype, units)


@pytest.fixture
def pool() -> LandmarkPool:
    return LandmarkPool(shape(), PAGES, CPU)


def seal(pool: LandmarkPool, pages: list[int], generations: list[int]) -> None:
    pool.seal(np.array(pages, dtype=np.int64), np.array(generations, dtype=np.int32))


def valid(pool: LandmarkPool, pages: list[int], generations: list[int]) -> list[bool]:
    result = []
    for layer in LAYERS:
        _, _, is_valid = pool.get(layer, torch.tensor(pages), torch.tensor(generations))
        result.append(is_valid.tolist())
    assert result[0] == result[1]
    return [bool(each) for each in result[0]]


def test_landmarks_come_back_by_page_id_and_layer(pool: LandmarkPool) -> None:
    seal(pool, [5, 2], [1, 3])
    saved = {}
    for layer in LAYERS:
        vectors, bias = torch.randn(2, HEADS, WIDTH), torch.randn(2, HEADS)
        pool.save(layer, torch.tensor([5, 2]), vectors, bias)
        saved[layer] = vectors, bias
    pages, generations = torch.tensor([[2, 5], [5, 2]]), torch.tensor([[3, 1], [1, 3]])
    for layer, (vectors, bias) in saved.items():
        found, found_bias, is_valid = pool.get(layer, pages, generations)
        assert found_bias is not None
        assert is_valid.all()
        for i, j in np.ndindex(2, 2):
            place = [5, 2].index(int(pages[i, j]))
            assert torch.equal(found[i, j], vectors[place])
            assert torch.equal(found_bias[i, j], bias[place])


def test_saving_a_page_leaves_the_others_alone(pool: LandmarkPool) -> None:
    seal(pool, [1, 2], [1, 1])
    pool.save(1, torch.tensor([1, 2]), torch.ones(2, HEADS, WIDTH), torch.ones(2, HEADS))
    seal(pool, [3], [1])
    pool.save(1, torch.tensor([3]), torch.zeros(1, HEADS, WIDTH), torch.zeros(1, HEADS))
    vectors, bias, _ = pool.get(1, torch.tensor([1, 2, 3]), torch.tensor([1, 1, 1]))
    assert bias is not None
    assert vectors.mean((1, 2)).tolist() == bias.mean(1).tolist() == [1, 1, 0]


def test_a_landmark_is_valid_in_its_own_generation_only(pool: LandmarkPool) -> None:
    seal(pool, [4], [7])
    assert valid(pool, [4, 4, 4, 3], [7, 6, 8, 7]) == [True, False, False, False]
    assert pool.generation(4) == 7
    assert pool.generation(3) == 0


def test_a_page_is_sealed_once_per_generation(pool: LandmarkPool) -> None:
    seal(pool, [2, 3], [1, 4])
    with pytest.raises(PageError, match="page 3 already has its landmark"):
        seal(pool, [1, 3], [1, 4])
    # Nothing of what was refused remains.
    assert pool.num_sealed == 2
    assert pool.generation(1) == 0
    assert valid(pool, [1, 2, 3], [1, 1, 4]) == [False, True, True]


def test_a_later_life_of_a_page_is_sealed_anew(pool: LandmarkPool) -> None:
    seal(pool, [2], [1])
    pool.save(1, torch.tensor([2]), torch.ones(1, HEADS, WIDTH), torch.ones(1, HEADS))
    seal(pool, [2], [2])
    pool.save(1, torch.tensor([2]), torch.zeros(1, HEADS, WIDTH), torch.zeros(1, HEADS))
    assert pool.generation(2) == 2
    assert valid(pool, [2, 2], [1, 2]) == [False, True]
    vectors, _, _ = pool.get(1, torch.tensor([2]), torch.tensor([2]))
    assert not vectors.any()


def test_invalidated_pages_have_no_landmark_and_may_be_sealed_again(pool: LandmarkPool) -> None:
    seal(pool, [1, 2, 3], [5, 5, 5])
    pool.invalidate([1, 3])
    assert valid(pool, [1, 2, 3], [5, 5, 5]) == [False, True, False]
    assert [pool.generation(page) for page in (1, 2, 3)] == [0, 5, 0]
    seal(pool, [1], [5])
    assert valid(pool, [1, 2, 3], [5, 5, 5]) == [True, True, False]
    pool.invalidate(np.array([], dtype=np.int64))
    pool.invalidate(np.array([2], dtype=np.int32))
    assert valid(pool, [1, 2, 3], [5, 5, 5]) == [True, False, False]


@pytest.mark.parametrize("generation", [0, 1, 2**31 - 1])
def test_the_null_page_is_never_valid(pool: LandmarkPool, generation: int) -> None:
    assert valid(pool, [NULL_PAGE], [generation]) == [False]
    seal(pool, [1, PAGES], [1, 1])
    assert valid(pool, [NULL_PAGE, 1, PAGES], [generation, 1, 1]) == [False, True, True]


def test_invalidating_does_not_make_the_null_page_valid(pool: LandmarkPool) -> None:
    """Tables hold it with generation 0 where no page is held."""
    pool.invalidate([NULL_PAGE])
    assert valid(pool, [NULL_PAGE], [0]) == [False]


def nbytes_of(pool: LandmarkPool) -> int:
    tensors = (*pool.vectors.values(), *pool.biases.values(), pool.sealed)
    return sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("has_bias", "units"), [(False, 1), (True, 1), (True, 8)])
def test_memory_is_what_the_shape_says_for_every_page_and_the_null_page(
    dtype: torch.dtype, has_bias: bool, units: int
) -> None:
    own = shape(has_bias=has_bias, dtype=dtype, units=units)
    bias_bytes = {torch.float64: 8, torch.float32: 4, torch.bfloat16: 4}[dtype]
    per_head = WIDTH * dtype.itemsize + (bias_bytes if has_bias else 0)
    assert own.page_bytes == units * (len(LAYERS) * HEADS * per_head + 4)
    assert nbytes_of(LandmarkPool(own, PAGES, CPU)) == (PAGES + 1) * own.page_bytes


@pytest.mark.parametrize(
    ("dtype", "wide"), [(torch.float64, torch.float64), (torch.bfloat16, torch.float32)]
)
def test_biases_are_wide_whatever_they_come_as(dtype: torch.dtype, wide: torch.dtype) -> None:
    pool = LandmarkPool(shape(dtype=dtype), PAGES, CPU)
    seal(pool, [1], [1])
    third = torch.full((1, HEADS), 1 / 3, dtype=torch.float64)
    pool.save(1, torch.tensor([1]), torch.ones(1, HEADS, WIDTH, dtype=dtype), third)
    vectors, bias, _ = pool.get(1, torch.tensor([1]), torch.tensor([1]))
    assert bias is not None
    assert (vectors.dtype, bias.dtype) == (dtype, wide)
    assert torch.equal(bias, third.to(wide))


def test_units_of_the_null_page_are_never_valid() -> None:
    pool = LandmarkPool(shape(units=4), PAGES, CPU)
    assert len(pool.sealed) == 4 * (PAGES + 1)
    seal(pool, [5], [1])
    pool.invalidate([1, 3])
    assert valid(pool, [0, 3, 4, 5], [0, 0, 0, 1]) == [False, False, True, True]


def test_without_bias_none_is_kept(pool: LandmarkPool) -> None:
    bare = LandmarkPool(shape(has_bias=False), PAGES, CPU)
    seal(bare, [1], [1])
    bare.save(1, torch.tensor([1]), torch.ones(1, HEADS, WIDTH), None)
    vectors, bias, is_valid = bare.get(1, torch.tensor([1]), torch.tensor([1]))
    assert bias is None
    assert vectors.all() and is_valid.all()
    assert nbytes_of(bare) < nbytes_of(pool)


def test_sealed_pages_are_counted_for_ever(pool: LandmarkPool) -> None:
    assert pool.num_sealed == 0
    seal(pool, [1, 2], [1, 1])
    seal(pool, [1], [2])
    pool.invalidate([1, 2])
    assert pool.num_sealed == 3
    pool.get(1, torch.tensor([1]), torch.tensor([1]))
    seal(pool, [], [])
    assert pool.num_sealed == 3

"""The demo's model: however an engine is split, its tokens and its cache are bitwise the same."""

import multiprocessing
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain

import numpy as np
import numpy.typing as npt
import pytest

from kvbridge.demo import engine as engine_module
from kvbridge.demo.cache import Halves, PageAllocator, PagedCache
from kvbridge.demo.collective import Group, Rank, connect_ranks
from kvbridge.demo.engine import RankEngine, generate, pages_needed
from kvbridge.demo.model import (
    SOFTMAX_GRID_BITS,
    ModelConfig,
    attend,
    attention_weights,
    layer_weights,
    on_grid,
    rms_norm,
    swiglu,
)
from kvbridge.demo.shape import EngineShape, head_range, layer_range, query_heads

PROMPT = b"Two engines of different shape, one answer: the cache may move, the tokens may not."
NEW_TOKENS = 6
SMALL = ModelConfig(layers=2, query_heads_per_kv=2, head_dim=8, hidden=32, mlp_hidden=48)


@pytest.fixture(autouse=True, scope="module")
def single_blas_thread() -> Iterator[None]:
    """Keep products so small that OpenBLAS does not start threads, which are slow when busy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "PREFILL_CHUNK_TOKENS", 8)
        yield


def generate_reference(
    config: ModelConfig, prompt: bytes, tokens: int, page: int = 16
) -> list[int]:
    """Return what the unsplit engine says after a prompt: the same code on one rank."""
    pages = max(1, pages_needed(len(prompt), tokens, page))
    engine = RankEngine(config, EngineShape(page=page), Group(), pages)
    page_ids = PageAllocator(pages).allocate(pages)
    engine.prefill(page_ids, prompt[:-1])
    return generate(engine, page_ids, prompt, tokens)


class Request:
    """One sequence in one engine, whose ranks run as threads."""

    def __init__(self, config: ModelConfig, shape: EngineShape, prompt: bytes = PROMPT) -> None:
        count = pages_needed(len(prompt), NEW_TOKENS, shape.page)
        pages = count + 3
        self.prompt = prompt
        self.page_ids = PageAllocator(pages, seed=pages).allocate(count)
        groups = connect_ranks(shape.pp, shape.tp, timeout_s=10)
        self.ranks = {
            rank: RankEngine(config, shape, group, pages) for rank, group in groups.items()
        }

    def prefill(self) -> None:
        with ThreadPoolExecutor(len(self.ranks)) as pool:
            work = [
                pool.submit(each.prefill, self.page_ids, self.prompt[:-1])
                for each in self.ranks.values()
            ]
        for done in work:
            done.result()

    def decode(self) -> list[list[int]]:
        """Return what each rank says."""
        with ThreadPoolExecutor(len(self.ranks)) as pool:
            work = [
                pool.submit(generate, each, self.page_ids, self.prompt, NEW_TOKENS)
                for each in self.ranks.values()
            ]
        return [done.result() for done in work]

    def close(self) -> None:
        for each in self.ranks.values():
            each.group.close()


def bits(part: Halves) -> npt.NDArray[np.uint16]:
    """As integers, because NaN never equals itself."""
    return part.view(np.uint16)


def move(source: Request, destination: Request) -> None:
    """Do what a transfer does, cell by cell: each destination rank takes what it holds."""
    tokens = len(source.prompt) - 1
    for taker in destination.ranks.values():
        for giver in source.ranks.values():
            for layer in set(taker.layers) & set(giver.layers):
                k, v = giver.cache.gather(layer, source.page_ids, tokens)
                held_k, held_v = taker.cache.gather(layer, destination.page_ids, tokens)
                for head in set(taker.kv_heads) & set(giver.kv_heads):
                    there, here = head - taker.kv_heads.start, head - giver.kv_heads.start
                    held_k[:, there], held_v[:, there] = k[:, here], v[:, here]
                taker.cache.write(layer, destination.page_ids, 0, held_k, held_v)


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        ("", {}),
        ("tp=2", {}),
        ("tp=4,layout=hnd,page=32", {}),
        ("tp=3,kv=apart", {"kv_heads": 6}),
        ("tp=3,layout=hnd,kv=apart,page=5", {"kv_heads": 4}),
        ("tp=8", {"kv_heads": 4}),
        ("tp=6,page=1", {"kv_heads": 4, "query_heads_per_kv": 1}),
        ("pp=2", {"layers": 5}),
        ("pp=3,tp=2,page=8", {"layers": 4}),
    ],
)
def test_split_engine_equals_unsplit(shape: str, sizes: dict[str, int]) -> None:
    config = replace(SMALL, **sizes)
    whole, split = Request(config, EngineShape()), Request(config, EngineShape.parse(shape))
    for request in (whole, split):
        request.prefill()
    expected = whole.decode()[0]
    assert expected == generate_reference(config, PROMPT, NEW_TOKENS)
    assert split.decode() == [expected] * len(split.ranks)

    tokens = len(PROMPT) + NEW_TOKENS - 1
    unsplit = whole.ranks[0, 0].cache
    for rank in split.ranks.values():
        heads = slice(rank.kv_heads.start, rank.kv_heads.stop)
        for layer in rank.layers:
            for mine, all_heads in zip(
                rank.cache.gather(layer, split.page_ids, tokens),
                unsplit.gather(layer, whole.page_ids, tokens),
                strict=True,
            ):
                assert np.array_equal(bits(mine), bits(all_heads[:, heads].copy()))
    split.close()


def test_decode_continues_from_moved_bytes_in_an_engine_of_another_shape() -> None:
    config = replace(SMALL, layers=3)
    source = Request(config, EngineShape.parse("tp=3,pp=2,page=16"))
    destination = Request(config, EngineShape.parse("tp=2,page=6,layout=hnd,kv=apart"))
    source.prefill()
    move(source, destination)
    assert destination.decode() == [generate_reference(config, PROMPT, NEW_TOKENS)] * 2
    source.close()
    destination.close()


def test_prompt_of_one_byte_moves_nothing() -> None:
    request = Request(SMALL, EngineShape(tp=2), b"?")
    request.prefill()
    assert all((rank.cache.buffer == 0xFF).all() for rank in request.ranks.values())
    assert request.decode() == [generate_reference(SMALL, b"?", NEW_TOKENS)] * 2
    request.close()


def test_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt is empty"):
        generate_reference(SMALL, b"", 1)


def test_no_new_tokens_are_none() -> None:
    assert generate_reference(SMALL, b"?", 0) == []


@pytest.mark.parametrize("chunk_tokens", [1, 128])
def test_cache_does_not_depend_on_the_batch(
    chunk_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, other = (Request(ModelConfig(layers=2), EngineShape()) for _ in range(2))
    usual.prefill()
    monkeypatch.setattr(engine_module, "PREFILL_CHUNK_TOKENS", chunk_tokens)
    other.prefill()
    assert np.array_equal(usual.ranks[0, 0].cache.buffer, other.ranks[0, 0].cache.buffer)


def test_sums_are_exact_in_any_order() -> None:
    """The floor under everything above: on the grid, no addition rounds."""
    random = np.random.default_rng(0)
    config = ModelConfig()
    weights = layer_weights(config, 0, range(4), range(16))
    x = on_grid(random.standard_normal((5, config.hidden)) * 4)
    shuffle = random.permutation(config.hidden)
    assert np.array_equal(rms_norm(x[:, shuffle]), rms_norm(x)[:, shuffle])
    normed = rms_norm(x)
    for matrix in (weights.query, weights.key, weights.value, weights.gate):
        assert np.array_equal(normed[:, shuffle] @ matrix[shuffle], normed @ matrix)
    inner = random.permutation(config.mlp_hidden)
    shuffled = replace(
        weights,
        gate=weights.gate[:, inner],
        up=weights.up[:, inner],
        down=weights.down[inner],
    )
    assert np.array_equal(swiglu(normed, shuffled), swiglu(normed, weights))

    key, value = on_grid(random.standard_normal((2, 400, config.head_dim)) * 2)
    softmax = attention_weights(key, key, 0)
    assert np.array_equal(softmax, np.tril(on_grid(softmax, SOFTMAX_GRID_BITS)))
    context = random.permutation(400)
    attended = attend(key[-1:], key, value, 399)
    assert np.array_equal(attend(key[-1:], key[context], value[context], 399), attended)


# What the proof by tokens is worth: wrong bytes must show.


@pytest.fixture(scope="module")
def filled() -> tuple[Request, npt.NDArray[np.uint8]]:
    """A request after its prefill, and the bytes of its cache then."""
    request = Request(ModelConfig(), EngineShape())
    request.prefill()
    return request, request.ranks[0, 0].cache.buffer.copy()


def damage(cache: PagedCache, page_ids: Sequence[int], how: str) -> None:
    one, other = page_ids[1:3]
    if how == "nothing arrived":
        cache.buffer[:] = 0xFF
    elif how == "one page of one head of one layer":
        cache.arrays[1][0][one][:, :, 2] = cache.arrays[1][0][other][:, :, 2]
    for (array,) in cache.arrays.values():
        if how == "swapped pages":
            array[[one, other]] = array[[other, one]]
        elif how == "K and V exchanged in one page":
            array[one] = array[one, ::-1].copy()


@pytest.mark.parametrize(
    "how",
    [
        "swapped pages",
        "one page of one head of one layer",
        "K and V exchanged in one page",
        "nothing arrived",
    ],
)
def test_wrong_bytes_change_the_tokens(
    how: str, filled: tuple[Request, npt.NDArray[np.uint8]]
) -> None:
    request, clean = filled
    cache = request.ranks[0, 0].cache
    cache.buffer[:] = clean
    right = request.decode()
    cache.buffer[:] = clean
    damage(cache, request.page_ids, how)
    assert request.decode() != right


def test_greedy_decoding_is_not_degenerate() -> None:
    prompts = [PROMPT[:30], PROMPT[1:30], PROMPT[:29] + b"?", b"T", b"a" * 16]
    answers = [generate_reference(ModelConfig(), prompt, 16) for prompt in prompts]
    assert len({tuple(answer) for answer in answers}) == len(prompts)
    assert all(len(set(answer)) >= 6 for answer in answers)
    assert generate_reference(ModelConfig(seed=1), prompts[0], 16) != answers[0]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"kv_heads": 0}, "kv_heads is 0; it must be >= 1"),
        ({"layers": -1}, "layers is -1; it must be >= 1"),
        ({"hidden": 0}, "hidden is 0"),
        ({"head_dim": 7}, "head_dim is 7; it must be even"),
        ({"seed": -1}, "seed is -1; it must be >= 0"),
    ],
)
def test_impossible_models_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        ModelConfig(**sizes)
    assert "\n" not in str(caught.value)


# Shapes.


def test_shape_is_parsed_and_printed() -> None:
    assert EngineShape.parse("") == EngineShape(1, 1, 16, "nhd", "together")
    shape = EngineShape.parse(" tp=2, page=32,layout=hnd,kv=apart ")
    assert shape == EngineShape(tp=2, page=32, layout="hnd", kv="apart")
    assert EngineShape.parse(str(shape)) == shape


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("dp=2", ["dp", "tp, pp, page, layout, kv"]),
        ("tp=two", ["tp=two", "whole number >= 1"]),
        ("tp", ["tp=", "whole number >= 1"]),
        ("pp=0", ["pp=0", "whole number >= 1"]),
        ("page=-4", ["page=-4", "whole number >= 1"]),
        ("page=1_6", ["page=1_6", "whole number >= 1"]),
        ("layout=ndh", ["layout=ndh", "nhd or hnd"]),
        ("kv=joint", ["kv=joint", "together or apart"]),
        ("tp=2,tp=4", ["tp is given twice"]),
    ],
)
def test_wrong_shapes_are_refused_in_one_line(text: str, parts: list[str]) -> None:
    with pytest.raises(ValueError, match="engine shape") as caught:
        EngineShape.parse(text)
    assert all(part in str(caught.value) for part in parts)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("pp", [1, 2, 3, 5])
def test_stages_share_out_the_layers(pp: int) -> None:
    stages = [layer_range(5, pp, stage) for stage in range(pp)]
    assert list(chain(*stages)) == list(range(5))
    assert max(map(len, stages)) - min(map(len, stages)) <= 1


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"pp=3 .* only 2 layer"):
        layer_range(2, 3, 0)
    with pytest.raises(ValueError, match="no stage 2 with pp=2"):
        layer_range(2, 2, 2)


@pytest.mark.parametrize("kv_heads", [1, 4, 6])
@pytest.mark.parametrize("tp", [1, 2, 3, 4, 6, 8, 13])
@pytest.mark.parametrize("query_heads_per_kv", [1, 4])
def test_ranks_share_out_the_heads(kv_heads: int, tp: int, query_heads_per_kv: int) -> None:
    held = [head_range(kv_heads, tp, rank) for rank in range(tp)]
    computed = [query_heads(kv_heads, query_heads_per_kv, tp, rank) for rank in range(tp)]
    assert set(chain(*held)) == set(range(kv_heads))
    assert all(held)
    assert list(chain(*computed)) == list(range(kv_heads * query_heads_per_kv))
    for mine, queries in zip(held, computed, strict=True):
        assert {query // query_heads_per_kv for query in queries} <= set(mine)


# The cache.


@pytest.mark.parametrize(
    ("shape", "axes", "array_shape"),
    [
        ("layout=nhd", "BKNHC", (5, 2, 4, 3, 8)),
        ("layout=hnd", "BKHNC", (5, 2, 3, 4, 8)),
        ("layout=nhd,kv=apart", "BNHC", (5, 4, 3, 8)),
        ("layout=hnd,kv=apart", "BHNC", (5, 3, 4, 8)),
    ],
)
def test_cache_arrays_are_views_of_one_poisoned_buffer(
    shape: str, axes: str, array_shape: tuple[int, ...]
) -> None:
    layers = range(2, 4)
    cache = PagedCache(layers, range(1, 4), 8, EngineShape.parse(f"page=4,{shape}"), pages=5)
    assert cache.axes == axes
    arrays = [array for layer in layers for array in cache.arrays[layer]]
    assert len(arrays) == len(layers) * len(cache.parts)
    assert {array.shape for array in arrays} == {array_shape}
    assert sum(array.nbytes for array in arrays) == cache.buffer.nbytes
    assert all(np.isnan(array).all() for array in arrays)

    k, v = np.random.default_rng(0).standard_normal((2, 6, 3, 8)).astype(np.float16)
    before = cache.buffer.copy()
    cache.write(3, [4, 0, 2], 3, k, v)
    stored_k, stored_v = cache.gather(3, [4, 0, 2], 9)
    assert np.array_equal(stored_k[3:], k)
    assert np.array_equal(stored_v[3:], v)
    assert np.isnan(stored_k[:3]).all()
    assert np.count_nonzero(cache.buffer != before) <= k.nbytes + v.nbytes
    assert all(np.isnan(array).all() for array in cache.arrays[2])
    first_token = [array[4].take(3, axis=axes.index("N") - 1) for array in cache.arrays[3]]
    assert np.array_equal(np.concatenate(first_token, axis=None), np.stack([k[0], v[0]]).ravel())


def test_cache_refuses_tokens_beyond_the_pages() -> None:
    cache = PagedCache(range(1), range(1), 2, EngineShape(page=4), pages=3)
    with pytest.raises(ValueError, match="hold 8 tokens; token 8 lies beyond"):
        cache.gather(0, [2, 1], 9)
    with pytest.raises(ValueError, match="pages is 0"):
        PagedCache(range(1), range(1), 2, EngineShape(), pages=0)


def test_allocator_scatters_and_takes_back_once() -> None:
    allocator = PageAllocator(32, seed=1)
    taken = allocator.allocate(32)
    assert sorted(taken) == list(range(32))
    assert np.mean(np.diff(taken) == 1) < 0.2
    with pytest.raises(ValueError, match="1 pages asked for, 0 free"):
        allocator.allocate(1)
    allocator.free(taken[:4])
    for wrong in (taken[:1], [taken[9], taken[9]], [taken[9], 99]):
        with pytest.raises(ValueError, match="cannot free"):
            allocator.free(wrong)
    assert allocator.allocate(4) == taken[:4]


# The group.


def test_waits_end_and_name_the_ranks() -> None:
    groups = connect_ranks(2, 2, timeout_s=0.05)
    large = np.zeros((1000, 1000))
    with pytest.raises(TimeoutError, match=r"rank \(0, 0\) waited 0.05 s for rank \(0, 1\)"):
        groups[0, 0].all_gather(large)
    with pytest.raises(TimeoutError, match=r"rank \(0, 1\) .* for rank \(0, 0\) to accept"):
        groups[0, 1].all_gather(large)
    with pytest.raises(TimeoutError, match=r"rank \(1, 1\) .* for rank \(0, 1\) to send"):
        groups[1, 1].receive_previous()
    groups[0, 1].close()
    with pytest.raises(ConnectionError, match=r"rank \(1, 1\): rank \(0, 1\) has gone"):
        groups[1, 1].receive_previous()
    with pytest.raises(ConnectionError, match=r"rank \(1, 1\): rank \(0, 1\) has gone"):
        groups[1, 1].send_next(large)
    for group in groups.values():
        group.close()


def test_group_of_one_has_no_neighbours() -> None:
    alone = Group()
    matrix = np.ones((2, 3))
    assert alone.all_gather(matrix) == [matrix]
    assert alone.share_from_last(matrix) is matrix
    with pytest.raises(ValueError, match="no other stage"):
        alone.send_next(matrix)
    with pytest.raises(ValueError, match=r"tp=1,pp=1"):
        RankEngine(SMALL, EngineShape(tp=2), alone, 1)


def gather_own_rank(group: Group) -> None:
    gathered = group.all_gather(np.array([[*group.rank]], np.float64))
    if not group.is_first:
        gathered.append(group.receive_previous())
    if not group.is_last:
        group.send_next(gathered[0])
    told = group.share_from_last(np.concatenate(gathered) if group.is_last else None)
    expected = [[1, 0], [1, 1], [0, 0]]
    if told.tolist() != expected:
        raise ValueError(f"rank {group.rank} was told {told}")


@pytest.mark.multi_process
def test_groups_work_in_processes_and_death_shows() -> None:
    groups = connect_ranks(2, 2, timeout_s=30)
    context = multiprocessing.get_context("spawn")
    ranks: dict[Rank, multiprocessing.process.BaseProcess] = {
        rank: context.Process(target=gather_own_rank, args=(group,), daemon=True)
        for rank, group in groups.items()
        if rank != (1, 1)
    }
    for process in ranks.values():
        process.start()
    for rank in ranks:
        groups[rank].close()
    gather_own_rank(groups[1, 1])
    for process in ranks.values():
        process.join(30)
        assert process.exitcode == 0
    start = time.monotonic()
    with pytest.raises(ConnectionError, match=r"rank \(1, 0\) has gone"):
        groups[1, 1].star[0].receive()
    assert time.monotonic() - start < 10
    groups[1, 1].close()

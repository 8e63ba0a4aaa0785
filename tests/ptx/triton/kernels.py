"""Triton kernels that the simulator is tested with: right ones, and twins with a fault."""

import triton
import triton.language as tl


@triton.jit
def vector_add(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    tl.store(out + i, tl.load(x + i, mask=inside) + tl.load(y + i, mask=inside), mask=inside)


@triton.jit
def vector_add_outside(x, y, out, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i) + tl.load(y + i))


@triton.jit
def softmax(x, out, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    value = tl.load(x + row * n + i, mask=i < n, other=-float("inf"))
    power = tl.exp(value - tl.max(value, 0))
    tl.store(out + row * n + i, power / tl.sum(power, 0), mask=i < n)


@triton.jit
def layer_norm(x, weight, bias, out, n, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    inside = i < n
    value = tl.load(x + row * n + i, mask=inside, other=0.0)
    centred = tl.where(inside, value - tl.sum(value, 0) / n, 0.0)
    scale = 1 / tl.sqrt(tl.sum(centred * centred, 0) / n + eps)
    result = centred * scale * tl.load(weight + i, mask=inside) + tl.load(bias + i, mask=inside)
    tl.store(out + row * n + i, result, mask=inside)


@triton.jit
def matmul(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), dtype=tl.float32 if c.dtype.element_ty != tl.int32 else tl.int32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        left = tl.load(a + rows[:, None] * K + k[None, :], mask=(rows[:, None] < M) & (k[None, :] < K), other=0)
        right = tl.load(b + k[:, None] * N + cols[None, :], mask=(k[:, None] < K) & (cols[None, :] < N), other=0)
        total = tl.dot(left, right, total)
    inside = (rows[:, None] < M) & (cols[None, :] < N)
    tl.store(c + rows[:, None] * N + cols[None, :], total.to(c.dtype.element_ty), mask=inside)


@triton.jit
def attention(q, k, v, out, S, scale, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    dims = tl.arange(0, D)
    queries = tl.load(q + rows[:, None] * D + dims[None, :], mask=rows[:, None] < S, other=0.0)
    most = tl.full((BM,), -float("inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    result = tl.zeros((BM, D), tl.float32)
    for start in range(0, S, BN):
        keys = start + tl.arange(0, BN)
        key = tl.load(k + keys[None, :] * D + dims[:, None], mask=keys[None, :] < S, other=0.0)
        score = tl.where(keys[None, :] < S, tl.dot(queries, key) * scale, -float("inf"))
        more = tl.maximum(most, tl.max(score, 1))
        weight = tl.exp(score - more[:, None])
        shrink = tl.exp(most - more)
        total = total * shrink + tl.sum(weight, 1)
        value = tl.load(v + keys[:, None] * D + dims[None, :], mask=keys[:, None] < S, other=0.0)
        result = result * shrink[:, None] + tl.dot(weight.to(v.dtype.element_ty), value)
        most = more
    tl.store(
        out + rows[:, None] * D + dims[None, :],
        (result / total[:, None]).to(out.dtype.element_ty),
        mask=rows[:, None] < S,
    )


@triton.jit
def atomics(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n, other=0)
    tl.atomic_add(out + value % 8, 1, mask=i < n)
    tl.atomic_max(out + 8, tl.max(value, 0), sem="release", scope="gpu")
    tl.atomic_or(out + 9, 1 << tl.program_id(0), sem="acq_rel", scope="sys")


@triton.jit
def locked(flag, total, x, BLOCK: tl.constexpr):
    part = tl.sum(tl.load(x + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)), 0)
    while tl.atomic_cas(flag, 0, 1) == 1:
        pass
    before = tl.load(total)
    tl.debug_barrier()
    tl.store(total, before + part)
    tl.debug_barrier()
    tl.atomic_xchg(flag, 0)


@triton.jit
def unlocked(total, x, BLOCK: tl.constexpr):
    part = tl.sum(tl.load(x + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)), 0)
    tl.store(total, tl.load(total) + part)


@triton.jit
def arrange(x, out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    value = tl.load(x + i)
    tl.store(out + i, tl.cumsum(value, 0))
    tl.store(out + BLOCK + i, tl.sort(value))
    tl.store(out + 2 * BLOCK + i, tl.flip(value))
    tl.device_assert(value < 1000, "a large value")


@triton.jit
def matmul_described(a, b, c, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    row, col = tl.program_id(0) * BM, tl.program_id(1) * BN
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        total = tl.dot(a.load([row, k]), b.load([k, col]), total)
    c.store([row, col], total.to(tl.float16))


@triton.jit
def in_place(x, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(x + i, tl.load(x + i) + 1)


@triton.jit
def in_place_of_neighbours(x, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(x + i, tl.load(x + i) + tl.load(x + i + 1))


@triton.jit
def matmul_by_own_maps(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Tiles of c, taken by turns; the tensor maps are made on the device."""
    rows = tl.make_tensor_descriptor(a, shape=[M, K], strides=[K, 1], block_shape=[BM, BK])
    columns = tl.make_tensor_descriptor(b, shape=[N, K], strides=[K, 1], block_shape=[BN, BK])
    tiles = tl.make_tensor_descriptor(c, shape=[M, N], strides=[N, 1], block_shape=[BM, BN])
    across = tl.cdiv(N, BN)
    for tile in range(tl.program_id(0), tl.cdiv(M, BM) * across, tl.num_programs(0)):
        m, n = tile // across * BM, tile % across * BN
        total = tl.zeros((BM, BN), tl.float32)
        for k in range(0, K, BK):
            total = tl.dot(rows.load([m, k]), columns.load([n, k]).T, total)
        tiles.store([m, n], total.to(tl.float16))

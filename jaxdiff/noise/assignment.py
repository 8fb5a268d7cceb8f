"""Linear assignment on the device: exact, batched, with a certificate.

    pi = argmin over permutations of sum_i c_i,pi(i)

Assignment is a linear program with the dual max sum_j v_j + sum_i min_j (c_ij - v_j). Prices v and a partial
matching are optimal together when every matched row sits at a cheapest column of c_ij - v_j:

1. auction: each free row of a block bids for its cheapest column, lowering v there until the row's second choice is as
   cheap (less a step), and frees the row that held it. Steps shrink from phase to phase; with none left, the last
   phase keeps the matching optimal for the prices. It leaves a few rows free, where an auction is slow;
2. shortest augmenting paths: for each row left, Dijkstra's search over columns of c_ij - u_i - v_j, one vector
   operation per column, then prices and matching change along the shortest path (Jonker & Volgenant 1987);
3. certificate: for any v, sum_i [c_i,pi(i) - v_pi(i) - min_j (c_ij - v_j)] bounds the cost above the optimum.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

STEPS = (0.07, 0.005, 0.0)  # of the auction's phases, in RMS of the centred cost
LAST_STEP = 0.002  # near-exact: in place of the last zero
LEFT = 0.5  # times sqrt(n): rows a phase leaves free
FOLD = 8  # columns are folded this many times before a search: vectorised, unlike a serial reduction
INF = np.float32(np.inf)
State: TypeAlias = tuple[Array, ...]  # of a while loop


class Assignment(NamedTuple):
    """A solved assignment. A cost that is not finite has permutation -1 everywhere and gap NaN."""

    permutation: Int[Array, "*batch n"]  # row i gets column permutation[i]
    gap: Float[Array, "*batch"]  # total cost above the optimum, at most
    rounds: Int[Array, "*batch"]  # of the auction
    scans: Int[Array, "*batch"]  # columns scanned by the searches


def linear_assignment(cost: Shaped[Array, ...], *, exact: bool = True) -> Int[Array, "... n"]:
    """The permutation [..., n] of least total cost [..., n, n]: row i gets column permutation[i].

    It is -1 everywhere if a cost is not finite. Exact up to float32 rounding; with `exact=False` the last step of the
    auction is small instead of zero, which on images and noise loses less than 1e-5 of the gain over any fixed pairing
    and is little faster. `solve` also returns the certificate.
    """
    return solve(cost, exact=exact).permutation


@partial(jax.jit, static_argnames="exact")
def solve(cost: Shaped[Array, ...], *, exact: bool = True) -> Assignment:
    """Linear assignment with its optimality gap, for each matrix of a batch."""
    if cost.ndim < 2 or cost.shape[-1] != cost.shape[-2] or not cost.shape[-1]:
        raise ValueError(
            f"linear_assignment got a cost of shape {cost.shape}; it must end in two equal sizes [..., n, n] with "
            "n >= 1: pad the shorter side with a constant to assign rectangles"
        )
    flat = cost.reshape(-1, *cost.shape[-2:]).astype(jnp.float32)
    # CPUs are fastest with few rows at a time and one problem after the other, accelerators with the opposite.
    narrow, wide = partial(_solve, exact=exact, block=32), partial(_solve, exact=exact, block=128)
    found = lax.platform_dependent(flat, cpu=partial(lax.map, narrow), default=jax.vmap(wide))
    return jax.tree.map(lambda leaf: leaf.reshape(*cost.shape[:-2], *leaf.shape[1:]), found)


def _solve(cost: Float[Array, "n n"], exact: bool, block: int) -> Assignment:
    n, finite = len(cost), jnp.isfinite(cost).all()
    cost, scale = _scaled(jnp.where(finite, cost, 0))
    if n == 1:
        return _flagged(Assignment(jnp.zeros(1, jnp.int32), jnp.float32(0), jnp.int32(0), jnp.int32(0)), finite)
    means = cost.mean(0)
    centred = cost - means
    centred = centred - centred.mean(1, keepdims=True)
    size = jnp.sqrt(jnp.square(centred).mean())
    padded = jnp.pad(centred, ((0, 0), (0, -n % FOLD)), constant_values=INF)
    steps = size * jnp.array(STEPS if exact else (*STEPS[:-1], LAST_STEP), jnp.float32)
    prices = _filled(padded, 0.0, padded.shape[1])
    prices, (owners, rounds) = lax.scan(partial(_auction, padded, min(block, n)), prices, steps)
    prices, permutation, scans = _augment(padded, prices, owners[-1])
    gap = scale * _gap(cost, prices[:n] + means, permutation)
    return _flagged(Assignment(permutation, gap, rounds.sum(dtype=jnp.int32), scans), finite)


def _scaled(cost: Float[Array, "n n"]) -> tuple[Float[Array, "n n"], Float[Array, ""]]:
    """The cost over the power of two below its largest entry, exactly: sums then neither overflow nor underflow."""
    top = lax.bitcast_convert_type(jnp.abs(cost).max(), jnp.int32)
    scale = lax.bitcast_convert_type(top & 0x7F800000, jnp.float32)
    scale = jnp.where(scale > 0, scale, 1)
    return cost / scale, scale


def _flagged(found: Assignment, finite: Bool[Array, ""]) -> Assignment:
    permutation = jnp.where(finite, found.permutation, -1)
    return found._replace(permutation=permutation, gap=jnp.where(finite, found.gap, jnp.nan))


def _filled(like: Array, value: float | np.float32, *shape: int) -> Array:
    """The initial value of a loop; inside `shard_map` it varies over devices as `like` does."""
    return lax.full_like(like, value, jnp.int32 if isinstance(value, int) else jnp.float32, shape)


def _gap(cost: Float[Array, "n n"], prices: Float[Array, " n"], permutation: Int[Array, " n"]) -> Float[Array, ""]:
    margin = cost - prices
    return (jnp.take_along_axis(margin, permutation[:, None], 1)[:, 0] - margin.min(1)).sum()


def first(hit: Bool[Array, "*k n"]) -> Int[Array, "*k"]:
    """Index of the first true entry, the last index if there is none; cheaper than an argmax on CPU."""
    last = hit.shape[-1] - 1
    return jnp.where(hit, jnp.arange(last + 1, dtype=jnp.int32), last).min(-1)


def _two_cheapest(
    cost: Float[Array, "n m"], prices: Float[Array, " m"], rows: Int[Array, " k"]
) -> tuple[Int[Array, " k"], Float[Array, " k"]]:
    """The cheapest column of each row and by how much the second cheapest costs more."""
    margin, width = cost[rows] - prices, cost.shape[1] // FOLD
    folded = margin[:, :width]
    for start in range(width, FOLD * width, width):
        folded = jnp.minimum(folded, margin[:, start : start + width])
    best = folded.min(1)
    place = first(folded == best[:, None])
    elsewhere = jnp.where(jnp.arange(width) == place[:, None], INF, folded).min(1)
    columns = place[:, None] + width * jnp.arange(FOLD, dtype=jnp.int32)
    here = cost[rows[:, None], columns] - prices[columns]
    part = first(here == best[:, None])
    second = jnp.minimum(elsewhere, jnp.where(jnp.arange(FOLD) == part[:, None], INF, here).min(1))
    return place + width * part, second - best


def _auction(
    cost: Float[Array, "n m"], block: int, prices: Float[Array, " m"], step: Float[Array, ""]
) -> tuple[Float[Array, " m"], tuple[Int[Array, " m"], Int[Array, ""]]]:
    """Prices, owner of each column (-1: none) and rounds of one phase, which begins with every row free.

    The free rows in the block bid together. The winner of an owned column is replaced in the block by its
    former owner, the winner of a free one by the next row that has not bid yet.
    """
    n, m = cost.shape
    left, limit = max(1, int(LEFT * n**0.5)), 32 + 4 * -(-n // block)
    slots = jnp.arange(block)

    def more(state: State) -> Bool[Array, ""]:
        rows, fresh, _, _, rounds = state
        return (n - fresh + (rows >= 0).sum(dtype=jnp.int32) > left) & (rounds < limit)

    def bid(state: State) -> State:
        rows, fresh, prices, owner, rounds = state
        empty = (rows < 0).astype(jnp.int32)
        following = fresh + jnp.cumsum(empty, dtype=jnp.int32) - 1
        rows = jnp.where(empty > 0, jnp.where(following < n, following, -1), rows)
        fresh = jnp.minimum(n, fresh + empty.sum(dtype=jnp.int32))
        column, lead = _two_cheapest(cost, prices, jnp.maximum(rows, 0))
        offer, held = jnp.where(rows >= 0, lead + step, -1), owner[column]
        above = (offer > offer[:, None]) | ((offer == offer[:, None]) & (slots < slots[:, None]))
        stuck = (offer <= 0) & (held >= 0)  # a tie, which would oscillate: left to the searches
        wins = (rows >= 0) & ~stuck & ~((column == column[:, None]) & above).any(1)
        target = jnp.where(wins, column, m)
        owner = owner.at[target].set(rows, mode="drop")
        prices = prices.at[target].add(-offer, mode="drop")
        return jnp.where(wins, held, jnp.where(stuck, -1, rows)), fresh, prices, owner, rounds + 1

    begin: State = _filled(cost, -1, block), _filled(cost, 0), prices, _filled(cost, -1, m), _filled(cost, 0)
    _, _, prices, owner, rounds = lax.while_loop(more, bid, begin)
    return prices, (owner, rounds)


def _augment(
    cost: Float[Array, "n m"], prices: Float[Array, " m"], owner: Int[Array, " m"]
) -> tuple[Float[Array, " m"], Int[Array, " n"], Int[Array, ""]]:
    """Prices, permutation and scans after a shortest augmenting path from every row that owns no column."""
    n, m = cost.shape
    columns = jnp.arange(m, dtype=jnp.int32)
    column = _filled(cost, -1, n).at[jnp.where(owner >= 0, owner, n)].set(columns, mode="drop")

    def more(state: State) -> Bool[Array, ""]:
        _, _, column, paths, _ = state
        return (column < 0).any() & (paths < n)

    def augment(state: State) -> State:
        prices, owner, column, paths, scans = state
        # Under vmap finished members get here too: a root of -1 starts neither loop.
        root = jnp.where((column < 0).any(), first(column < 0), -1)
        end, path, prices, scanned = _search(cost, prices, owner, root)
        owner, column = _flip(owner, column, path, end, root)
        return prices, owner, column, paths + 1, scans + scanned

    begin: State = prices, owner, column, _filled(cost, 0), _filled(cost, 0)
    prices, _, column, _, scans = lax.while_loop(more, augment, begin)
    return prices, column, scans


def _search(
    cost: Float[Array, "n m"], prices: Float[Array, " m"], owner: Int[Array, " m"], root: Int[Array, ""]
) -> tuple[Int[Array, ""], Int[Array, " m"], Float[Array, " m"], Int[Array, ""]]:
    """The nearest free column of a row, the row each column is reached from, the new prices and the columns scanned.

    A column's distance is final once it is scanned, `settled` until then infinite; the search continues at its owner.
    Of columns equally near, free ones come first, which ends the search early when costs tie.
    """
    n, m = cost.shape
    order = jnp.arange(m, dtype=jnp.int32) + jnp.where(owner >= 0, m, 0)

    def more(state: State) -> Bool[Array, ""]:
        return (state[0] >= 0) & (state[-1] < n)

    def scan(state: State) -> State:
        row, offset, near, path, settled, _, _, scans = state
        margin, done = cost[row] - prices + offset, settled < INF
        path = jnp.where((margin < near) & ~done, row, path)
        near = jnp.where(done, INF, jnp.minimum(near, margin))
        least = near.min()
        end = jnp.where(near == least, order, 2 * m - 1).min() % m
        row = owner[end]
        offset = least - (cost[jnp.maximum(row, 0), end] - prices[end])
        return row, offset, near, path, settled.at[end].set(least), least, end, scans + 1

    far, zero = _filled(cost, INF, m), _filled(cost, 0.0)
    begin: State = root, zero, far, _filled(cost, 0, m), far, zero, _filled(cost, -1), _filled(cost, 0)
    _, _, _, path, settled, least, end, scans = lax.while_loop(more, scan, begin)
    return end, path, jnp.where(settled < INF, prices + settled - least, prices), scans


def _flip(
    owner: Int[Array, " m"], column: Int[Array, " n"], path: Int[Array, " m"], end: Int[Array, ""], root: Int[Array, ""]
) -> tuple[Int[Array, " m"], Int[Array, " n"]]:
    """The matching with every edge along the path from `root` to the column `end` exchanged."""

    def step(state: State) -> State:
        end, owner, column, steps = state
        row = path[end]
        before = jnp.where(row == root, -1, column[row])
        return before, owner.at[end].set(row), column.at[row].set(end), steps + 1

    begin: State = end, owner, column, _filled(path, 0)
    _, owner, column, _ = lax.while_loop(lambda s: (s[0] >= 0) & (s[-1] < len(column)), step, begin)
    return owner, column

"""Student's t distribution, through the regularised incomplete beta function.

The base distribution has numpy and no scipy, and this is all of scipy that a comparison needs. Formulas: Abramowitz and
Stegun 26.5.8 (the continued fraction, evaluated by Lentz's method) and 26.7.1 (t by the incomplete beta function).
"""

from __future__ import annotations

import functools
import math
from statistics import NormalDist

__all__ = ["incomplete_beta", "t_quantile", "t_two_sided_p"]

_NORMAL = NormalDist()
_TINY = 1e-300


def incomplete_beta(a: float, b: float, x: float, *, complement: float | None = None) -> float:
    """I_x(a, b), in 0..1. `complement` is 1 - x, where the caller knows it without cancellation.

    ValueError if a or b is not positive or x is outside 0..1.
    """
    rest = 1.0 - x if complement is None else complement
    if not (a > 0 and b > 0 and 0 <= x <= 1 and 0 <= rest <= 1):
        raise ValueError(f"incomplete beta function: a > 0, b > 0, 0 <= x <= 1, not a={a}, b={b}, x={x}")
    if x == 0:
        return 0.0
    if rest == 0:
        return 1.0
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log(rest)
    # The fraction converges fast on one side of the mean; the other side is reached by symmetry.
    if x < (a + 1) / (a + b + 2):
        return math.exp(log_front) * _fraction(a, b, x) / a
    return 1.0 - math.exp(log_front) * _fraction(b, a, rest) / b


def _fraction(a: float, b: float, x: float) -> float:
    c = 1.0
    d = 1.0 / _away_from_zero(1.0 - (a + b) * x / (a + 1.0))
    value = d
    for m in range(1, 1000):
        for numerator in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1.0 / _away_from_zero(1.0 + numerator * d)
            c = _away_from_zero(1.0 + numerator / c)
            value *= c * d
        if abs(c * d - 1.0) < 1e-15:
            break
    return value


def _away_from_zero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY


def t_two_sided_p(t: float, df: float) -> float:
    """P(|T| >= |t|) with `df` degrees of freedom; `math.inf` is the normal distribution."""
    if df <= 0:
        raise ValueError(f"degrees of freedom must be positive, not {df}")
    if math.isinf(t):
        return 0.0
    if math.isinf(df):
        return math.erfc(abs(t) / math.sqrt(2.0))
    square = t * t
    return incomplete_beta(df / 2.0, 0.5, df / (df + square), complement=square / (df + square))


@functools.lru_cache(maxsize=4096)
def t_quantile(q: float, df: float) -> float:
    """The t with P(T <= t) = q; 0 < q < 1. To about 1e-12 relative, by Newton's method on the logarithm of the tail,
    within a bracket."""
    if not 0 < q < 1:
        raise ValueError(f"a quantile needs 0 < q < 1, not {q}")
    if df <= 0:
        raise ValueError(f"degrees of freedom must be positive, not {df}")
    if math.isinf(df):
        return _NORMAL.inv_cdf(q)
    if q == 0.5:
        return 0.0
    tail = 2.0 * min(q, 1.0 - q)
    log_density = math.lgamma((df + 1) / 2) - math.lgamma(df / 2) - math.log(df * math.pi) / 2
    low, high = 0.0, math.inf
    root = -_NORMAL.inv_cdf(tail / 2.0)
    for _ in range(200):
        p = t_two_sided_p(root, df)
        low, high = (root, high) if p > tail else (low, root)
        slope = 2.0 * math.exp(log_density - (df + 1) / 2 * math.log1p(root * root / df))
        # ln p against ln t is concave and nearly straight far out, where the tail is a power.
        step = math.log(p / tail) * p / (slope * root) if p > 0 and slope > 0 and root > 0 else 0.0
        following = root * math.exp(max(min(step, 3.0), -3.0))
        if not low < following < high:
            following = (low + high) / 2.0 if math.isfinite(high) else 2.0 * low
        if abs(following - root) <= 1e-13 * root:
            break
        root = following
    return root if q > 0.5 else -root

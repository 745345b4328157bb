"""Chooses a few profiles from the lengths of real requests. Pure functions, independent of TensorRT.

A profile i takes sources of up to S[i] tokens and outputs of up to T[i]; the profiles are nested, the last takes all. A
request is served by the first profile its source fits, and padded to it. What that wastes is counted in slots, places
for the keys and values of one token in all layers, which is memory and work alike:

    source S[i] - s,  cache K * (T[i] - t)      for a request of s source and t output tokens with K beams

Edges are found by dynamic programming over the histogram, so no choice of as few profiles wastes less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np

from seq2engine.errors import RequestError
from seq2engine.model.config import ModelConfig

from ..artifact.profiles import FLAGS, Range, ShapeRanges, short

MULTIPLE = 8  # lengths are rounded up to it: it suits matmul kernels and makes fewer shapes
LEAST_BAR = 8  # columns of the longest bar of a histogram, however narrow a terminal is
SETS = {"static": 1, "growing": 2}  # copies of the cache on the device; a growing one is read and written
BATCH = Range(1, 8, 32)
PROFILE_BYTES = 750_000  # approximate size of a layer's kernels per profile; see docs/LOG.md


@dataclass(frozen=True)
class PlannedProfile:
    """One profile, the requests it serves, and their slots: real ones and padding."""

    ranges: ShapeRanges
    requests: int
    real: int
    padding: int
    state_bytes: int  # keys and values of the largest batch

    @property
    def waste(self) -> float:
        return share(self.padding, self.real)


@dataclass(frozen=True)
class ShapePlan:
    """Profiles, the narrowest first, and what they waste; `left_out` requests are longer than the model takes."""

    profiles: tuple[PlannedProfile, ...]
    slots: int  # cache slots of the widest
    one_profile_padding: int
    left_out: int
    engine_bytes: int  # both engines, about

    @property
    def padding(self) -> int:
        return sum(profile.padding for profile in self.profiles)

    @property
    def real(self) -> int:
        return sum(profile.real for profile in self.profiles)

    @property
    def waste(self) -> float:
        return share(self.padding, self.real)

    @property
    def one_profile_waste(self) -> float:
        return share(self.one_profile_padding, self.real)

    def profile_of(self, source: int, target: int) -> int | None:
        """The number of the narrowest profile that takes such a request; None for one that no profile takes."""
        for number, profile in enumerate(self.profiles):
            if source in profile.ranges.source and target in profile.ranges.target:
                return number
        return None

    def build_options(self) -> list[str]:
        """The options of `seq2engine build` for these profiles."""
        words = []
        for name, flag in FLAGS.items():
            texts = [short(getattr(profile.ranges, name)) for profile in self.profiles]
            words += [f"--{flag}", *(texts[:1] if len(set(texts)) == 1 else texts)]
        return words


def plan_from_lengths(
    lengths: Sequence[tuple[int, int]],
    config: ModelConfig,
    profiles: int = 3,
    batch: Range = BATCH,
    beam: int = 1,
    cache_form: str = "static",
    item_bytes: int = 2,
    weight_bytes: int = 0,
) -> ShapePlan:
    """The plan of at most `profiles` profiles for requests of (source, output) tokens that wastes least.

    A static cache has one length for all profiles, so there they differ in the source only. `weight_bytes` are those of
    both graphs.
    """
    if profiles < 1 or beam < 1:
        raise RequestError(f"{profiles} profiles and {beam} beams, expected at least 1 of each")
    if not lengths:
        raise RequestError("no requests to plan for, expected a line for each")
    fitting = [(s, t) for s, t in lengths if 1 <= s <= config.max_source and 1 <= t <= config.max_target]
    if not fitting:
        raise RequestError(
            f"none of {len(lengths)} requests fits the model, which takes 1 to {config.max_source} source and 1 to "
            f"{config.max_target} output tokens"
        )
    buckets = buckets_of(fitting, config, cache_form)
    ends = edges_from_buckets(buckets, profiles, beam)
    one = cost_of(buckets, 0, len(buckets) - 1, beam)
    planned = []
    for first, last in zip([0, *(end + 1 for end in ends[:-1])], ends, strict=True):
        ranges = ranges_of(buckets, first, last, batch, beam)
        inside = buckets[first : last + 1]
        real = sum(sum(b.sources) + beam * sum(b.targets) for b in inside)
        padding = cost_of(buckets, first, last, beam)
        state = state_bytes(config, ranges, cache_form, item_bytes)
        planned.append(PlannedProfile(ranges, sum(len(b.sources) for b in inside), real, padding, state))
    return ShapePlan(
        profiles=tuple(planned),
        slots=planned[-1].ranges.slots,
        one_profile_padding=one,
        left_out=len(lengths) - len(fitting),
        engine_bytes=weight_bytes + PROFILE_BYTES * len(planned) * (config.encoder_layers + config.decoder_layers),
    )


@dataclass(frozen=True)
class Bucket:
    """Requests whose sources are rounded up to the same length; `target` suffices for them and all shorter ones."""

    edge: int
    target: int
    sources: tuple[int, ...]
    targets: tuple[int, ...]


def buckets_of(lengths: Sequence[tuple[int, int]], config: ModelConfig, cache_form: str) -> list[Bucket]:
    by_edge: dict[int, list[tuple[int, int]]] = {}
    for source, target in lengths:
        by_edge.setdefault(rounded(source, config.max_source), []).append((source, target))
    most = rounded(max(t for _, t in lengths), config.max_target)
    buckets, longest = [], 0
    for edge in sorted(by_edge):
        sources, targets = zip(*by_edge[edge], strict=True)
        longest = max(longest, *targets)
        suffices = most if cache_form == "static" else rounded(longest, config.max_target)
        buckets.append(Bucket(edge, suffices, sources, targets))
    return buckets


def edges_from_buckets(buckets: Sequence[Bucket], profiles: int, beam: int) -> list[int]:
    """The last bucket of every profile, such that the sum of their costs is least; of equals, the fewest profiles.

    least[j] with p profiles = min over i < j of  least[i] with p-1 profiles + cost of buckets i+1 .. j
    """
    count = len(buckets)
    edge, target = (np.array([getattr(b, name) for b in buckets], dtype=np.int64) for name in ("edge", "target"))
    requests, sources, targets = (
        np.concatenate([[0], np.cumsum(numbers)])
        for numbers in (
            [len(b.sources) for b in buckets],
            [sum(b.sources) for b in buckets],
            [sum(b.targets) for b in buckets],
        )
    )
    least = [edge * requests[1:] - sources[1:] + beam * (target * requests[1:] - targets[1:])]
    chosen: list[np.ndarray] = []
    for _ in range(1, min(profiles, count)):
        before, best, place = least[-1], least[-1].copy(), np.full(count, -1)
        for j in range(1, count):
            i = np.arange(j)
            number = requests[j + 1] - requests[i + 1]
            cost = edge[j] * number - (sources[j + 1] - sources[i + 1])
            cost += beam * (target[j] * number - (targets[j + 1] - targets[i + 1]))
            total = before[:j] + cost
            k = int(total.argmin())
            if total[k] < best[j]:  # else one profile fewer is as good
                best[j], place[j] = total[k], k
        least.append(best)
        chosen.append(place)
    ends, j = [count - 1], count - 1
    for place in reversed(chosen):
        if place[j] >= 0:
            j = int(place[j])
            ends.append(j)
    return ends[::-1]


def cost_of(buckets: Sequence[Bucket], first: int, last: int, beam: int) -> int:
    """Slots of padding if one profile serves these buckets."""
    edge, target = buckets[last].edge, buckets[last].target
    inside = buckets[first : last + 1]
    return sum((edge - s) + beam * (target - t) for b in inside for s, t in zip(b.sources, b.targets, strict=True))


def ranges_of(buckets: Sequence[Bucket], first: int, last: int, batch: Range, beam: int) -> ShapeRanges:
    """The ranges of a profile: it takes everything up to its edges, and is tuned for the middle of what it serves."""
    inside = buckets[first : last + 1]
    source = sorted(s for b in inside for s in b.sources)
    target = sorted(t for b in inside for t in b.targets)
    return ShapeRanges(
        batch=batch,
        beam=Range(beam, beam, beam),
        source=Range(1, source[len(source) // 2], buckets[last].edge),
        target=Range(1, target[len(target) // 2], buckets[last].target),
    )


def state_bytes(config: ModelConfig, ranges: ShapeRanges, cache_form: str, item_bytes: int) -> int:
    """What the largest batch of a profile keeps on the device: keys and values of source and output, encoder states."""
    slot = 2 * config.decoder_layers * config.d_model  # a key and a value in every layer
    source = ranges.source.max * (slot + config.state_width)
    return ranges.batch.max * item_bytes * (source + SETS[cache_form] * ranges.slots * slot)


def histogram_text(lengths: Sequence[int], edges: Sequence[int], width: int = 40, columns: int | None = None) -> str:
    """Source lengths as bars of at most `width`, and where the profiles end; no line has more than `columns`.

    Bars are shortened first, then the words: the plan's table has the same numbers.
    """
    step = max(ceil(max(lengths) / 16 / MULTIPLE) * MULTIPLE, MULTIPLE)
    counts = np.bincount([(length - 1) // step for length in lengths])
    rows = []
    for place, count in enumerate(counts):
        low, high = place * step + 1, (place + 1) * step
        ends = [str(edge) for edge in edges if low <= edge <= high]
        words = f"  < profile ends at {', '.join(ends)}" if ends else ""
        rows.append((f"{low:5d} to {high:5d}  {count:8,d}  ", count / counts.max(), words))
    if columns is not None:
        room = min(int((columns - len(head) - len(words)) / share) for head, share, words in rows if share)
        width = min(width, max(room, LEAST_BAR))
    return "\n".join((head + "█" * ceil(width * share) + words)[:columns] for head, share, words in rows)


def rounded(length: int, most: int) -> int:
    return min(ceil(length / MULTIPLE) * MULTIPLE, most)


def share(padding: int, real: int) -> float:
    return padding / (padding + real) if padding else 0.0

"""A parity result for people: plain text for a terminal, one self-contained page for a browser. Verdict first."""

from __future__ import annotations

import math
from collections import Counter
from html import escape

from seq2engine.page import Html, badge_html, heading_html, note_html, page_html, table_html
from seq2engine.tables import text_table

from .compare import (
    DIVERGENCE_FACTOR,
    FACTORS,
    LEVELS,
    DecodeResult,
    Divergence,
    ParityResult,
    TensorResult,
    times,
)
from .quality import QUALITY_HEAD, quality_row

EXAMPLES = 6  # diverging decodes that are shown in full
LEVEL_HEAD = ("level", "verdict", "what was found")
TENSOR_HEAD = ("tensor", "verdict", "median ratio", "worst", "rms", "PyTorch median, worst", "candidate median, worst")
NEXT_TOKEN_HEAD = ("next tokens of", "steps", "KL", "worst KL", "top-1", "top-5")
DECODE_HEAD = ("search", "sources", "equal", "tie", "drift", "bug")

STYLE = """<style>
.pair { margin: .9rem 0 1.4rem } .pair p { margin: 0 0 .3rem }
.pair dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem .8rem; margin: 0; padding: .6rem .8rem;
  background: var(--panel); border-radius: .4rem; font-size: .9rem }
.pair dt { color: var(--soft) } .pair dd { margin: 0; font-variant-numeric: tabular-nums; overflow-wrap: anywhere }
.pair .after { color: var(--soft) }
mark { background: var(--bad); color: var(--paper); padding: 0 .3rem; border-radius: .25rem; font-weight: 600 }
mark.warn { background: var(--warn) }
.wrapped { display: inline-block; white-space: normal; min-width: 7rem }
.verdict { font-size: 1.05rem } .verdict .badge { font-size: 1.05rem; margin-right: .4rem }
</style>"""


def parity_table(result: ParityResult) -> str:
    """The result as plain text."""
    factors = FACTORS[result.precision]
    allowed = f"allowed: {factors.median:g}x at the median, {factors.worst:g}x at worst"
    blocks = [
        f"parity {'passed' if result else 'FAILED'}: {result.candidate}: {result.reason}" + finding_text(result),
        text_table(LEVEL_HEAD, level_rows(result)),
        text_table(TENSOR_HEAD, tensor_rows(result)) + "\n" + allowed,
        text_table(DECODE_HEAD, decode_rows(result)),
        *([text_table(NEXT_TOKEN_HEAD, next_token_rows(result))] if result.next_token else []),
        *([text_table(("who", *QUALITY_HEAD), quality_rows(result))] if result.quality else []),
        *(divergence_text(search, divergence) for search, divergence in examples(result)),
    ]
    return "\n\n".join(blocks)


def parity_html(result: ParityResult) -> str:
    """The result as one page."""
    title = f"Parity of {result.candidate}"
    subtitle = (
        f"Against PyTorch {result.precision}, with the same model in fp64 to judge both. {result.sources} sources, "
        f"decodes of up to {result.max_length} tokens, {result.cache_form} cache."
    )
    shown, factors = examples(result), FACTORS[result.precision]
    blocks = [
        STYLE,
        f'<p class="verdict">{verdict_badge(bool(result))} {escape(result.reason)}</p>',
        *finding_html(result),
        heading_html("Levels"),
        table_html(LEVEL_HEAD, ((a, verdict_badge(b == "pass"), wrapped(c)) for a, b, c in level_rows(result))),
        heading_html("Tensors"),
        note_html(
            "Absolute errors against fp64 at the real positions of ragged batches, in the order in which one error "
            f"causes the next. The candidate may err {factors.median:g} times as much as PyTorch itself at the median "
            f"and {factors.worst:g} times at the worst element. Of the single steps only the worst one is listed."
        ),
        table_html(TENSOR_HEAD, ((a, marked(b), *rest) for a, b, *rest in tensor_rows(result))),
        heading_html("Decodes"),
        note_html(
            "Every source decoded freely by PyTorch and by the candidate. Where they part, the margin is what fp64 "
            "puts between the two choices, in nats, and the budget is what rounding could have turned around: "
            f"{DIVERGENCE_FACTOR:g} times PyTorch's own error there, or its usual error where that is larger. Within "
            "PyTorch's own error the divergence is a tie, within the budget drift; beyond it, it is a bug."
        ),
        table_html(DECODE_HEAD, decode_rows(result)),
    ]
    if result.next_token:
        blocks += [
            heading_html("Next tokens"),
            note_html(
                "Of the teacher-forced steps, against fp64: how far apart the distributions are, in nats, how often "
                "the likeliest token is the same, and how many of the five likeliest are."
            ),
            table_html(NEXT_TOKEN_HEAD, next_token_rows(result)),
        ]
    if result.quality:
        blocks += [
            heading_html("Quality"),
            note_html(
                "Error rates of the same decodes against the references, the closest of several counted: tokens "
                "substituted, missing or too many per reference token, and outputs that are not exactly right."
            ),
            table_html(("who", *QUALITY_HEAD), quality_rows(result)),
        ]
    if shown:
        blocks.append(heading_html("Where they part"))
        blocks += [divergence_html(result, search, divergence) for search, divergence in shown]
    return page_html(title, subtitle, blocks)


def level_rows(result: ParityResult) -> list[tuple[str, str, str]]:
    rows = []
    for level in LEVELS:
        parts = result.level(level)
        bad = [part for part in parts if not part]
        if bad:
            found = bad[0].reason + (f" (and {len(bad) - 1} more)" if len(bad) > 1 else "")
        elif level == "decodes":
            found = "; ".join(decode.summary for decode in result.decodes)
        else:
            tensors = [part for part in parts if isinstance(part, TensorResult)]
            worst = max(tensors, key=lambda tensor: tensor.median_ratio)
            steps = sum(tensor.step is not None for tensor in tensors)
            compared = f"{len(tensors) - steps} tensors" + (f" and {steps} single steps" if steps else "")
            found = f"largest median ratio {times(worst.median_ratio)} ({worst.name}) of {compared}"
        rows.append((level, word(not bad), found))
    return rows


def tensor_rows(result: ParityResult) -> list[tuple[str, ...]]:
    """All tensors; of the single steps the one that stands worst against its budget."""
    steps = [tensor for tensor in result.tensors if tensor.step is not None]
    worst = [max(steps, key=lambda tensor: tensor.strain)] if steps else []
    return [
        (
            tensor.name,
            word(bool(tensor)),
            times(tensor.median_ratio),
            times(tensor.worst_ratio),
            number(tensor.scale),
            f"{number(tensor.reference.median)}, {number(tensor.reference.worst)}",
            f"{number(tensor.candidate.median)}, {number(tensor.candidate.worst)}",
        )
        for tensor in (*(t for t in result.tensors if t.step is None), *worst)
    ]


def decode_rows(result: ParityResult) -> list[tuple[str, ...]]:
    return [(d.search, str(d.sources), str(d.equal), *(str(n) for n in counts_of(d))) for d in result.decodes]


def next_token_rows(result: ParityResult) -> list[tuple[str, ...]]:
    return [
        (who, str(n.rows), number(n.kl), number(n.worst_kl), f"{n.top1:.2%}", f"{n.top5:.2%}")
        for who, n in result.next_token.items()
    ]


def finding_text(result: ParityResult) -> str:
    found = result.finding
    return "" if found is None else f"\nhunt: {found.text}\nagain with: {found.command}"


def finding_html(result: ParityResult) -> list[str]:
    found = result.finding
    if found is None:
        return []
    return [f"<p><b>Hunt:</b> {escape(found.text)}</p>", f"<p>Again with: <code>{escape(found.command)}</code></p>"]


def quality_rows(result: ParityResult) -> list[tuple[str, ...]]:
    return [(who, *quality_row(quality)) for who, found in result.quality.items() for quality in found]


def counts_of(decode: DecodeResult) -> list[int]:
    counts = Counter(divergence.verdict for divergence in decode.divergences)
    return [counts[verdict] for verdict in ("tie", "drift", "bug")]


def examples(result: ParityResult) -> list[tuple[str, Divergence]]:
    """The diverging decodes to show: those that rounding explains least, of every search."""
    found = [(d.search, divergence) for d in result.decodes for divergence in d.divergences]
    return sorted(found, key=lambda pair: -pair[1].budgets(pair[1].margin))[:EXAMPLES]


def divergence_head(search: str, divergence: Divergence) -> str:
    what = {
        "tokens": "between the two tokens",
        "scores": "between the scores of the two outputs",
        "beams": "between the prefixes that only one of the searches kept",
    }[divergence.parted]
    return (
        f"{search}, source {divergence.source}, from step {divergence.step}: "
        f"margin {number(divergence.margin)} {what}, budget {number(divergence.budget)} "
        f"(top two: {number(divergence.budgets(divergence.top_two))} budgets)"
    )


def divergence_text(search: str, divergence: Divergence) -> str:
    def line(tokens: tuple[int, ...]) -> str:
        first = max(0, divergence.step - 4)
        last = divergence.step + 5
        shown = [f"[{token}]" if i == divergence.step else str(token) for i, token in enumerate(tokens)][first:last]
        return " ".join([*(["..."] if first else []), *shown, *(["..."] if last < len(tokens) else [])])

    return (
        f"{divergence.verdict}: {divergence_head(search, divergence)}\n"
        f"  PyTorch    {line(divergence.reference)}\n  candidate  {line(divergence.candidate)}"
    )


def divergence_html(result: ParityResult, search: str, divergence: Divergence) -> str:
    kind = "bad" if divergence.verdict == "bug" else "warn"

    def line(tokens: tuple[int, ...]) -> str:
        step = divergence.step
        parts = [" ".join(map(str, tokens[:step]))]
        parts += [f'<mark class="{kind}">{token}</mark>' for token in tokens[step : step + 1]]
        parts.append(f'<span class="after">{" ".join(map(str, tokens[step + 1 :]))}</span>')
        return " ".join(parts)

    return (
        f'<div class="pair"><p>{badge_html(divergence.verdict, kind)} {escape(divergence_head(search, divergence))}</p>'
        f"<dl><dt>PyTorch</dt><dd>{line(divergence.reference)}</dd>"
        f"<dt>{escape(result.backend)}</dt><dd>{line(divergence.candidate)}</dd></dl></div>"
    )


def word(passed: bool) -> str:
    return "pass" if passed else "FAIL"


def verdict_badge(passed: bool) -> str:
    return badge_html("passed" if passed else "failed", "good" if passed else "bad")


def marked(verdict: str) -> str:
    """Only failures catch the eye: there may be dozens of tensors."""
    return verdict if verdict == "pass" else verdict_badge(False)


def wrapped(text: str) -> str:
    return Html(f'<span class="wrapped">{escape(text)}</span>')


def number(value: float) -> str:
    return f"{value:.2g}" if math.isfinite(value) else "not finite"

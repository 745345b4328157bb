"""The parity report: plain text for a terminal, one self-contained page for a browser. Verdict first."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from seq2engine.common.page import Html, about_html, badge_html, heading_html, note_html, page_html, table_html
from seq2engine.common.tables import text_table

from ...numerics.budgets import DIVERGENCE_FACTOR, Divergence
from ..levels.result import ParityResult, Sample
from . import plots
from .tables import (
    COST_HEAD,
    DECODE_HEAD,
    GRAPH_HEAD,
    INVARIANCE_HEAD,
    LEVEL_HEAD,
    NEXT_TOKEN_HEAD,
    TENSOR_HEAD,
    allowed_text,
    cost_rows,
    decode_rows,
    graph_rows,
    invariance_rows,
    level_rows,
    next_token_rows,
    number,
    rate_head,
    rate_rows,
    tensor_rows,
)

EXAMPLES, TEXT_EXAMPLES = 10, 3  # divergent decodes shown in full, on a page and in a terminal

STYLE = """<style>
.pair { margin: .9rem 0 1.4rem } .pair p { margin: 0 0 .3rem }
.pair dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 18rem), 1fr)); gap: .5rem; margin: 0;
  font-size: .9rem } .pair dl div { padding: .5rem .8rem; background: var(--panel); border-radius: .4rem }
.pair dt { color: var(--soft) } .pair dd { margin: 0; font-variant-numeric: tabular-nums; overflow-wrap: anywhere }
.pair .after { color: var(--soft) }
mark { background: var(--bad); color: var(--paper); padding: 0 .3rem; border-radius: .25rem; font-weight: 600 }
mark.warn { background: var(--warn) }
.wrapped { display: inline-block; white-space: normal; min-width: 7rem }
.verdict { font-size: 1.05rem } .verdict .badge { font-size: 1.05rem; margin-right: .4rem }
</style>"""


def report_name(backend: str, provider: str | None, precision: str, against: str | None = None) -> str:
    """The part of a report's file name that tells it from others of the same bundle, besides the date."""
    return " ".join(filter(None, (backend, provider, precision, against and f"against {against}")))


def parity_table(result: ParityResult) -> str:
    """The result as plain text."""
    blocks = [
        "\n".join(filter(None, (result.verdict_line, result.cost_line))) + finding_text(result),
        text_table(LEVEL_HEAD, level_rows(result)),
        text_table(TENSOR_HEAD, tensor_rows(result)) + "\n" + allowed_text(result),
        text_table(DECODE_HEAD, decode_rows(result)),
        "\n".join([f"decodes compared with those of {result.baseline}", *([result.effort] if result.effort else [])]),
        *([text_table(NEXT_TOKEN_HEAD, next_token_rows(result))] if result.next_token else []),
        *([text_table(rate_head(result), rate_rows(result.rates))] if result.rates else []),
        *cost_texts(result),
        *(divergence_text(result, search, divergence) for search, divergence in examples(result)[:TEXT_EXAMPLES]),
    ]
    return "\n\n".join(blocks)


def cost_texts(result: ParityResult) -> list[str]:
    """The rates against fp32, unless the baseline is fp32."""
    rates = result.cost_rates
    return [text_table(cost_rate_head(result), rate_rows(rates))] if rates else []


def parity_html(result: ParityResult) -> str:
    """The result as one page: verdict, samples, plots and examples, then level by level."""
    title = f"Parity of {result.candidate}"
    subtitle = (
        f"Decodes against {result.baseline}; errors against the same model in fp64, in units of those of PyTorch "
        f"{result.precision}. {result.sources} sources, decodes of up to {result.max_length} tokens, "
        f"{result.cache_form} cache."
    ) + (f" {result.effort[0].upper()}{result.effort[1:]}." if result.effort else "")
    blocks = [
        STYLE,
        plots.styles(),
        *([about_html(result.about)] if result.about else []),
        f'<p class="verdict">{verdict_badge(bool(result))} {escape(claimed(result))}</p>',
        *cost_verdict(result),
        *finding_html(result),
        table_html(LEVEL_HEAD, ((a, level_badge(b), wrapped(c)) for a, b, c in level_rows(result))),
        *sample_blocks(result),
        *cost_blocks(result),
        *error_growth_blocks(result),
        *divergence_blocks(result),
        *graph_blocks(result),
        *tensor_blocks(result, "2. Encoder", "encoder"),
        *tensor_blocks(result, "3. Steps", "steps"),
        *next_token_blocks(result),
        *decode_blocks(result),
        *quality_blocks(result),
        *invariance_blocks(result),
    ]
    return page_html(title, subtitle, blocks)


def claimed(result: ParityResult) -> str:
    return f"{result.claim}: {result.reason}" if result.claim else result.reason


def cost_verdict(result: ParityResult) -> list[str]:
    """The second line of the verdict; it neither passes nor fails."""
    if result.cost is None or not result.cost_line:
        return []
    kind = "good" if result.cost.nothing else "warn"
    return [f'<p class="verdict">{badge_html("cost", kind)} {escape(result.cost_line)}</p>']


def sample_blocks(result: ParityResult) -> list[str]:
    if not result.samples:
        return []
    first = result.samples[0]
    rows = ((*(wrapped(text) for text in (s.source, s.expected)), sample_cell(s)) for s in result.samples)
    return [
        heading_html("Sample outputs"),
        note_html(f"{first.search}, sources from the shortest to the longest; differences are marked."),
        table_html(("source", first.baseline, result.candidate), rows),
    ]


def sample_cell(sample: Sample) -> str:
    """The candidate's output, marked from the word at which it differs."""
    words, expected = sample.candidate.split(), sample.expected.split()
    if words == expected:
        return wrapped(sample.candidate)
    same = next(
        (i for i, (a, b) in enumerate(zip(words, expected, strict=False)) if a != b), min(len(words), len(expected))
    )
    begin, rest = escape(" ".join(words[:same])), escape(" ".join(words[same:]) or "(ends)")
    return Html(f'<span class="wrapped">{begin} <mark class="warn">{rest}</mark></span>')


def cost_blocks(result: ParityResult) -> list[str]:
    cost = result.cost
    if cost is None or not result.cost_line or not cost.searches:
        return []
    rates = result.cost_rates
    return [
        heading_html(f"Cost against {cost.baseline}"),
        note_html(
            "The outputs of this precision against those of fp32: tokens substituted, deleted or inserted per token of "
            "fp32, and the median step of the first difference. This is what the precision itself loses, even if it is "
            "computed without error."
        ),
        table_html(COST_HEAD, cost_rows(cost)),
        *([table_html(cost_rate_head(result), rate_rows(rates))] if rates else []),
    ]


def cost_rate_head(result: ParityResult) -> tuple[str, ...]:
    assert result.cost is not None
    return ("search", "metric", result.cost.baseline, result.candidate, "difference")


def error_growth_blocks(result: ParityResult) -> list[str]:
    growth = result.error_growth
    if growth is None or not growth.steps:
        return []
    return [
        heading_html("Error growth"),
        note_html(
            f"Teacher-forced steps up to the maximum length ({growth.steps}): L2 norm of the errors over that of fp64."
        ),
        plots.error_growth_svg(growth, result.candidate),
        heading_html("Error ratios by layer and step"),
        note_html(
            f"The same errors of {result.candidate} over those of PyTorch {result.precision}, from 1/4 to 16 times. A "
            "row is what a layer writes to its KV cache, or the logits; a column is a step."
        ),
        plots.ratios_html(growth),
    ]


def divergence_blocks(result: ParityResult) -> list[str]:
    shown = examples(result)
    if not shown:
        return []
    return [
        heading_html("Margins of divergent decodes"),
        note_html(
            "The margin is the difference of the two choices in fp64, in nats; the budget is the margin that rounding "
            f"could overturn: {DIVERGENCE_FACTOR:g} times PyTorch's own error there, or its median error if that is "
            "larger. A margin within PyTorch's own error is a tie, within the budget drift, beyond it a bug."
        ),
        plots.margins_svg([divergence for decode in result.decodes for divergence in decode.divergences]),
        heading_html("Divergent decodes" if len(shown) < EXAMPLES else f"Divergent decodes: the worst {EXAMPLES}"),
        *(divergence_html(result, search, divergence) for search, divergence in shown),
    ]


def graph_blocks(result: ParityResult) -> list[str]:
    if not result.graphs:
        return []
    return [
        heading_html("1. Graphs"),
        note_html(
            "The files of the bundle: ONNX's checker, the contract (names, types, axes, shapes at two sets of sizes) "
            "and the precision."
        ),
        table_html(GRAPH_HEAD, ((a, marked(b), *rest) for a, b, *rest in graph_rows(result))),
    ]


def tensor_blocks(result: ParityResult, title: str, level: str) -> list[str]:
    return [
        heading_html(title),
        note_html(
            "Absolute errors against fp64, padding excluded, in the order of the computation; "
            f"{allowed_text(result)}."
            + (" Of the single steps only the worst one is listed." if level == "steps" else "")
        ),
        table_html(TENSOR_HEAD, ((a, marked(b), *rest) for a, b, *rest in tensor_rows(result, level))),
    ]


def next_token_blocks(result: ParityResult) -> list[str]:
    if not result.next_token:
        return []
    return [
        note_html(
            "Next-token distributions of the teacher-forced steps against fp64: KL divergence in nats, how often the "
            "likeliest token is the same (top-1), and the share of the five likeliest in common (top-5)."
        ),
        table_html(NEXT_TOKEN_HEAD, next_token_rows(result)),
    ]


def decode_blocks(result: ParityResult) -> list[str]:
    return [
        heading_html("4. Decodes"),
        note_html(f"Every source decoded by {result.baseline} and by {result.candidate}, compared token by token."),
        table_html(DECODE_HEAD, decode_rows(result)),
    ]


def quality_blocks(result: ParityResult) -> list[str]:
    if not result.rates:
        return []
    return [
        heading_html("5. Quality"),
        note_html(
            "The same decodes against the references; the closest of several counts. WER: words substituted, deleted "
            "or inserted per reference word. PER: the same over phonemes; a line is then one word, and WER the share "
            "of wrong words. Lines wrong: outputs that differ from their reference. Brackets are 95 % confidence "
            "intervals of a paired bootstrap over the lines (1,000 resamples), p the p-value of sacrebleu's own."
        ),
        table_html(rate_head(result), rate_rows(result.rates)),
    ]


def invariance_blocks(result: ParityResult) -> list[str]:
    if not result.invariance:
        return []
    return [
        heading_html("6. Batch invariance"),
        note_html(
            "The candidate against itself: a sample as one batch, and the same sources arranged in other ways. The "
            "budget is 16 times PyTorch's largest error in the same logits."
        ),
        table_html(INVARIANCE_HEAD, ((a, marked(b), *rest) for a, b, *rest in invariance_rows(result))),
    ]


def finding_text(result: ParityResult) -> str:
    found = result.finding
    return "" if found is None else f"\nlocated: {found.text}\nagain with: {found.command}"


def finding_html(result: ParityResult) -> list[str]:
    found = result.finding
    if found is None:
        return []
    return [f"<p><b>Located:</b> {escape(found.text)}</p>", f"<p>Again with: <code>{escape(found.command)}</code></p>"]


def examples(result: ParityResult) -> list[tuple[str, Divergence]]:
    """The divergent decodes to show, of every search: largest margin in budgets first."""
    found = [(d.search, divergence) for d in result.decodes for divergence in d.divergences]
    return sorted(found, key=lambda pair: -pair[1].budgets(pair[1].margin))[:EXAMPLES]


def divergence_head(search: str, divergence: Divergence) -> str:
    what = {
        "tokens": "between the two tokens",
        "scores": "between the scores of the two outputs",
        "beams": "between the prefixes that only one of the searches kept",
        "stop": "between the hypothesis at which one search stopped and the prefix with which the other went on",
    }[divergence.kind]
    return (
        f"{search}, source {divergence.source}, from step {divergence.step}: "
        f"margin {number(divergence.margin)} {what}, budget {number(divergence.budget)} "
        f"(top two: {number(divergence.budgets(divergence.top_two))} budgets)"
    )


def divergence_text(result: ParityResult, search: str, divergence: Divergence) -> str:
    def line(tokens: tuple[int, ...]) -> str:
        first = max(0, divergence.step - 4)
        last = divergence.step + 5
        named = spelled(result, tokens)
        shown = [f"[{name}]" if i == divergence.step else name for i, name in enumerate(named)][first:last]
        return " ".join([*(["..."] if first else []), *shown, *(["..."] if last < len(tokens) else [])])

    baseline, wide = result.baseline.split()[0], max(len(result.baseline.split()[0]), len("candidate"))
    return (
        f"{divergence.verdict}: {divergence_head(search, divergence)}{source_text(result, divergence)}\n"
        f"  {baseline:<{wide}}  {line(divergence.reference)}\n  {'candidate':<{wide}}  {line(divergence.candidate)}"
    )


def divergence_html(result: ParityResult, search: str, divergence: Divergence) -> str:
    kind = "bad" if divergence.verdict == "bug" else "warn"

    def line(tokens: tuple[int, ...]) -> str:
        step, named = divergence.step, [escape(name) for name in spelled(result, tokens)]
        parts = [" ".join(named[:step])]
        parts += [f'<mark class="{kind}">{name}</mark>' for name in named[step : step + 1]]
        parts.append(f'<span class="after">{" ".join(named[step + 1 :])}</span>')
        return " ".join(parts)

    head = escape(divergence_head(search, divergence) + source_text(result, divergence))
    sides = ((result.baseline, divergence.reference), (result.candidate, divergence.candidate))
    told = "".join(f"<div><dt>{escape(who)}</dt><dd>{line(tokens)}</dd></div>" for who, tokens in sides)
    return f'<div class="pair"><p>{badge_html(divergence.verdict, kind)} {head}</p><dl>{told}</dl></div>'


def spelled(result: ParityResult, tokens: Sequence[int]) -> list[str]:
    """Tokens as text, if there is a tokenizer."""
    return [result.words.get(token, str(token)) for token in tokens]


def source_text(result: ParityResult, divergence: Divergence) -> str:
    text = result.texts.get(divergence.source)
    return "" if text is None else f": {text}"


def verdict_badge(passed: bool) -> Html:
    return badge_html("passed" if passed else "failed", "good" if passed else "bad")


def level_badge(verdict: str) -> Html:
    return verdict_badge(verdict == "pass") if verdict in ("pass", "FAIL") else Html(escape(verdict))


def marked(verdict: str) -> str:
    """Only failures are badges: there may be dozens of tensors."""
    return verdict if verdict == "pass" else verdict_badge(False)


def wrapped(text: str) -> str:
    return Html(f'<span class="wrapped">{escape(text)}</span>')

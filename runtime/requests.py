"""Checks of a request: every problem in one message, before anything runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from seq2engine.errors import RequestError
from seq2engine.model.config import ModelConfig

from .encoder_inputs import FeatureSource, problem_with_features
from .search.option_checks import problems_with_model, problems_with_prefix
from .search.option_fields import OptionFields
from .search.options import SearchOptions
from .session import Limits


def problems_with_limits(limits: Limits, config: ModelConfig, options: OptionFields) -> list[str]:
    """What these options need beyond a session's limits, independent of the sources."""
    problems = problems_with_model(options, config.target_vocab, config.end_id)
    beyond: dict[str, int] = {}  # the command that builds a larger engine
    if limits.beam is not None and options.width > limits.beam:
        beyond["beam"] = options.width
        name = "nbest" if options.sample else "nbest times beam" if options.alternatives else "beam"
        problems.append(f"{name} {options.width}, at most {limits.beam}")
    if options.needs_attention and not limits.attention:
        what = "alignments" if options.alignments else "coverage penalty"
        problems.append(
            f"{what} asked for, but the session keeps no cross-attention weights; open it with attention=True"
        )
    if options.max_length + len(options.prompt) > limits.target:
        behind = f" after a prompt of {len(options.prompt)} tokens" if options.prompt else ""
        problems.append(f"max length {options.max_length}{behind}, at most {limits.target - len(options.prompt)}")
        if options.max_length + len(options.prompt) <= config.max_target:
            beyond["target"] = options.max_length + len(options.prompt)
    if config.takes_features and options.source_no_repeat_ngram:
        problems.append(f"source_no_repeat_ngram asked for, but sources of {config.source_kind} have no tokens")
    if beyond and limits.larger is not None:
        problems.append(limits.larger(beyond))
    return problems


def check_options(limits: Limits, config: ModelConfig, options: SearchOptions) -> None:
    """Refuses options that no source could be decoded with."""
    if problems := problems_with_limits(limits, config, options):
        raise RequestError("; ".join(problems))


def check_request(
    limits: Limits,
    config: ModelConfig,
    sources: Sequence[Sequence[int]],
    options: SearchOptions,
    first: int = 0,
    prefixes: Sequence[Sequence[int]] | None = None,
    prompts: Sequence[Sequence[int]] | None = None,
) -> None:
    """Raises before anything runs if the graphs could not run the request; one message has every problem.

    The first five sources that cannot be decoded are named; `first` is the number of the first source, where these are
    part of a longer list. `prefixes` are what the output of each begins with, `prompts` what the decoder is fed
    before that.
    """
    problems = problems_with_limits(limits, config, options)
    if prefixes is not None and options.prefix:
        problems.append("a prefix for all sources and one for each, expected one of the two")
    if prefixes is not None and len(prefixes) != len(sources):
        problems.append(f"{len(prefixes)} prefixes for {len(sources)} sources, expected one for each")
    if prompts is not None and len(prompts) != len(sources):
        problems.append(f"{len(prompts)} prompts for {len(sources)} sources, expected one for each")
    if not sources:
        problems.append("the batch is empty; give at least one source")
    if limits.batch is not None and len(sources) > limits.batch:
        problems.append(f"{len(sources)} sources in a batch, at most {limits.batch}")
    refused = [
        *problems_with_sources(limits, config, sources, first),
        *problems_with_prefixes(config, options, prefixes or (), first),
        *problems_with_prompts(limits, config, options, prompts or (), first),
    ]
    if len(refused) > 5:
        refused[5:] = [f"and {len(refused) - 5} more"]
    if problems or refused:
        raise RequestError("; ".join(problems + refused))


def problems_with_sources(
    limits: Limits, config: ModelConfig, sources: Sequence[Sequence[int]], first: int
) -> Iterator[str]:
    """Sources that the encoder does not take."""
    for row, source in enumerate(sources, start=first):
        if isinstance(source, FeatureSource):
            if problem := problem_with_features(source, config):
                yield f"source {row} {problem}"
            continue
        if not source:
            yield f"source {row} is empty"
        elif len(source) > limits.source:
            yield f"source {row} has {len(source)} tokens, at most {limits.source}"
        if wrong := [token for token in source if not 0 <= token < config.source_vocab]:
            yield f"source {row} has token {wrong[0]}, the vocabulary has {config.source_vocab}"


def problems_with_prefixes(
    config: ModelConfig, options: SearchOptions, prefixes: Sequence[Sequence[int]], first: int
) -> Iterator[str]:
    """Beginnings that an output cannot have."""
    for row, prefix in enumerate(prefixes, start=first):
        for problem in problems_with_prefix(options, prefix, config.target_vocab, config.end_id):
            yield f"source {row}: {problem}"


def problems_with_prompts(
    limits: Limits, config: ModelConfig, options: SearchOptions, prompts: Sequence[Sequence[int]], first: int
) -> Iterator[str]:
    """Prompts that the decoder does not take, or that leave no room for the output."""
    most = limits.target - options.max_length + 1
    for row, prompt in enumerate(prompts, start=first):
        if not prompt:
            yield f"source {row} has an empty prompt, expected the start token at least"
        elif len(prompt) > most:
            yield f"source {row} has a prompt of {len(prompt)} tokens, at most {most}"
        if wrong := [token for token in prompt if not 0 <= token < config.target_vocab]:
            yield f"source {row} has a prompt with token {wrong[0]}, the vocabulary has {config.target_vocab}"

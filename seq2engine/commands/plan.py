"""`seq2engine plan`: from a file of real requests to the profiles of a build, and the command that builds them."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from seq2engine.commands.build import add_gpus
from seq2engine.commands.run import lines_from_input
from seq2engine.common.tables import text_table
from seq2engine.common.terminal import columns_of
from seq2engine.flags.languages import add_languages
from seq2engine.flags.lists import MOST_PRECISE
from seq2engine.flags.shared import Commands, add_bundle, add_command, add_gpu_memory, progress_for

if TYPE_CHECKING:
    from seq2engine.export.artifact.bundle import Bundle
    from seq2engine.export.engines.instances import InstancePlan
    from seq2engine.export.engines.plan import ShapePlan

DECODED = 200


def add_parser(commands: Commands) -> None:
    summary = "choose profiles for a file of real requests, and print the command that builds them"
    add_plan_flags(add_command(commands, "plan", run_plan, summary, renamed={"--target": "--gpu"}))


def add_plan_flags(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("corpus", type=Path, help="file of lines as the model will get them, in UTF-8")
    add_bundle(sub)
    sub.add_argument("--profiles", type=int, default=3, help="maximum profiles (default: %(default)s)")
    sub.add_argument("--ratio", type=float, help="output tokens per source token (default: decode some lines)")
    sub.add_argument("--count", type=int, default=DECODED, help="lines to decode (default: %(default)s)")
    sub.add_argument("--ids", action="store_true", help="lines are token ids, although the bundle takes text")
    add_languages(sub)
    sub.add_argument("--batch", metavar="RANGE", default="1:8:32", help="sources at once (default: %(default)s)")
    sub.add_argument("--beam", type=int, help="beams; 1 is greedy (default: the model's own, else 1)")
    sub.add_argument("--precision", help=f"precision of the engine to build (default: {MOST_PRECISE} by every GPU)")
    add_gpus(sub, "GPUs to build for, such as sm89")
    add_gpu_memory(sub)
    sub.add_argument("--json", action="store_true", help="print the plan as JSON")


def run_plan(args: argparse.Namespace) -> int:
    from seq2engine.export.artifact.bundle import open_bundle
    from seq2engine.export.artifact.default_precision import precision_to_build
    from seq2engine.export.artifact.profiles import range_from_text
    from seq2engine.export.engines.instances import item_bytes, weight_bytes
    from seq2engine.export.engines.plan import histogram_text, plan_from_lengths
    from seq2engine.runtime.encoder_inputs import check_takes_text

    bundle = open_bundle(args.bundle)
    check_takes_text(bundle.config, bundle.root)
    precision = args.precision or precision_to_build(bundle, args.gpu)
    bundle.require(precision)
    lengths, beam = lengths_from_args(args, bundle)
    most = max(1, min(args.profiles, len({source for source, _ in lengths})))  # never more than lengths
    plans = [
        plan_from_lengths(
            lengths,
            bundle.config,
            number,
            range_from_text(args.batch, "batch"),
            beam,
            bundle.cache_form,
            item_bytes(bundle, precision),
            weight_bytes(bundle, precision),
        )
        for number in range(1, most + 1)
    ]
    plan = plans[-1]
    words = ["seq2engine build", shlex.quote(str(bundle.root)), "--precision", precision]
    command = " ".join([*words, *(["--gpu", *args.gpu] if args.gpu else []), *plan.build_options()])
    serving = instances_of(plan, bundle, precision, args.gpu_memory)
    if args.json:
        print(json.dumps({**values_of(plan), "serving": dataclasses.asdict(serving), "command": command}, indent=2))
        return 0
    edges = [profile.ranges.source.max for profile in plan.profiles]
    shown = [s for s, _ in lengths if s <= bundle.config.max_source]
    print(histogram_text(shown, edges, columns=columns_of(sys.stdout)))
    print(f"\n{plan_text(plan, bundle, args)}\n\n{choices_text(plans)}\n\nserving: {serving.reason}\n\nnext: {command}")
    return 0


def instances_of(plan: ShapePlan, bundle: Bundle, precision: str, memory: int | None) -> InstancePlan:
    """How the engines are served: the same as `seq2engine triton` writes of them, once they are built."""
    from seq2engine.export.engines.instances import Machine, plan_instances, sizes_from_bundle
    from seq2engine.runtime.threads import usable_cores

    widest = plan.profiles[-1].ranges
    sizes, machine = sizes_from_bundle(bundle, precision, widest), Machine(usable_cores(), memory, gpu=True)
    return plan_instances(sizes, machine, 1, widest.batch.max)


def lengths_from_args(args: argparse.Namespace, bundle: Bundle) -> tuple[list[tuple[int, int]], int]:
    """The lengths of every request, and the number of beams."""
    from seq2engine.runtime.defaults import defaults_of
    from seq2engine.runtime.text.lengths import lengths_by_decoding, lengths_by_ratio, sources_of_lines
    from seq2engine.runtime.text.sources import coder_of
    from seq2engine.runtime.translator import load

    with lines_from_input(args.corpus, instead="a file") as lines:
        sources = sources_of_lines(coder_of(bundle, args.ids), lines, args.source_language)
    beam = args.beam or defaults_of(bundle).values.get("beam", 1)
    if args.ratio is not None:
        return lengths_by_ratio(sources, args.ratio, bundle.config.max_target), beam
    with load(bundle, ids=args.ids) as model:
        options = model.options(args.target_language, beam=beam)
        return lengths_by_decoding(model.session, sources, options, args.count, progress_for(args)), beam


def values_of(plan: ShapePlan) -> dict[str, object]:
    return {
        **dataclasses.asdict(plan),
        "profiles": [{**dataclasses.asdict(profile), "waste": profile.waste} for profile in plan.profiles],
        "waste": plan.waste,
        "one_profile_waste": plan.one_profile_waste,
    }


def plan_text(plan: ShapePlan, bundle: Bundle, args: argparse.Namespace) -> str:
    rows = [
        (
            str(profile.ranges.source),
            str(profile.ranges.target),
            f"{profile.requests:,}",
            f"{profile.waste:.1%}",
            f"{profile.state_bytes / 1e6:.1f} MB",
        )
        for profile in plan.profiles
    ]
    table = text_table(("source", "output", "requests", "padding", "keys and values"), rows)
    cache = (
        f"{plan.slots} cache slots in every profile: a static cache has one length"
        if bundle.cache_form == "static"
        else "a growing cache is as long as the profile's outputs"
    )
    source = (
        f"outputs are {args.ratio} times their sources"
        if args.ratio is not None
        else f"outputs of up to {args.count} lines were decoded, the others get the largest ratio seen"
    )
    left = f"; {plan.left_out:,} requests are longer than the model takes and were left out" if plan.left_out else ""
    return f"{table}\n{cache}; beam {plan.profiles[0].ranges.beam.max}; {source}{left}"


def choices_text(plans: list[ShapePlan]) -> str:
    """The waste and the size with more profiles."""
    rows = [
        (len(plan.profiles), f"{plan.waste:.1%}", f"about {plan.engine_bytes / 1e6:.0f} MB")
        for plan, before in zip(plans, [None, *plans], strict=False)
        if before is None or len(plan.profiles) > len(before.profiles)
    ]
    return text_table(("profiles", "padding", "engines"), rows)

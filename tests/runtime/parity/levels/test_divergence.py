"""Where decodes part: ties are ties, differences are differences, and what is not a number is neither."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from support.parity_cases import SMALL, bundle_of, changed, parity_with
from support.rounding import Rounding, rounding_from_session
from support.scripted_step import from_table

from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.runtime.defaults import Defaults
from seq2engine.runtime.generate import generate
from seq2engine.runtime.model_options import options_left_out
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.parity.compare import parity_of_sessions, searches_of
from seq2engine.runtime.parity.levels.decodes import Arm, compare_decodes
from seq2engine.runtime.parity.levels.divergence import Diverged, Judge, Traced, stop_of, widest_gap
from seq2engine.runtime.parity.options import ParityOptions
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.search.step_output import StepOutput
from seq2engine.runtime.session import EVERYTHING, Limits, Session
from seq2engine.runtime.text.sources import random_sources
from seq2engine.runtime.torch_session import TorchSession


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return bundle_of(SMALL, tmp_path_factory.mktemp("parity"))


class TestDivergences:
    @pytest.mark.slow
    def test_logits_that_mislead_are_caught_in_decodes_too(self, bundle):
        def favour(logits, position):
            logits[..., 9] += np.float32(5.0)

        result = parity_with(bundle, changed(bundle, answered=favour))
        assert result.reason.startswith("steps: logits")
        for decode in result.decodes:
            assert decode.differing
            worst = decode.differing[0]
            assert worst.margin > worst.budget
            assert worst.reference[: worst.step] == worst.candidate[: worst.step]
            assert worst.reference[worst.step] != worst.candidate[worst.step]
        greedy = result.decodes[0].differing[0]
        assert greedy.candidate[greedy.step] == 9
        assert 0 < greedy.margin <= 5.001

    def test_two_equal_tokens_are_a_tie(self, tmp_path):
        """Twins in the vocabulary: which one is output depends on the last bit, and not a failure."""
        model = random_model(SMALL, 3)
        sources = random_sources(SMALL, 16)
        with TorchSession(random_model(SMALL, 3)) as session:
            outputs = [t for d in generate(session, sources) for t in d[0].tokens if t != SMALL.end_id]
        twin = max(set(range(SMALL.target_vocab)) - set(outputs))
        first = max(
            {token for token in outputs if token < twin}, key=outputs.count
        )  # of equals the lower one is output
        for table in (model.output.weight, model.target_embedding.tokens.weight):
            table.data[twin] = table.data[first]

        def prefer_the_twin(logits, position):
            logits[..., twin] = np.nextafter(np.maximum(logits[..., twin], logits[..., first]), np.float32(np.inf))

        bundle = onnx_from_model(model, tmp_path / "twins", ("fp32",))
        result = parity_with(bundle, changed(bundle, answered=prefer_the_twin), sources=sources)
        assert result, result.reason
        greedy = result.decodes[0]
        assert greedy.equal < 16
        assert {divergence.verdict for decode in result.decodes for divergence in decode.divergences} == {"tie"}
        assert {divergence.candidate[divergence.step] for divergence in greedy.divergences} == {twin}

    @pytest.mark.parametrize("broken", [np.nan, np.inf])
    def test_logits_that_are_not_finite_fail_without_an_exception(self, bundle, broken):
        def spoil(logits, position):
            logits[:, :, 7] = broken

        result = parity_with(bundle, changed(bundle, answered=spoil))
        assert result.reason == "steps: logits: not finite"
        assert "onnxruntime stopped in batch 0" in result.decodes[0].reason
        assert json.loads(result.to_json())["tensors"][-1]["candidate"]["worst"] is None

    def test_a_reference_that_is_not_finite_is_no_excuse(self, bundle):
        def spoil(logits, position):
            logits[:, :, 7] = np.nan

        with (
            open_session(bundle, "torch", "fp64") as oracle,
            changed(bundle, answered=spoil) as reference,
            open_session(bundle, threads=1) as candidate,
        ):
            result = parity_of_sessions(
                oracle, reference, candidate, random_sources(SMALL, 16), ParityOptions(max_length=6)
            )
        assert "PyTorch's own values are not finite" in result.reason
        assert "PyTorch stopped in batch 0" in result.decodes[1].reason


class Scripted(Session):
    """A session that speaks from a table of prefixes; the cache holds the tokens themselves."""

    backend, cache_form = "scripted", "static"

    def __init__(self, table, precision="fp32", noise=0.0):
        self.precision, self.noise = precision, noise
        self.config = dataclasses.replace(SMALL, source_vocab=8, target_vocab=8)
        self.limits = Limits(None, None, 8, 8)
        self.script = from_table(table, [1 / 8] * 8)

    def encode(self, source_ids, source_mask):
        return {"batch": len(source_ids)}

    def reserve(self, state, slots, form=EVERYTHING):
        state["outputs"] = np.zeros((state["batch"], slots), dtype=np.int64)

    def step(self, state, tokens, position, write_index, self_mask):
        rows, beams = np.arange(len(tokens))[:, None], np.arange(tokens.shape[1])
        state["outputs"][rows, write_index[:, None] + beams] = tokens
        logits = np.array(
            [
                [self.script(tuple(outputs[mask].tolist()[1:])) for mask in masks]
                for outputs, masks in zip(state["outputs"], self_mask, strict=True)
            ],
            dtype=np.float64,
        )
        logits[..., 7] += self.noise  # a token nobody says, so that it only shows in what PyTorch errs
        return StepOutput(logits if self.precision == "fp64" else logits.astype(np.float32))

    def select(self, state, rows, slots):
        if rows is not None:
            state["outputs"] = state["outputs"][rows]
        if slots is not None:
            state["outputs"] = np.take_along_axis(state["outputs"], slots, axis=1)

    def __exit__(self, *exc):
        pass


A, B, C, END = 3, 4, 5, 2


def pruning(b, c):
    """Of B and C only one is kept beside A in a beam of two; B would end best, C far behind.

    After B the end is certain: (log 1/4 + log 1) / 2. After C it is not, and A leads nowhere.
    """
    outputs = {A: 0.5, B: b, C: c}
    rest = (1 - sum(outputs.values())) / 5
    first = [outputs.get(token, rest) for token in range(8)]
    end = [0.97 if token == END else 0.03 / 7 for token in range(8)]
    maybe = [0.3 if token == END else 0.1 for token in range(8)]
    return {(): first, (B,): end, (C,): maybe, (A,): maybe}


class TestRepetitionPenalty:
    """Parity decodes with the model's own repetition penalty, as `run` does, and judges by the penalised scores."""

    @pytest.mark.parametrize("penalty", [0.7, 1.0, 1.8])
    def test_a_judge_scores_beams_as_beam_search_does(self, bundle, penalty):
        options = SearchOptions(max_length=10, beam=4, nbest=4, repetition_penalty=penalty)
        with (
            open_session(bundle, "torch", "fp64", threads=1) as oracle,
            open_session(bundle, "torch", threads=1) as reference,
        ):
            sources = random_sources(SMALL, 4)
            judge = Judge(oracle, reference, 8, 0.0)
            near = rounding_from_session(oracle, sources, 10, stretch=max(penalty, 1 / penalty))
            for source, found in zip(sources, generate(oracle, sources, options), strict=True):
                scored = judge.scored([(source, one.tokens) for one in found], options)
                sums = [one.log_probs.sum() / len(one.tokens) ** options.length_penalty for one in scored]
                assert sums == near.scores(found, options)

    @pytest.mark.parametrize("penalty", [0.7, 1.0, 1.8])
    def test_a_judge_compares_tokens_as_greedy_search_does(self, bundle, penalty):
        """The chosen token has the largest penalised logit at every step."""
        options = SearchOptions(max_length=8, repetition_penalty=penalty)
        with (
            open_session(bundle, "torch", "fp64", threads=1) as oracle,
            open_session(bundle, "torch", threads=1) as reference,
        ):
            (source,) = random_sources(SMALL, 1)
            ((found,),) = generate(oracle, [source], options)
            for step, chosen in enumerate(found.tokens):
                pairs = [(source, (*found.tokens[:step], token)) for token in range(SMALL.target_vocab)]
                values = [one.log_probs[-1] for one in Judge(oracle, reference, 8, 0.0).scored(pairs, options)]
                assert int(np.argmax(values)) == chosen

    def test_decodes_obey_it(self, bundle):
        with open_session(bundle, "torch", threads=1) as session:
            session.defaults = Defaults({"repetition_penalty": 1.8})
            assert [search.repetition_penalty for search in searches_of(session, 10, 4)] == [1.8, 1.8]
            assert options_left_out(session) == ()

    def test_what_they_do_not_obey_is_in_the_result(self, bundle):
        with open_session(bundle, "torch", "fp64") as oracle, open_session(bundle, "torch") as session:
            session.defaults = Defaults({"coverage_penalty": 0.5, "sample": True, "beam": 4})
            result = parity_of_sessions(oracle, session, session, [[5, 6]], ParityOptions(max_length=2))
        assert result.left_out == ("sampling", "coverage penalty")

    def test_a_divergence_that_only_the_penalty_makes_large_is_no_tie(self):
        """A and B are equal but for the penalty on A, which both searches have emitted before."""
        first = [0.01] * 8
        first[A] = 0.93
        even = [0.02] * 8
        even[A], even[B] = 0.44, 0.44
        table, other = {(): first, (A,): even}, {(): first, (A,): [*even[:A], 0.9, *even[A + 1 :]]}
        options = SearchOptions(max_length=2, repetition_penalty=1.5)
        arm = Arm(Scripted(other), Judge(Scripted(table, "fp64"), Scripted(table), 4, 1e-6))
        ((result,), _) = compare_decodes(Scripted(table), "PyTorch", [arm], [[3]], options, 4)
        (divergence,) = result.divergences
        assert (divergence.reference, divergence.candidate) == ((A, B), (A, A))
        assert divergence.verdict == "bug"
        assert divergence.margin == pytest.approx(-np.log(0.44) * 0.5)


class TestBeams:
    def judged(self, exact, wanted, given, noise=0.0, usual=0.0):
        oracle, reference = Scripted(exact, "fp64"), Scripted(wanted, noise=noise)
        arm = Arm(Scripted(given), Judge(oracle, reference, 4, usual))
        ((result,), _) = compare_decodes(reference, "PyTorch", [arm], [[3]], SearchOptions(max_length=6, beam=2), 4)
        (divergence,) = result.divergences
        assert divergence.reference == (B, END)
        return divergence

    def test_a_tie_among_beams_excuses_outputs_of_other_scores(self):
        divergence = self.judged(pruning(0.2, 0.2), pruning(0.2 + 1e-6, 0.2), pruning(0.2, 0.2 + 1e-6))
        assert (divergence.verdict, divergence.kind) == ("tie", "beams")
        # Two prefixes of one token each, of the same probability: logits are logarithms down to that of 0.02.
        near = Rounding("fp64", -np.log(0.02), (), 8).log_prob
        assert divergence.margin == pytest.approx(0.0, rel=0, abs=2 * near)

    def test_the_last_place_of_the_precision_is_always_free(self):
        """Even where PyTorch makes no error at all."""
        exact = pruning(0.2 + 1e-7, 0.2)
        divergence = self.judged(exact, exact, pruning(0.2, 0.2 + 1e-6))
        assert (divergence.verdict, divergence.kind) == ("drift", "beams")
        assert 0 < divergence.margin < divergence.budget < 1e-5

    def test_pytorch_is_not_judged_by_its_luckiest_step(self):
        cases = [pruning(0.21, 0.19), pruning(0.21, 0.19), pruning(0.19, 0.21)]
        assert self.judged(*cases, usual=0.02).verdict == "bug"
        assert self.judged(*cases, usual=0.03).verdict == "drift"

    def test_of_several_prefixes_the_gap_least_explained_counts(self):
        exact = Scripted({(): [0.01, 0.01, 0.01, 0.5, 0.4, 0.05, 0.01, 0.01]}, "fp64")
        judge = Judge(exact, Scripted({(): [0.01, 0.01, 0.01, 0.5, 0.4, 0.05, 0.01, 0.01]}), 4, 0.01)
        for fork in (([(A,)], [(B,), (C,)]), ([(C,), (B,)], [(A,)])):
            scored = judge.scored([([3], prefix) for side in fork for prefix in side], SearchOptions(beam=2))
            first = len(fork[0])
            assert widest_gap(scored[:first], scored[first:]).margin == pytest.approx(np.log(0.5 / 0.05))

    def test_a_beam_that_was_clearly_better_must_be_kept(self):
        divergence = self.judged(pruning(0.21, 0.19), pruning(0.21, 0.19), pruning(0.19, 0.21))
        assert (divergence.verdict, divergence.kind) == ("bug", "scores")
        assert divergence.margin > 0.1

    def test_what_pytorch_itself_gets_wrong_is_the_budget(self):
        """log(0.21 / 0.19) is 0.1: four times an error of 0.02 does not reach it, of 0.03 does."""
        cases = [pruning(0.21, 0.19), pruning(0.21, 0.19), pruning(0.19, 0.21)]
        assert self.judged(*cases, noise=0.02).verdict == "bug"
        assert self.judged(*cases, noise=0.03).verdict == "drift"
        assert self.judged(*cases, noise=0.4).verdict == "tie"

    def test_outputs_of_one_score_are_a_tie(self):
        table = {(): [0, 0, 0, 0.5, 0.5, 0, 0, 0], (A,): [0, 0, 1, 0, 0, 0, 0, 0], (B,): [0, 0, 1, 0, 0, 0, 0, 0]}
        lean = {**table, (): [0, 0, 0, 0.5, 0.5001, 0, 0, 0]}
        table, lean = ({k: [p or 1e-9 for p in row] for k, row in t.items()} for t in (table, lean))
        divergence = self.judged(table, lean, table)
        assert (divergence.verdict, divergence.kind, divergence.candidate) == ("tie", "scores", (A, END))


class TestStopping:
    """Searches that keep the same prefixes may still stop at different steps."""

    RUNNING = ((A, B), (A, C))

    def run(self, steps):
        trail = [(np.array([0]), np.array([[A, B]]), np.array([[0, 0]]))]
        trail += [(np.array([0]), np.array([[B, C]]), np.array([[0, 0]]))] * (steps - 1)
        return Traced([(A, B, END)], trail, [(C, END)])

    def test_what_let_one_stop_and_what_kept_the_other_going_is_found(self):
        assert stop_of(self.run(2), self.run(1), 0, END) == ((C, END), [(A, B), (A, C)])
        assert stop_of(self.run(1), self.run(2), 0, END) == ((C, END), [(A, B), (A, C)])
        assert stop_of(self.run(2), self.run(2), 0, END) is None

    @pytest.mark.parametrize(("off", "verdict", "kind"), [(1e-7, "tie", "stop"), (0.05, "bug", "scores")])
    def test_a_tie_between_them_excuses_outputs_of_other_scores(self, off, verdict, kind):
        """The best running prefix, (A, B), has as much as the worst hypothesis, (C, END), but for `off`."""
        half = [0.5 if token == B else 0.5 / 7 for token in range(8)]
        end = [0.5 + off if token == END else (0.5 - off) / 7 for token in range(8)]
        first = [{A: 0.3, C: 0.3, B: 0.1}.get(token, 0.3 / 5) for token in range(8)]
        table = {(): first, (A,): half, (C,): end, (B,): half}
        judge = Judge(Scripted(table, "fp64"), Scripted(table, noise=0.0), 4, 1e-6)
        case = Diverged(0, [3], (A, B), (B, A), None, ((C, END), list(self.RUNNING)))
        (divergence,) = judge.beams([case], SearchOptions(beam=2, length_penalty=1.0))
        assert (divergence.verdict, divergence.kind) == (verdict, kind)
